"""Test that sizes at their limits are right or refused by name: nothing counts on a window of 128, a power of two or few rows.

test_geometry.py, test_decode_metadata.py and test_cache.py have single rules; here whole steps (prepare, view, commit, prefill,
tail) are held against the oracle for sizes from the least up, and bytes are moved beyond 4 GiB.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal, assert_block_view, poison
from zos.cli.compare import metadata_arrays
from zos.cli.oracle_table import COLUMNS, LIVE
from zos.cli.oracle_views import expected_tail
from zos.cli.setups import Setup

LARGEST = 2**31 - 1  # position, and ring slot
LARGEST_ROWS = 65_536
RATIOS_AT_ONCE = 3
LARGEST_RATIO = 1024
WINDOWS = (1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 257, 511, 1000, 1024, 2047, 4095, 4096)
MAP_NORESERVE = 0x4000  # Linux: pages of a mapping are not even promised before they are written
BEYOND = 4 << 30


def records_at(setup: Setup, q_start: Any, **columns: Any) -> np.ndarray:
    """A table of live sequences at these positions, whose next step is a full one: int32 [capacity, 16]."""
    records = np.zeros((setup.capacity, len(COLUMNS)), np.int64)
    columns = {
        "seqlen_q": setup.geometry.tokens_per_step,
        **columns,
        "phase": LIVE,
        "q_start": q_start,
        "generation": 1,
    }
    for name, values in {**columns, "head": q_start}.items():
        records[:, COLUMNS.index(name)] = values
    return records.astype(np.int32)


def assert_step(
    setup: Setup, device: str, records: np.ndarray, ids: list[int], budget: int | None = None
) -> zos.MetadataService:
    """A decode step, its block view and its commit, then a prefill step and its tail: all as the oracle has them."""
    svc, oracle = setup.service(device), setup.oracle()
    step, rng = setup.geometry.tokens_per_step, np.random.default_rng(len(ids))
    svc.table.records.copy_(torch.from_numpy(records))
    oracle.load_records(records)
    svc.set_batch(ids, batch=len(ids), max_tokens=budget)
    poison(svc.slot_metadata(0, len(ids), len(ids) * step if budget is None else budget))
    metadata, expected = svc.prepare(), oracle.prepare(ids, setup.token_layout, budget)
    assert_outputs(metadata_arrays(metadata), expected)
    kept = rng.integers(1, step + 1, len(ids)).astype(np.int32)
    if setup.geometry.ring >= setup.geometry.window + step:
        view = svc.view_block(metadata, torch.from_numpy(kept).to(device))
        assert_block_view(view, oracle, expected["tickets"], kept.tolist())
    svc.commit(metadata, torch.from_numpy(kept).to(device))
    oracle.commit(expected["tickets"].tolist(), kept.tolist())
    svc.set_prefill_batch(ids)
    poison(svc.slot_prefill_metadata(0, len(ids), True, True))
    prefill = oracle.prepare_prefill(ids, full_index=True)
    prefill |= {f"tail.{name}": value for name, value in expected_tail(oracle, prefill).items()}
    assert_outputs(metadata_arrays(svc.prepare_prefill(full_index=True, tail=True)), prefill)
    assert_bitwise_equal(svc.table.records, oracle.records_array(), "records")
    return svc


def assert_outputs(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert_bitwise_equal(actual[name], array, name)


def edges(rng: np.random.Generator, setup: Setup) -> np.ndarray:
    """Positions at which something begins or wraps, one a state: int64 [capacity]."""
    geometry, step = setup.geometry, setup.geometry.tokens_per_step
    near = [0, 1, geometry.window - 1, geometry.window, geometry.ring - 1, geometry.ring, 7 * geometry.ring - 1]
    near += [LARGEST - step, LARGEST - step - geometry.window]
    return np.resize(
        np.array([max(0, value) for value in [*near, *rng.integers(0, LARGEST - step, 3)]]), setup.capacity
    )


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_drafts_rings(device: str, window: int, layout: str, seed: int) -> None:
    """Any window, any drafts from 0 to 16, the shortest ring, the next, and some longer one."""
    rng = np.random.default_rng([seed, window])
    for drafts in {0, 16, *rng.integers(1, 16, 2).tolist()}:
        least = window + drafts
        ring = least + int(rng.choice([0, 1, 2, rng.integers(3, 2 * least + 4)]))
        most = int(rng.choice([1, 37, window + drafts + 3]))
        setup = Setup(
            zos.RingGeometry(window, drafts, ring), layout, carry_tokens=True, max_prefill_tokens=most, capacity=12, max_batch=12
        )  # fmt: skip
        q_start = edges(rng, setup)
        chunk = np.minimum(rng.integers(1, most + 1, 12), LARGEST - q_start)
        is_chunk = rng.random(12) < 0.4
        records = records_at(
            setup, q_start, swa_valid_start=np.where(rng.random(12) < 0.3, np.maximum(q_start - window // 2, 0), 0),
            seqlen_q=np.where(is_chunk, chunk, rng.integers(0, drafts + 2, 12)),
            prompt_end=np.where(is_chunk, q_start + chunk, 0),
        )  # fmt: skip
        assert_step(setup, device, records, rng.permutation(12).tolist())


def test_every_compression_ratio(device: str, seed: int) -> None:
    """Ratios 1 … 1024, at positions where an entry is complete, begins, or its ring wraps."""
    rng = np.random.default_rng(seed)
    for first in range(1, LARGEST_RATIO + 1, RATIOS_AT_ONCE):
        ratios = range(first, min(first + RATIOS_AT_ONCE, LARGEST_RATIO + 1))
        step = int(rng.integers(1, 9))
        rings = tuple(zos.CompressionRing(ratio, step, overlap=bool(rng.integers(2))) for ratio in ratios)
        setup = Setup(zos.RingGeometry(1, step - 1), "packed", rings, capacity=6, max_batch=6, max_prefill_tokens=9)
        multiples = np.array([ratio * int(rng.integers(1, LARGEST // ratio - 1)) for ratio in [*ratios] * 2][:6])
        q_start = np.maximum(np.resize(multiples, 6) - rng.integers(0, step + 1, 6), 0)
        records = records_at(setup, q_start, kv_cached_end=np.where(rng.random(6) < 0.3, q_start + 1, 0))
        assert_step(setup, device, records, [5, 0, 3, 1, 2, 4])


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_nothing_at_all(device: str, layout: str) -> None:
    """B = 0, and so T = 0, by every call that has rows: no launch with an empty grid, no view of nothing that fails."""
    setup = Setup(zos.RingGeometry(), layout, (zos.CompressionRing(2),), capacity=1, max_batch=1)
    svc = assert_step(setup, device, records_at(setup, 7), [])
    metadata = svc.prepare()
    assert (metadata.batch, metadata.tokens, metadata.cu_seqlens_q.tolist()) == (0, 0, [0])
    svc.attach_mailbox()
    svc.set_ready([])
    svc.commit(svc.prepare(), torch.zeros(0, dtype=torch.int32, device=device))
    (record,) = svc.drain()
    assert len(record.state_ids) == 0 and svc.table.q_start.tolist() == [7]
    cache = torch.zeros(1, 134, 1, 528, dtype=torch.uint8, device=device)
    none = torch.zeros(0, 512, device=device)
    torch.ops.zos.swa_ring_store(none, metadata.swa_write_slot, cache)
    torch.ops.zos.swa_ring_load(cache, svc.prepare_prefill().swa_load_plan, none, 128)
    assert not cache.any()


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("drafts", [0, 5])
def test_one_state(device: str, drafts: int, layout: str) -> None:
    """Capacity 1, one row, and the least of everything."""
    for window in (1, 128):
        geometry = zos.RingGeometry(window, drafts, window + drafts)
        for q_start in (0, window, LARGEST - 1 - drafts):
            setup = Setup(geometry, layout, (zos.CompressionRing(1, drafts + 1),), False, 1, 1, 1)
            assert_step(setup, device, records_at(setup, q_start), [0])


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_most_rows(device: str, layout: str, seed: int) -> None:
    """65,536 rows, a quarter padding: the scan over so many blocks, the index of so many tokens, and what a budget defers."""
    rng = np.random.default_rng(seed)
    setup = Setup(
        zos.RingGeometry(1, 1), layout, capacity=LARGEST_ROWS, max_batch=LARGEST_ROWS, max_prefill_tokens=70_000
    )
    records = records_at(setup, rng.integers(0, 99, LARGEST_ROWS), seqlen_q=rng.integers(0, 3, LARGEST_ROWS))
    ids = np.where(rng.random(LARGEST_ROWS) < 0.25, -1, rng.permutation(LARGEST_ROWS)).tolist()
    assert_step(setup, device, records, ids, 50_001 if layout == "packed" else None)


def test_capacity_times_ring(device: str) -> None:
    """Ring slots up to 2^31 - 2 are right, in one state or in many; a slot number past int32 is refused wherever it would arise."""
    for capacity, ring in ((1, LARGEST), (2, LARGEST // 2), (2047, LARGEST // 2047), (46_341, 46_340)):
        assert LARGEST - ring < capacity * ring <= LARGEST
        setup = Setup(zos.RingGeometry(5, 2, ring), "packed", (), False, 9, capacity, 2)
        last = LARGEST // ring * ring - (3 if capacity == 1 else 2)  # the step goes to the ring's end, or over it
        svc = assert_step(setup, device, records_at(setup, last), [capacity - 1, 0][:capacity])
        index = svc.slot_metadata(0, min(2, capacity), 3 * min(2, capacity)).kv_swa_index
        assert int(index.max()) == capacity * ring - 1
        with pytest.raises(ValueError, match=r"capacity \* ring=\d{10} is outside 1 … 2147483647"):
            zos.MetadataService(capacity + 1, 1, zos.RingGeometry(5, 2, ring), device)
        with pytest.raises(ValueError, match=r"num_state_slots \* ring=\d{10} is outside"):
            zos.SwaCache(zos.StateSlotLayout(zos.RingGeometry(5, 2, ring), stored_layers=1), capacity + 1, device)


def test_numpy_numbers(device: str) -> None:
    """A product of a NumPy number wraps: 32,051,995 rows of 134 would pass for 34."""
    rows = np.int32(2**32 // 134 + 1)
    with pytest.raises(ValueError, match=r"max_batch \* \(window \+ tokens_per_step\)=4294967330"):
        zos.MetadataService(1, rows, device=device)  # type: ignore[arg-type]


def test_last_position(device: str) -> None:
    """From 2^31 - 7 a step of six tokens reaches the last position; from there on a step is an error by name, for each length."""
    setup = Setup(
        zos.RingGeometry(), "packed", (zos.CompressionRing(2),), capacity=8, max_batch=8, max_prefill_tokens=64
    )
    ids = list(range(8))
    svc = assert_step(setup, device, records_at(setup, LARGEST - 6, seqlen_q=np.array([1, 2, 3, 4, 5, 6, 6, 6])), ids)
    assert svc.counters()["errors"] > 0
    svc = assert_step(setup, device, records_at(setup, LARGEST - np.arange(8), seqlen_q=3), ids)
    with pytest.raises(zos.DeviceStateError, match="state_id 2: q_start=2147483645") as caught:
        svc.check()
    # The others got as far as they could, and then stand where no step of three fits.
    assert {fault.state_id: fault.value for fault in caught.value.faults}.items() >= {
        0: LARGEST,
        1: LARGEST - 1,
    }.items()
    with pytest.raises(ValueError, match="q_start=2147483648 is outside"):
        zos.MetadataService(1, 1, device=device).admit(0, q_start=2**31)


# ---- beyond 4 GiB ---------------------------------------------------------------------------------------------------------------


def virtual(size: int, device: str) -> torch.Tensor:
    """uint8 [size], all zeros: on a CPU only the pages that are touched exist."""
    if device == "cuda":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), dtype=torch.uint8
    )


def test_entries_beyond_4_gib(device: str, seed: int) -> None:
    """Entries of the last state go to their own bytes and come back from them; where a 32-bit offset would wrap to stays zero."""
    geometry = zos.RingGeometry(128, 5)
    layout = zos.StateSlotLayout(geometry, stored_layers=1)
    # On a CPU as many slots as int32 can name: 1.1 TB.
    states = LARGEST // geometry.ring if device == "cpu" else BEYOND // layout.slot_bytes + 3
    slab = virtual(states * layout.slot_bytes, device)
    cache = zos.SwaCache(layout, states, device, slab)
    svc = zos.MetadataService(2, 1, geometry, device)
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(geometry.ring, 512, generator=generator, device=device)
    state_id = states - 1
    slots = torch.arange(geometry.ring, device=device) + state_id * geometry.ring
    cast_back = torch.empty_like(values)
    torch.ops.zos.swa_ring_store(values, slots, cache.layer(0), cast_back)
    plain = torch.zeros(1, geometry.ring, 1, 528, dtype=torch.uint8, device=device)
    torch.ops.zos.swa_ring_store(values, slots - slots[0], plain)
    begin = state_id * layout.slot_bytes
    assert begin > BEYOND
    assert_bitwise_equal(slab[begin : begin + plain.numel()], plain.flatten(), "bytes of the last state")
    for wrapped in (begin % 2**31, begin % 2**32, 0):
        assert not slab[wrapped : wrapped + plain.numel()].any()
    plan = torch.tensor([[[state_id, 6, 0, 128], [-1, 0, 0, 0], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    out = torch.empty(128, 512, device=device)
    torch.ops.zos.swa_ring_load(cache.layer(0), plan, out, 128)
    assert_bitwise_equal(out, cast_back[6:], "entries loaded")
    svc.admit(0, q_start=128)
    svc.set_batch([0], batch=1)
    metadata = svc.prepare()
    index = torch.where(metadata.kv_swa_index >= 0, metadata.kv_swa_index + int(slots[0]), -1).to(torch.int32)
    q = torch.randn(6, 16, 512, generator=generator, device=device).bfloat16()
    found = []
    for view, named in ((cache.layer(0), index), (plain, metadata.kv_swa_index)):
        attended, lse = torch.empty_like(q), torch.empty(6, 16, device=device)
        torch.ops.zos.swa_decode_attention(q, view, named, metadata.swa_len, None, attended, lse, 0.05, 6)
        found.append((attended, lse))
    assert_bitwise_equal(found[0][0].float(), found[1][0].float(), "attention over the last state")
    assert_bitwise_equal(found[0][1], found[1][1], "lse")


def test_snapshot_beyond_4_gib(device: str) -> None:
    """The state past 4 GiB is the one that is copied."""
    layout = zos.StateSlotLayout(stored_layers=20)
    states = BEYOND // layout.slot_bytes + 2
    slab = virtual(states * layout.slot_bytes, device)
    svc = zos.MetadataService(states, 1, device=device, snapshot_every=128)
    pool = zos.SnapshotPool(svc, zos.SwaCache(layout, states, device, slab), 1)
    svc.attach_snapshots(pool)
    begin = (states - 1) * layout.slot_bytes
    assert begin > BEYOND
    marked = torch.arange(layout.stored_bytes, device=device) % 251
    slab[begin : begin + layout.stored_bytes] = marked.to(torch.uint8)
    svc.admit(states - 1, q_start=127)
    svc.set_batch([states - 1], batch=1)
    svc.commit(svc.prepare(), torch.ones(1, dtype=torch.int32, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    (snapshot,) = pool.poll()
    assert (snapshot.state_id, snapshot.boundary) == (states - 1, 128)
    assert_bitwise_equal(pool.read(snapshot).cpu(), marked.to(torch.uint8).cpu(), "snapshot")
