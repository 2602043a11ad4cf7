"""Test doubles that race: each is a build with one guard taken out, and the check which the real one passes must catch it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import host_fallback.commit
import zos.edits
from tests.reference import assert_bitwise_equal
from zos.allocator import StateSlotAllocator
from zos.cli.compare import metadata_arrays
from zos.edits import NUM_BUFFERS, StagedEdits
from zos.metadata import DecodeMetadata
from zos.requests import RequestState
from zos.streams import StreamOrder

LONG = 100_000_000  # cycles, about 50 ms: longer than any host call takes to overtake it

Patch = pytest.MonkeyPatch


def service(device: str = "cpu", **options: Any) -> zos.MetadataService:
    svc = zos.MetadataService(capacity=16, max_batch=4, device=device, **options)
    svc.admit(state_id=3, q_start=1000)
    svc.set_batch([3], batch=1)
    return svc


# ---- the checks ----------------------------------------------------------------------------------------------------------------


def check_buffers_are_not_overwritten(patch: Patch) -> None:
    """Flushes are packed while the launches that read earlier ones are held back; each launch must apply its own flush."""
    svc = service()
    svc.flush()
    launch, held, seen = svc._edits.launch, deque[int](), []

    def run_one() -> None:
        held.popleft()
        launch()
        seen.append(int(svc.table.seqlen_q[3]))

    svc._edits.launch = lambda: held.append(1)
    patch.setattr(zos.edits.time, "sleep", lambda seconds: run_one())  # a flush that waits lets the device go on
    expected = [1 + number % 6 for number in range(NUM_BUFFERS + 20)]
    for seqlen_q in expected:
        svc.set_seqlen_q(3, seqlen_q)
        svc.flush()
    while held:
        run_one()
    assert seen == expected


def check_buffers_are_not_overwritten_on_the_device(patch: Patch) -> None:
    """The same behind a busy stream: every prepare sees the length that was set for it."""
    svc = service("cuda", metadata_slots=1)
    svc.warmup()
    svc.prepare()
    expected = [1 + number % 6 for number in range(NUM_BUFFERS + 20)]
    seen = torch.zeros(len(expected), dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for number, seqlen_q in enumerate(expected):
        svc.set_seqlen_q(3, seqlen_q)
        seen[number : number + 1].copy_(svc.prepare().seqlens_q)
    assert seen.tolist() == expected


def check_slot_in_flight_is_not_reused(patch: Patch) -> None:
    """A request's slot goes to another only when the records of all steps that had it in a row are read."""
    svc = zos.MetadataService(2, 1, device="cpu")
    in_flight: deque[set[int]] = deque()  # states of the steps whose records the host has not read

    def step(metadata: DecodeMetadata) -> torch.Tensor:
        in_flight.append(set(metadata.tickets[:, 0].tolist()))
        return metadata.seqlens_q

    loop = zos.DecodeLoop(svc, step)
    publish = svc.slot(0).mailbox.publish  # type: ignore[union-attr]
    first, second = loop.submit(), loop.submit()
    loop.run()
    svc.slot(0).mailbox.publish = lambda: None  # type: ignore[union-attr]
    loop.run(steps=3)
    in_flight.popleft()  # the record of the first was read
    loop.cancel(first)
    loop.cancel(second)
    for _ in range(4):
        third = loop.submit(q_start=500)
        flying = set().union(*in_flight)
        loop.run()
        assert third.state_id not in flying, f"state {third.state_id} is in a step in flight"
        publish()
        in_flight.clear()
        loop.run()
        assert third.state is RequestState.RUNNING
        loop.cancel(third)


def check_results_count_once(patch: Patch) -> None:
    """The same result arrives three times, and once more after the step that followed."""
    svc = service()
    svc.admit(state_id=4, q_start=50)
    svc.set_batch([3, 4], batch=2)
    metadata = svc.prepare()
    tickets, kept = metadata.tickets.clone(), torch.tensor([4, 6], dtype=torch.int32)
    for _ in range(3):
        svc.commit(metadata, kept)
    assert svc.table.q_start[[3, 4]].tolist() == [1004, 56]
    svc.commit(svc.prepare(), kept)
    metadata.tickets.copy_(tickets)
    svc.commit(metadata, kept)
    assert svc.table.q_start[[3, 4]].tolist() == [1008, 62]
    assert svc.counters()["duplicate"] == 2 * 3


def check_warmup_moves_nothing(patch: Patch, device: str = "cpu") -> None:
    """A warm-up between a step and its result: tickets, table, counters and records are as without it."""
    svc = service(device)
    svc.attach_mailbox()
    loop = zos.DecodeLoop(svc, lambda metadata: torch.full_like(metadata.seqlens_q, 2))
    metadata = svc.prepare()
    before, records = metadata_arrays(metadata), svc.table.records.clone()
    svc.table.seqlen_q[3] = 4  # a prepare of the live batch would show
    records[3, 1] = 4
    if device == "cuda":
        loop.capture([1])
    svc.warmup()
    for name, array in metadata_arrays(metadata).items():
        assert_bitwise_equal(array, before[name], name)
    assert_bitwise_equal(svc.table.records, records, "records")
    assert svc.drain() == []
    svc.commit(metadata, metadata.seqlens_q)
    assert [record.step for record in svc.drain()] == [1]
    assert svc.table.q_start[3].item() == 1006


def check_edits_are_not_captured(patch: Patch) -> None:
    """An edit staged before a capture applies once, whatever is captured and however often it is replayed."""
    svc = service("cuda")
    svc.warmup()
    svc.flush()
    graph = torch.cuda.CUDAGraph()
    svc.reset(3)
    with torch.cuda.graph(graph):
        try:
            metadata = svc.prepare()
        except zos.EditsDuringCaptureError:
            metadata = svc.slot_metadata(0, 1, 6)
            svc.launch_prepare(metadata)
        svc.commit(metadata, metadata.seqlens_q)
    svc.flush()
    for _ in range(3):
        graph.replay()
        svc.launched(1)
    assert svc.table.q_start[3].item() == 18
    svc.set_seqlen_q(3, 2)
    svc.flush()
    graph.replay()
    svc.launched(1)
    assert svc.table.q_start[3].item() == 20, "an edit was lost: captured launches took the buffers of later flushes"


def check_edits_wait_for_other_streams(patch: Patch) -> None:
    """A reset from another stream takes effect after the prepare that the busy stream has not begun."""
    svc = service("cuda")
    svc.warmup()
    svc.prepare()
    compute, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(other):  # torch and the kernels are loaded there too
        svc.set_seqlen_q(3, 6)
        svc.flush()
    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(LONG)
        metadata = svc.prepare()
    with torch.cuda.stream(other):
        svc.reset(3)
        svc.flush()
    torch.cuda.synchronize()
    assert metadata.kv_swa_index_offset_len[0].tolist() == [471, 128]
    assert svc.table.q_start[3].item() == 0


# ---- the builds with a guard taken out -------------------------------------------------------------------------------------


def overwrites_buffers_early(patch: Patch) -> None:
    patch.setattr(StagedEdits, "_wait_for_buffer", lambda edits: None)


def hands_slots_on_at_once(patch: Patch) -> None:
    retire = StateSlotAllocator.retire

    def at_once(allocator: StateSlotAllocator, state_id: int, after_step: int) -> None:
        retire(allocator, state_id, after_step)
        allocator.seen(after_step)

    patch.setattr(StateSlotAllocator, "retire", at_once)


def takes_every_result_for_new(patch: Patch) -> None:
    commit_row = host_fallback.commit._commit_row.py_func

    def without_the_check(records: np.ndarray, token_ids: np.ndarray, ticket: np.ndarray, *rest: Any) -> None:
        ticket = ticket.copy()
        ticket[2] = records[ticket[0], 2]
        commit_row(records, token_ids, ticket, *rest)

    patch.setattr(host_fallback.commit, "_commit_row", without_the_check)
    patch.setattr(host_fallback.commit, "_commit", host_fallback.commit._commit.py_func)


def warms_up_on_the_live_batch(patch: Patch) -> None:
    patch.setattr(
        zos.MetadataService, "private_metadata", lambda svc, batch, tokens: svc.slot_metadata(0, batch, tokens)
    )


def captures_edits(patch: Patch) -> None:
    capturing, join, mark = StreamOrder.capturing, StreamOrder.join, StreamOrder.mark
    flush = zos.MetadataService.flush

    def without_the_check(svc: zos.MetadataService) -> None:
        patch.setattr(StreamOrder, "capturing", lambda order: False)
        for call in (
            "join",
            "mark",
        ):  # nor can an event from outside be awaited in a capture, or one recorded for later
            patch.setattr(StreamOrder, call, lambda order: None)
        flush(svc)
        for call, as_it_was in (("capturing", capturing), ("join", join), ("mark", mark)):
            patch.setattr(StreamOrder, call, as_it_was)

    patch.setattr(zos.MetadataService, "flush", without_the_check)


def does_not_order_streams(patch: Patch) -> None:
    patch.setattr(StreamOrder, "join", lambda order: None)


def gpu(check: Any, build: Any) -> Any:
    return pytest.param(check, build, marks=pytest.mark.gpu)


def check_warmup_moves_nothing_on_the_device(patch: Patch) -> None:
    """As on the CPU, and a loop captures, which runs its step."""
    check_warmup_moves_nothing(patch, "cuda")


@pytest.mark.parametrize(
    ("check", "build"),
    [
        (check_buffers_are_not_overwritten, overwrites_buffers_early),
        gpu(check_buffers_are_not_overwritten_on_the_device, overwrites_buffers_early),
        (check_slot_in_flight_is_not_reused, hands_slots_on_at_once),
        (check_results_count_once, takes_every_result_for_new),
        (check_warmup_moves_nothing, warms_up_on_the_live_batch),
        gpu(check_warmup_moves_nothing_on_the_device, warms_up_on_the_live_batch),
        gpu(check_edits_are_not_captured, captures_edits),
        gpu(check_edits_wait_for_other_streams, does_not_order_streams),
    ],
    ids=lambda argument: argument.__name__,
)
def test_race(check: Callable[[Patch], None], build: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """The check passes as things are, and fails on the build without the guard."""
    with monkeypatch.context() as patch:
        check(patch)
    with monkeypatch.context() as patch:
        build(patch)
        with pytest.raises(AssertionError):
            check(patch)
