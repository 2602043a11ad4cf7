"""Test that faults reported against other engines cannot happen here: one test per id of the field reports, in their words."""

from __future__ import annotations

import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zos
from device_kernels.module import COMPILE_OPTIONS, Kernel
from host_fallback.decode_metadata import prepare_v4_decode_metadata as prepare_on_host
from tests.reference import POISON, assert_bitwise_equal, poison, positions_in_ring
from zos.cli.compare import metadata_arrays
from zos.cli.nsys_export import read_export

A04_REPEATS, A04_CYCLES = 1000, 200_000  # a tenth of a millisecond: as long as staging takes
A05_CYCLES = 100_000_000  # about 50 ms
A27_BYTES = {"cuda": 2**30, "cpu": 2**24}

PAD = {"kv_swa_index_offset_len": 0, "kv_swa_index": -1, "kv_swa_full_index_pivots": 0, "swa_len": 0, "positions": 0,
       "swa_write_slot": -1, "token_row": -1, "token_state_id": -1}  # fmt: skip


def service(device: str, lengths: dict[int, int], max_batch: int = 8, **options: Any) -> zos.MetadataService:
    """Make a service with these states (state -> length), six tokens a step."""
    svc = zos.MetadataService(capacity=16, max_batch=max_batch, device=device, **options)
    for state_id, length in lengths.items():
        svc.admit(state_id=state_id, q_start=length, seqlen_q=6)
    return svc


def int32(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def offset_len(metadata: zos.DecodeMetadata, place: int) -> list[int]:
    found: list[int] = metadata.kv_swa_index_offset_len[place].tolist()
    return found


def lengths_of(svc: zos.MetadataService, *states: int) -> list[int]:
    return [int(svc.table.q_start[state]) for state in states]


def test_a01_graph_rows_are_never_stale(device: str) -> None:
    """Every row of a replay is fresh, whatever an earlier replay of the same graph left there."""
    svc = service(device, {5: 200, 2: 130, 7: 10, 0: 11, 1: 12, 3: 13, 4: 14, 6: 15})
    loop = zos.DecodeLoop(svc, lambda metadata: torch.zeros_like(metadata.seqlens_q), buckets=(8,))
    eager = service(device, {5: 200, 2: 130, 7: 10, 0: 11, 1: 12, 3: 13, 4: 14, 6: 15})
    for states in ([5, 2, 7], [5, 2, 7, 0, 1, 3, 4, 6], [5], [5, 2, 7]):
        loop.set_batch(states)
        loop.run()
        eager.set_batch(states)
        poison(eager.slot_metadata(0, 8, 48))
        fresh = metadata_arrays(eager.prepare())
        for name, array in metadata_arrays(loop.metadata).items():
            assert_bitwise_equal(array, fresh[name], f"{name} of {states}")
    assert [offset_len(loop.metadata, place) for place in (0, 6, 12)] == [[743, 128], [271, 128], [938, 11]]
    for name, pad in PAD.items():
        assert (getattr(loop.metadata, name)[18:] == pad).all(), name


def test_a02_padding_has_no_address(device: str) -> None:
    """Padded tokens carry -1 and rejected ones no slot either: nothing a store could turn into a legal address."""
    svc = service(device, {0: 0}, max_batch=2)
    svc.set_batch([0, -1], batch=2)
    metadata = svc.prepare()
    assert metadata.swa_write_slot.tolist() == [0, 1, 2, 3, 4, 5] + [-1] * 6
    assert metadata.compression_write_slot[2].tolist() == [0, 1, 2, 3, 4, 5] + [-1] * 6
    ring = torch.full((4 * 134,), 0x11, dtype=torch.uint8, device=device)
    live = metadata.swa_write_slot[metadata.swa_write_slot >= 0]
    ring[live] = 0xEE
    assert (ring == 0xEE).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a03_padding_does_not_shift_results(device: str) -> None:
    """A dummy row between real ones takes no result and shifts none; its garbage count moves nobody."""
    svc = service(device, {0: 100, 1: 50, 2: 60, 3: 70})
    svc.set_batch([2, -1, 0, -1], batch=4)
    svc.commit(svc.prepare(), int32(device, 3 + 1, 5 + 1, 0 + 1, 5 + 1))
    assert lengths_of(svc, 0, 1, 2, 3) == [101, 50, 64, 70]


def test_a04_buffers_of_a_queued_step_are_left_alone(device: str) -> None:
    """Ids staged for the next step do not reach the one whose launch is still queued."""
    svc = service(device, dict.fromkeys((3, 4, 7, 8), 1000), max_batch=2)
    svc.warmup()
    svc.flush()
    for _ in range(A04_REPEATS):
        if device == "cuda":
            torch.cuda._sleep(A04_CYCLES)
        offsets = []
        for states in ([3, 4], [7, 8]):
            svc.set_batch(states)
            offsets.append(svc.prepare().kv_swa_index_offset_len[[0, 6], 0].clone())
        assert [found.tolist() for found in offsets] == [[471, 605], [1007, 1141]]


def test_a05_edits_wait_for_the_step_before(device: str) -> None:
    """A reset from another stream takes effect after the prepare that was launched before it, and before the next."""
    svc = service(device, {3: 1000}, max_batch=1)
    svc.set_batch([3])
    svc.warmup()
    svc.prepare()
    compute, other = (torch.cuda.Stream() if device == "cuda" else None for _ in range(2))
    with torch.cuda.stream(compute):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(A05_CYCLES)
        metadata = svc.prepare()
    with torch.cuda.stream(other):
        svc.reset(3)
        svc.set_valid_start(3, 0)
        svc.flush()
    if device == "cuda":
        assert compute is not None and not compute.query(), "the stream was not busy: the test proves nothing"
        torch.cuda.synchronize()
    assert offset_len(metadata, 0) == [471, 128]
    assert lengths_of(svc, 3) == [0]
    assert offset_len(svc.prepare(), 0) == [402, 1]


def test_a06_results_follow_the_sequence_not_the_row(device: str) -> None:
    """Results of a step are applied after its rows were compacted and given to others."""
    svc = service(device, {1: 300, 2: 500, 5: 700}, metadata_slots=2)
    svc.set_batch([1, 2, 5], batch=3)
    metadata = svc.prepare()
    svc.release(1)
    svc.admit(state_id=9, q_start=40)
    svc.set_batch([5, 2, 9], batch=3)
    svc.flush()
    svc.commit(metadata, int32(device, 0 + 1, 4 + 1, 1 + 1))
    assert lengths_of(svc, 2, 5, 9) == [505, 702, 40]
    assert svc.prepare().seqlens_k.tolist() == [708, 511, 46]


def test_a07_reused_slot_keeps_nothing(device: str) -> None:
    """A new tenant whose first step is a decode sees none of the old tenant's values, and the old result is dropped."""
    svc = service(device, {3: 1000})
    svc.set_valid_start(3, 400)
    svc.set_batch([3], batch=1)
    old = svc.prepare()
    svc.release(3)
    svc.admit(state_id=3, q_start=64)
    svc.flush()
    svc.commit(old, int32(device, 5 + 1))
    metadata = svc.prepare()
    assert offset_len(metadata, 0) == [402, 65]
    assert metadata.positions.tolist() == list(range(64, 70))
    assert svc.table.swa_valid_start[3].item() == 0


def test_a08_window_has_w_keys(device: str) -> None:
    """The window is W keys, not W + 1, at its edges and inside."""
    svc = service(device, {0: 126, 3: 1000})
    svc.set_batch([0, 3], batch=2)
    metadata = svc.prepare()
    assert [offset_len(metadata, place) for place in (0, 1, 2)] == [[0, 127], [0, 128], [1, 128]]
    assert offset_len(metadata, 6) == [471, 128]
    row = metadata.kv_swa_index[6].tolist()
    held = positions_in_ring(1001, 134)
    assert [held[slot - 3 * 134] for slot in row] == list(range(873, 1001))


def test_a09_rejected_drafts_leave_the_window(device: str) -> None:
    """After a step of which only the bonus token was kept, no row sees a slot of a rejected draft at a wrong position."""
    svc = service(device, {3: 1000})
    svc.set_batch([3], batch=1)
    held = dict(enumerate(positions_in_ring(1000, 134), start=3 * 134))  # slot -> position, as the slots are written

    def write(metadata: zos.DecodeMetadata) -> None:
        held.update(zip(metadata.swa_write_slot.tolist(), metadata.positions.tolist(), strict=True))

    first = svc.prepare()
    assert first.swa_write_slot.tolist() == list(range(464, 470))
    write(first)
    svc.commit(first, int32(device, 1))
    metadata = svc.prepare()
    write(metadata)  # a step writes before it attends
    assert offset_len(metadata, 0) == [472, 128]
    assert offset_len(metadata, 5) == [477, 128]
    row = metadata.kv_swa_index[0].tolist()
    assert row[-1] == 465
    assert not set(row) & set(range(466, 472))
    for j in range(6):
        position = 1001 + j
        assert [held[slot] for slot in metadata.kv_swa_index[j].tolist()] == list(range(position - 127, position + 1))


def test_a11_deeper_drafts_need_a_longer_ring() -> None:
    """No draft may take a slot that the first query still reads; a depth at which one would is refused, for every ring."""
    for drafts in range(7):
        geometry = zos.RingGeometry(window=128, draft_tokens=drafts, ring=134)
        svc = zos.MetadataService(capacity=1, max_batch=1, geometry=geometry, device="cpu")
        svc.admit(0, q_start=1000)
        svc.set_batch([0])
        metadata = svc.prepare()
        read = set(metadata.kv_swa_index[0].tolist())
        assert read == {position % 134 for position in range(873, 1001)}
        assert not read & set(metadata.swa_write_slot[1:].tolist()), f"{drafts} drafts"
        assert zos.CompressionRing(2, drafts + 1, entries=8).entries == 8
    with pytest.raises(ValueError, match="ring=134 is too short"):
        zos.RingGeometry(window=128, draft_tokens=7, ring=134)
    with pytest.raises(ValueError, match="entries=8 is too short"):
        zos.CompressionRing(2, tokens_per_step=8, entries=8)


def test_a12_lengths_shrink_by_the_rejected(device: str) -> None:
    """Three chained steps with every number of accepted drafts, without a host sync: lengths follow what was kept."""
    svc = service(device, {3: 44})
    svc.set_batch([3], batch=1)
    svc.commit(svc.prepare(), int32(device, 2 + 1))
    metadata = svc.prepare()
    assert offset_len(metadata, 0) == [402, 48]
    assert metadata.swa_len.tolist() == list(range(48, 54))
    for drafts in range(6):
        chain = service(device, {3: 44})
        chain.set_batch([3], batch=1)
        for step in range(3):
            metadata = chain.prepare()
            assert metadata.positions.tolist() == list(range(44 + step * (drafts + 1), 50 + step * (drafts + 1)))
            chain.commit(metadata, int32(device, drafts + 1))
        assert lengths_of(chain, 3) == [44 + 3 * (drafts + 1)]


def test_a13_no_result_is_not_zero_drafts(device: str) -> None:
    """A count of 0 says that there is no result and reads or moves nothing; 'no draft accepted' is a count of 1."""
    svc = service(device, {1: 10, 2: 20, 3: 30})
    svc.set_batch([1, 2, 3], batch=3)
    metadata = svc.prepare()
    svc.commit(metadata, int32(device, 3, 0, 6))
    assert lengths_of(svc, 1, 2, 3) == [13, 20, 36]
    svc.commit(metadata, int32(device, 0, 1, 0))  # the middle row's result arrives after all
    assert lengths_of(svc, 1, 2, 3) == [13, 21, 36]
    svc.check()


def test_a15_empty_batches_and_rows(device: str) -> None:
    """Nothing to do launches nothing and breaks nothing; a row without tokens takes no place and keeps its length."""
    svc = service(device, {1: 10, 2: 20, 3: 30})
    svc.set_batch([1, 2, 3], batch=3)
    assert svc.prepare().num_tokens.tolist() == [18]
    svc.set_batch([], batch=0)
    empty = svc.prepare()
    assert empty.num_tokens.tolist() == [0], "a former step's tokens are left"
    assert empty.cu_seqlens_q.tolist() == [0] and empty.positions.shape == (0,)
    svc.set_seqlen_q(2, 0)
    svc.set_batch([1, 2, 3], batch=3)
    metadata = svc.prepare()
    assert metadata.cu_seqlens_q.tolist() == [0, 6, 6, 12]
    assert metadata.token_row[6].item() == 2
    svc.commit(metadata, int32(device, 6, 6, 6))
    assert lengths_of(svc, 1, 2, 3) == [16, 20, 36]


def test_a16_offset_of_a_view_counts(device: str) -> None:
    """A slice of a larger tensor is read where it begins, also when it comes from another library."""
    svc = service(device, {3: 1000, 0: 69})
    svc.set_batch([3], batch=1)
    operands = svc.prepare().operands
    big = int32(device, 0, 0, 0, 0, 3)
    names = [argument.name for argument in torch.ops.zos.prepare_v4_decode_metadata.default._schema.arguments]
    operands = {**operands, "state_ids": big[4:]}
    operands["kv_swa_index_offset_len"].fill_(POISON)
    torch.ops.zos.prepare_v4_decode_metadata(*(operands[name] for name in names))
    assert operands["kv_swa_index_offset_len"][0].tolist() == [471, 128]

    counts: Any = np.array([9, 9, 9, 9, 2], np.int32)
    if device == "cuda":
        import cupy

        counts = cupy.asarray(counts)
    svc.commit(svc.prepare(), counts[4:])
    assert lengths_of(svc, 3) == [1002]


def use_service_of(index: int) -> None:
    """Call everything that a step needs on a service of one GPU, also in vain; the results must be that GPU's."""
    svc = service(f"cuda:{index}", {3: 1000}, max_batch=2)
    svc.attach_mailbox()
    svc.set_batch([3])
    metadata = svc.prepare()
    assert metadata.positions.device.index == index
    assert offset_len(metadata, 0) == [471, 128]
    with pytest.raises(ValueError, match="num_kept"):
        svc.commit(metadata, torch.zeros(2, dtype=torch.int64, device=f"cuda:{index}"))
    svc.commit(metadata, int32(f"cuda:{index}", 6, 0))
    svc.check()
    assert [record.kept.tolist() for record in svc.drain()] == [[6, 0]]
    loop = zos.DecodeLoop(svc, lambda metadata: metadata.seqlens_q)
    loop.set_batch([3])
    loop.run(steps=2)
    assert [record.q_start.tolist() for record in loop.drain()] == [[1012], [1018]]

    def fails(metadata: zos.DecodeMetadata) -> torch.Tensor:
        raise ArithmeticError("step failed")

    failing = zos.DecodeLoop(svc, fails)
    failing.set_batch([3])
    with pytest.raises(ArithmeticError):
        failing.run()


def check_current_device_stays(current: int, used: int) -> None:
    """Neither calls nor errors change the current device, here or in another thread."""

    def in_a_thread() -> int:
        torch.cuda.set_device(current)
        use_service_of(used)
        return torch.cuda.current_device()

    before = torch.cuda.current_device()
    torch.cuda.set_device(current)
    try:
        stream = torch.cuda.current_stream()
        use_service_of(used)
        assert torch.cuda.current_device() == current
        assert torch.cuda.current_stream() == stream
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(in_a_thread).result() == current
    finally:
        torch.cuda.set_device(before)


@pytest.mark.gpu
def test_a21_current_device_stays() -> None:
    """What one GPU allows: the device and the stream that were current still are, also after an error, and in a second thread."""
    check_current_device_stays(current=0, used=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("current", "used"), [(1, 0), (0, 1)])
def test_a21_current_device_stays_another_one(current: int, used: int) -> None:
    """A table on one GPU is served right while another is current, and stays so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_current_device_stays(current, used)


@pytest.mark.gpu
def test_a22_parameters_keep_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel sees exactly the stride, count and factor that it was given; what does not fit is refused."""
    import cupy

    source = (Path(__file__).parent / "probe.cu").read_text()
    monkeypatch.setattr(
        "device_kernels.module._module", lambda stem, capability: cupy.RawModule(code=source, options=COMPILE_OPTIONS)
    )
    kernel = Kernel("probe", "probe", "qifP")
    out = torch.zeros(3, dtype=torch.int64, device="cuda")
    kernel.bind(out.device, (1, 1), (1, 1), 2**33, 6, 2.0, out.data_ptr())()
    assert out.tolist() == [2**33, 6, 2000]


def test_a22_values_that_do_not_fit_are_refused() -> None:
    """A 64-bit value for an int, or a float for an integer, is an error and never truncated."""
    kernel = Kernel("probe", "probe", "qifP")
    for values in ((2**63, 6, 2.0, 0), (1, 2**31, 2.0, 0), (1, 6.5, 2.0, 0), (1, 6, "2", 0), (1, 6, 2.0, -(2**63) - 1)):
        with pytest.raises((struct.error, OverflowError)):
            kernel.bind(torch.device("cuda", 0), (1, 1), (1, 1), *values)  # type: ignore[arg-type]


A23_FRESH_PROCESS = """
import torch, zos
svc = zos.MetadataService(capacity=8, max_batch=8, device="cuda")
svc.admit(state_id=3, q_start=1000)
zos.MetadataService(capacity=8, max_batch=1, device="cpu").warmup()
svc.set_batch([3], batch=1)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        svc.launch_prepare(svc.slot_metadata(0, 1, 6))
except zos.KernelNotReadyError as error:
    assert "call MetadataService.warmup() before the capture" in str(error)
else:
    raise SystemExit("an unprepared launch was captured")
torch.cuda.synchronize()
svc.warmup()
svc.flush()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    metadata = svc.prepare()
graph.replay()
print(metadata.kv_swa_index_offset_len[0].tolist())
"""


@pytest.mark.gpu
def test_a23_no_module_load_inside_a_capture() -> None:
    """In a fresh process the first launch, inside a capture, is refused before it harms it; after a warm-up it works."""
    found = subprocess.run([sys.executable, "-c", A23_FRESH_PROCESS], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "[471, 128]", found.stderr


A24_OTHER_RING = """
import sys, zos
for ring in map(int, sys.argv[1:]):
    svc = zos.MetadataService(capacity=8, max_batch=1, geometry=zos.RingGeometry(ring=ring), device="cpu")
    svc.admit(state_id=3, q_start=1000)
    svc.set_batch([3])
    print(svc.prepare().kv_swa_index_offset_len[0].tolist())
"""


def test_a24_no_size_is_frozen_into_a_cache() -> None:
    """Another ring in another process with the same disk cache, or in the same process, gives that ring's slots."""
    right = {"134": "[471, 128]", "135": "[468, 128]"}
    for rings in (["134"], ["135"], ["135", "134"]):
        script = [sys.executable, "-c", A24_OTHER_RING, *rings]
        found = subprocess.run(script, capture_output=True, text=True, check=True)
        assert found.stdout.splitlines() == [right[ring] for ring in rings]


def test_a25_no_lost_updates(device: str) -> None:
    """1,000 ragged rows, again and again: the sums are always the same; a state in two rows is refused."""
    svc = zos.MetadataService(capacity=1000, max_batch=1000, device=device)
    for state_id in range(1000):
        svc.admit(state_id=state_id, q_start=50, seqlen_q=6 if state_id % 2 == 0 else 1)
    svc.set_batch(range(1000))
    expected = np.concatenate([[0], np.cumsum([6, 1] * 500)]).astype(np.int32)
    for _ in range(1000):
        found = svc.prepare().cu_seqlens_q
        assert_bitwise_equal(found, expected, "cu_seqlens_q")
    assert expected[1000] == 3500
    with pytest.raises(ValueError, match="state_id 7 twice"):
        svc.set_batch([7, 8, 7])


def test_a26_compiled_mutation_of_one_arena(device: str) -> None:
    """Outputs carved from one arena hold the same bytes after a compiled call as after an eager one."""
    svc = service(device, {3: 1000})
    svc.set_batch([3], batch=1)
    template = svc.prepare().operands
    names = [argument.name for argument in torch.ops.zos.prepare_v4_decode_metadata.default._schema.arguments]

    def caller(arena: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        operands = {
            **template,
            "kv_swa_index_offset_len": arena[:12].view(6, 2),
            "kv_swa_index": arena[12 : 12 + 768].view(6, 128),
            "kv_swa_full_index_pivots": arena[780:804].view(6, 4),
            "positions": wide[:6],
            "swa_write_slot": wide[6:12],
        }
        torch.ops.zos.prepare_v4_decode_metadata(*(operands[name] for name in names))
        return arena[12:20] * 2

    results = []
    for function in (caller, torch.compile(caller, backend="aot_eager")):
        arena = torch.full((804,), POISON, dtype=torch.int32, device=device)
        wide = torch.full((12,), POISON, dtype=torch.int64, device=device)
        results.append((function(arena, wide), arena, wide))
    for name, eager, compiled in zip(("slice", "arena", "wide"), *results, strict=True):
        assert_bitwise_equal(compiled, eager, name)
    assert results[1][1][:2].tolist() == [471, 128]


def test_a27_no_buffer_of_a_graph_moves(device: str) -> None:
    """A large eager prefill after a capture, and memory given back and taken by others: the replay reads and writes what it did."""
    options = {"max_prefill_tokens": 4096, "max_batch": 8}
    svc, eager = (service(device, dict.fromkeys(range(8), 1000), **options) for _ in range(2))
    loop = zos.DecodeLoop(svc, lambda metadata: torch.zeros_like(metadata.seqlens_q), buckets=(8,))
    loop.set_batch(range(8))
    loop.run()
    addresses = {name: value.data_ptr() for name, value in tensors_of(loop.metadata).items()}
    for each in (svc, eager):
        each.admit(12, prompt_end=4096)
        each.set_prefill_batch([12])
        each.prepare_prefill(full_index=True)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    block = torch.full((A27_BYTES[device] // 4,), -7, dtype=torch.int32, device=device)
    eager.set_batch(range(8))
    for state_id in range(8):
        for each in (svc, eager):
            each.set_seqlen_q(state_id, 1 + state_id % 6)
    poison(loop.metadata)
    loop.run()
    fresh = metadata_arrays(eager.prepare())
    for name, array in metadata_arrays(loop.metadata).items():
        assert_bitwise_equal(array, fresh[name], name)
    assert (block == -7).all()
    moved = [name for name, value in tensors_of(loop.metadata).items() if value.data_ptr() != addresses[name]]
    assert not moved, f"moved: {moved}"


def tensors_of(metadata: zos.DecodeMetadata) -> dict[str, torch.Tensor]:
    """Every buffer that the operator of a prepare was given."""
    return {name: value for name, value in metadata.operands.items() if isinstance(value, torch.Tensor)}


def test_host_operator_takes_the_same_arguments() -> None:
    """The operator of both packages has one name and one argument list."""
    from device_kernels.decode_metadata import prepare_v4_decode_metadata as prepare_on_device

    assert prepare_on_host.__name__ == prepare_on_device.__name__


def test_a28_ranges_stand_around_replays() -> None:
    """A range inside captured code would be seen once; replays are told by the host's ranges, kernels by their names."""
    export = read_export(Path(__file__).parent / "data" / "h200_clean.sqlite")
    replays = 20
    assert [span.name for span in export.ranges] == ["zos.step"] * replays
    names = [activity.what for activity in export.work]
    assert names.count("prepare_v4_decode_metadata") == names.count("commit") == replays
