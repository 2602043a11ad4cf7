"""Test that each field report's test fails where the library has the reported fault: one broken build per id.

A build is broken by what the report says went wrong: outputs that a prepare left unwritten, results matched by row, a buffer
read from its allocation's start. On the CPU, whose kernels Python can stand in front of; where only a GPU has the fault, on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import host_fallback
import zos
from device_kernels.module import Kernel
from tests import test_field_reports as reports
from tests import test_prefill_metadata as prefill
from tests import test_ring_store as ring_store
from tests.reference import POISON
from zos.cli.nsys_export import Export, read_export

Patch = pytest.MonkeyPatch
Operands = dict[str, Any]
REPORTS = [f"A{number:02}" for number in range(1, 29)]
BY_TOKEN = ("kv_swa_index_offset_len", "kv_swa_index", "kv_swa_full_index_pivots", "swa_len", "positions", "swa_write_slot",
            "token_row", "token_state_id")  # fmt: skip


# ---- how a build is broken -----------------------------------------------------------------------------------------------------


def prepared(patch: Patch, change: Callable[[Operands, dict[str, torch.Tensor]], None], stem: str = "decode") -> None:
    """Let every prepare end with `change(operands, outputs as they were before)`."""
    room, name = getattr(host_fallback, f"{stem}_metadata"), f"bind_prepare_v4_{stem}_metadata"
    bind = getattr(room, name)

    def bind_broken(**operands: Any) -> Callable[[], None]:
        launch = bind(**operands)

        def broken() -> None:
            before = {key: operands[key].clone() for key in BY_TOKEN if operands.get(key) is not None}
            launch()
            change(operands, before)

        return broken

    patch.setattr(room, name, bind_broken)


def committed(patch: Patch, change: Callable[[Operands, torch.Tensor], torch.Tensor]) -> None:
    """Let every commit get `change(operands, num_kept)` for its num_kept."""
    bind = host_fallback.commit.bind_commit

    def bind_broken(**operands: Any) -> Callable[..., None]:
        launch = bind(**operands)
        return lambda num_kept, *others: launch(change(operands, num_kept), *others)

    patch.setattr(host_fallback.commit, "bind_commit", bind_broken)


def operator(patch: Patch, name: str, broken: Callable[..., None]) -> None:
    """Let `torch.ops.zos.<name>` be `broken(the real one, *arguments)`."""
    real = getattr(torch.ops.zos, name)
    patch.setattr(torch.ops.zos, name, lambda *arguments: broken(real, *arguments))


def method(patch: Patch, name: str, broken: Callable[..., Any]) -> None:
    """Let a service's method be `broken(the real one, service, *arguments)`."""
    real = getattr(zos.MetadataService, name)
    patch.setattr(zos.MetadataService, name, lambda svc, *arguments, **named: broken(real, svc, *arguments, **named))


# ---- the faults, in the order of the reports -------------------------------------------------------------------------------


def rows_past_the_live_ones_stay(patch: Patch) -> None:
    """A replay writes the live rows alone."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        live = int(operands["num_tokens"])
        for name, old in before.items():
            operands[name][live:] = old[live:]

    prepared(patch, change)


def minus_one_becomes_the_last_slot(patch: Patch) -> None:
    """Division and modulo make an address of -1."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        slots = operands["swa_write_slot"]
        slots[slots < 0] += operands["records"].shape[0] * operands["ring"]

    prepared(patch, change)


def padding_shifts_results(patch: Patch) -> None:
    """Results are those of the row before, once a dummy row has come."""

    def change(operands: Operands, num_kept: torch.Tensor) -> torch.Tensor:
        dummies = (operands["tickets"][:, 0] < 0).cumsum(0)
        return num_kept[(torch.arange(len(num_kept)) - dummies).clamp(min=0)]

    committed(patch, change)


def ids_are_overwritten_before_the_launch(patch: Patch) -> None:
    """The buffer holds the next step's ids when the queued launch reads it."""
    method(
        patch,
        "set_batch",
        lambda real, svc, ids, *rest, **named: real(svc, [7, 8] if ids == [3, 4] else ids, *rest, **named),
    )


def edits_overtake_the_step(patch: Patch) -> None:
    """The kernel of the step before runs after the edit."""

    def reset(real: Any, svc: zos.MetadataService, state_id: int) -> None:
        real(svc, state_id)
        svc.flush()
        svc.slot_metadata(0, 1, svc.geometry.tokens_per_step).launch_prepare()

    method(patch, "reset", reset)


def results_follow_the_row(patch: Patch) -> None:
    """Counts go to whoever stands in the row by now."""
    method(patch, "commit", lambda real, svc, metadata, *results: real(svc, svc.prepare(), *results))


def generations_are_not_asked(patch: Patch) -> None:
    """A late result moves the slot's new tenant."""

    def change(operands: Operands, num_kept: torch.Tensor) -> torch.Tensor:
        live = operands["tickets"][:, 0] >= 0
        its = operands["records"][operands["tickets"][live, 0].long()]
        operands["tickets"][live, 1:3] = its[:, [6, 2]]  # generation, q_start
        return num_kept

    committed(patch, change)


def one_key_more(patch: Patch) -> None:
    """The window's bound is taken for inclusive."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        length = operands["kv_swa_index_offset_len"]
        length[:, 1] += (length[:, 1] == operands["window"]).int()

    prepared(patch, change)


def rejected_entries_stay_in_the_row(patch: Patch) -> None:
    """The row's slots are counted from the ring's head, past what was rejected."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        index, ring = operands["kv_swa_index"], operands["ring"]
        index.copy_(torch.where(index >= 0, index // ring * ring + (index + 5) % ring, index))

    prepared(patch, change)


def the_window_is_always_whole(patch: Patch) -> None:
    """What a cut prefix lacks is not asked for."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        operands["swa_len"].fill_(operands["window"])

    prepared(patch, change, "prefill")


def any_ring_will_do(patch: Patch) -> None:
    """The number of drafts that a ring protects is a constant."""
    init = zos.RingGeometry.__init__

    def lenient(self: zos.RingGeometry, window: int = 128, draft_tokens: int = 5, ring: int | None = None) -> None:
        init(self, window, min(draft_tokens, 6), ring)

    patch.setattr(zos.RingGeometry, "__init__", lenient)


def lengths_keep_the_rejected(patch: Patch) -> None:
    """Every draft counts as kept."""
    committed(patch, lambda operands, num_kept: operands["tickets"][:, 3].contiguous())


def no_result_is_one_token(patch: Patch) -> None:
    """A count of 0 is read as the bonus token alone."""
    committed(patch, lambda operands, num_kept: num_kept.clamp(min=1))


def tokens_past_a_grid_axis_stay(patch: Patch) -> None:
    """A launch that fails past 65,535 blocks leaves what was there."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        for name, old in before.items():
            operands[name][65_535:] = POISON if name == "kv_swa_index_offset_len" else old[65_535:]

    prepared(patch, change, "prefill")


def an_empty_row_takes_places(patch: Patch) -> None:
    """A row without tokens is given those of a whole one."""

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        operands["cu_seqlens_q"].copy_(torch.arange(len(operands["cu_seqlens_q"])) * operands["tokens_per_step"])

    prepared(patch, change)


def an_offset_is_dropped(patch: Patch) -> None:
    """A slice is read from where its allocation begins."""

    def commit(real: Any, svc: zos.MetadataService, metadata: Any, num_kept: Any, *others: Any) -> None:
        base = getattr(num_kept, "base", None)
        real(svc, metadata, num_kept if base is None else base[: len(num_kept)], *others)

    method(patch, "commit", commit)


def addresses_are_rounded_down(patch: Patch) -> None:
    """16 bytes at once, whatever the address."""

    def store(real: Any, values: torch.Tensor, slots: torch.Tensor, view: torch.Tensor, *back: Any) -> None:
        lower = view.storage_offset() // 16 * 16
        real(values, slots, torch.as_strided(view, view.shape, view.stride(), lower), *back)

    operator(patch, "swa_ring_store", store)


def scale_0_is_zero(patch: Patch) -> None:
    """The byte is shifted into a float's exponent: 0 gives 0.0."""

    def load(real: Any, view: torch.Tensor, plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
        real(view, plan, out, window)
        out.masked_fill_(out.abs() < 2.0**-118, 0)  # 448 * 2^-127 is less

    operator(patch, "swa_ring_load", load)


def scales_round_down(patch: Patch) -> None:
    """The largest element may pass 448, and saturates."""

    def store(real: Any, values: torch.Tensor, slots: torch.Tensor, view: torch.Tensor, *back: Any) -> None:
        real(values, slots, view, *back)
        scales = view[..., ring_store.WIDTH :]
        scales.copy_(torch.where(scales > 127, scales - 1, scales))

    operator(patch, "swa_ring_store", store)


def missing_history_is_not_written(patch: Patch) -> None:
    """Rows that a mask hides keep their NaN, and 0 times NaN is NaN."""

    def load(real: Any, view: torch.Tensor, plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
        before = out.clone()
        real(view, plan, out, window)
        zeros = (out == 0).all(1)
        out[zeros] = before[zeros]

    operator(patch, "swa_ring_load", load)


def another_stream_stays_current(patch: Patch) -> None:
    """A call leaves what it had made current."""

    def check(real: Any, svc: zos.MetadataService) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        real(svc)

    method(patch, "check", check)


def values_are_cut_to_their_width(patch: Patch) -> None:
    """What does not fit loses its upper bits."""
    bind = Kernel.bind

    def cut(kernel: Kernel, device: Any, blocks: Any, threads: Any, *values: Any) -> Callable[[], None]:
        widths = {"q": 64, "i": 32, "P": 64}
        layout = [code for code in "qifP"]
        fitting = [
            (int(value) + 2 ** (widths[code] - 1)) % 2 ** widths[code] - 2 ** (widths[code] - 1) if code in "qi" else
            abs(int(value)) % 2**64 if code == "P" else float(value)
            for code, value in zip(layout, values, strict=True)
        ]  # fmt: skip
        return lambda: bind(kernel, device, blocks, threads, *fitting)()

    patch.setattr(Kernel, "bind", cut)


def modules_load_inside_captures(patch: Patch) -> None:
    """Nobody asks whether a capture is under way."""
    lenient = "import torch\ntorch.cuda.is_current_stream_capturing = lambda: False\n"
    patch.setattr(reports, "A23_FRESH_PROCESS", lenient + reports.A23_FRESH_PROCESS)


def a_ring_is_frozen_into_the_code(patch: Patch) -> None:
    """The first ring that a process, or its cache, has seen is every ring."""
    frozen = "import zos\nfirst = zos.RingGeometry(ring=134)\nzos.RingGeometry = lambda ring: first\n"
    patch.setattr(reports, "A24_OTHER_RING", frozen + reports.A24_OTHER_RING)


def updates_are_lost_at_random(patch: Patch) -> None:
    """One call in some hundreds leaves one sum as it was."""
    calls = [0]

    def change(operands: Operands, before: dict[str, torch.Tensor]) -> None:
        calls[0] += 1
        operands["cu_seqlens_q"][500:] -= int(calls[0] == 777)

    prepared(patch, change)


def compiled_mutations_are_undone(patch: Patch) -> None:
    """What an operator wrote to one view is put back when another is read."""

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(arena: torch.Tensor, wide: torch.Tensor) -> Any:
            before = arena.clone()
            result = function(arena, wide)
            arena.copy_(before)
            return result

        return run

    patch.setattr(torch, "compile", compiled)


def a_replay_writes_to_freed_memory(patch: Patch) -> None:
    """Buffers have moved since the capture: the replay writes where they were."""
    run, grown = zos.DecodeLoop.run, [False]

    def prepare_prefill(real: Any, svc: zos.MetadataService, *arguments: Any, **named: Any) -> Any:
        grown[0] = True
        return real(svc, *arguments, **named)

    def replay(loop: zos.DecodeLoop, steps: int | None = None) -> None:
        before = {name: value.clone() for name, value in reports.tensors_of(loop.metadata).items()} if grown[0] else {}
        run(loop, steps)
        for name in set(before) & set(BY_TOKEN):
            loop.metadata.operands[name].copy_(before[name])

    method(patch, "prepare_prefill", prepare_prefill)
    patch.setattr(zos.DecodeLoop, "run", replay)


def ranges_are_seen_once(patch: Patch) -> None:
    """The range stood inside the captured code."""

    def read(path: Path) -> Export:
        export = read_export(path)
        return dataclasses.replace(export, ranges=export.ranges[:1])

    patch.setattr(reports, "read_export", read)


# (id, what breaks the build, the report's test, what it says)
ON_THE_CPU: list[tuple[str, Callable[[Patch], None], Callable[[], None], str]] = [
    ("A01", rows_past_the_live_ones_stay, lambda: reports.test_a01_graph_rows_are_never_stale("cpu"), "of "),
    ("A02", minus_one_becomes_the_last_slot, lambda: reports.test_a02_padding_has_no_address("cpu"), "2143"),
    ("A03", padding_shifts_results, lambda: reports.test_a03_padding_does_not_shift_results("cpu"), "101, 50"),
    ("A04", ids_are_overwritten_before_the_launch, lambda: reports.test_a04_buffers_of_a_queued_step_are_left_alone("cpu"), "471"),
    ("A05", edits_overtake_the_step, lambda: reports.test_a05_edits_wait_for_the_step_before("cpu"), "471"),
    ("A06", results_follow_the_row, lambda: reports.test_a06_results_follow_the_sequence_not_the_row("cpu"), "701"),
    ("A07", generations_are_not_asked, lambda: reports.test_a07_reused_slot_keeps_nothing("cpu"), "402"),
    ("A08", one_key_more, lambda: reports.test_a08_window_has_w_keys("cpu"), "129"),
    ("A09", rejected_entries_stay_in_the_row, lambda: reports.test_a09_rejected_drafts_leave_the_window("cpu"), "465"),
    ("A10", the_window_is_always_whole, lambda: prefill.test_a10_a_cut_prefix_shortens_the_window("cpu"), "65"),
    ("A11", any_ring_will_do, reports.test_a11_deeper_drafts_need_a_longer_ring, "DID NOT RAISE"),
    ("A12", lengths_keep_the_rejected, lambda: reports.test_a12_lengths_shrink_by_the_rejected("cpu"), "51"),
    ("A13", no_result_is_one_token, lambda: reports.test_a13_no_result_is_not_zero_drafts("cpu"), "21"),
    ("A14", tokens_past_a_grid_axis_stay, lambda: prefill.test_a14_figures("cpu"), "418"),
    ("A15", an_empty_row_takes_places, lambda: reports.test_a15_empty_batches_and_rows("cpu"), "12"),
    ("A16", an_offset_is_dropped, lambda: reports.test_a16_offset_of_a_view_counts("cpu"), "1002"),
    ("A17", addresses_are_rounded_down, lambda: ring_store.test_a17_any_address("cpu", 8, 584, 0), "entries"),
    ("A18", scale_0_is_zero, lambda: ring_store.test_a18_all_bytes("cpu", torch.float32), "values"),
    ("A19", scales_round_down, lambda: ring_store.test_a19_scales_round_up("cpu", 450.0, 128, 0x76), "128"),
    ("A20", missing_history_is_not_written, lambda: ring_store.test_a20_missing_history_is_zero("cpu"), "False"),
    ("A22", values_are_cut_to_their_width, reports.test_a22_values_that_do_not_fit_are_refused, "DID NOT RAISE"),
    ("A24", a_ring_is_frozen_into_the_code, reports.test_a24_no_size_is_frozen_into_a_cache, "468"),
    ("A25", updates_are_lost_at_random, lambda: reports.test_a25_no_lost_updates("cpu"), "cu_seqlens_q"),
    ("A26", compiled_mutations_are_undone, lambda: reports.test_a26_compiled_mutation_of_one_arena("cpu"), "arena"),
    ("A27", a_replay_writes_to_freed_memory, lambda: reports.test_a27_no_buffer_of_a_graph_moves("cpu"), "differ|index|len"),
    ("A28", ranges_are_seen_once, reports.test_a28_ranges_stand_around_replays, "zos.step"),
]  # fmt: skip
ON_A_GPU: list[tuple[str, Callable[[Patch], None], Callable[[], None], str]] = [
    ("A21", another_stream_stays_current, reports.test_a21_current_device_stays, "current_stream"),
    ("A23", modules_load_inside_captures, reports.test_a23_no_module_load_inside_a_capture, "471"),
]


def assert_found(patch: Patch, breaks: Callable[[Patch], None], test: Callable[[], None], words: str) -> None:
    """The test, which passes on the sound build, fails on the broken one in these words."""
    with patch.context() as broken:
        breaks(broken)
        with pytest.raises((AssertionError, pytest.fail.Exception), match=words):
            test()


@pytest.mark.parametrize(("report", "breaks", "test", "words"), ON_THE_CPU, ids=[case[0] for case in ON_THE_CPU])
def test_fault_is_found(
    monkeypatch: Patch, report: str, breaks: Callable[[Patch], None], test: Callable[[], None], words: str
) -> None:
    """A test that passes whatever the build does would prove nothing."""
    assert_found(monkeypatch, breaks, test, words)


@pytest.mark.gpu
@pytest.mark.parametrize(("report", "breaks", "test", "words"), ON_A_GPU, ids=[case[0] for case in ON_A_GPU])
def test_fault_is_found_on_a_gpu(
    monkeypatch: Patch, report: str, breaks: Callable[[Patch], None], test: Callable[[], None], words: str
) -> None:
    """The same for what the CPU does not have."""
    stream = torch.cuda.current_stream()
    try:
        assert_found(monkeypatch, breaks, test, words)
    finally:
        torch.cuda.set_stream(stream)


def test_every_report_has_its_fault() -> None:
    """No id is forgotten, and none stands twice; each has a test that is named after it."""
    assert sorted(case[0] for case in (*ON_THE_CPU, *ON_A_GPU)) == REPORTS
    named = {
        name[5:8].upper()
        for module in (reports, prefill, ring_store)
        for name in vars(module)
        if name.startswith("test_a")
    }
    assert set(REPORTS) <= named
