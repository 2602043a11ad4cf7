"""Test that a fork is the sequence that it was copied from, in stream order, and from then on goes its own way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal, edit_operands
from tests.twins import Twins
from zos.edits import EDITS_PER_BUFFER, Edit
from zos.table import COLUMNS

GEOMETRY = zos.RingGeometry(16, 5)
LAYOUT = zos.StateSlotLayout(
    GEOMETRY, stored_layers=2, dropped_layers=1, draft_layers=1,
    compression=[zos.CompressionState(zos.CompressionRing(2), 32, 1)],
)  # fmt: skip
STATES = 12


def service(device: str, **options: Any) -> zos.MetadataService:
    options = {"capacity": STATES, "max_batch": 8, "geometry": GEOMETRY, **options}
    return zos.MetadataService(device=device, max_prefill_tokens=40, **options)


def with_cache(device: str, seed: int) -> tuple[zos.MetadataService, zos.SwaCache]:
    """Make a service whose states lie in a cache of random bytes, with gaps between its slots."""
    svc = service(device)
    cache = zos.SwaCache(LAYOUT, STATES + 1, device, slot_pitch=LAYOUT.slot_bytes + 64)
    svc.attach_cache(cache)
    generator = torch.Generator().manual_seed(seed)
    cache.slab.copy_(torch.randint(0, 256, cache.slab.shape, dtype=torch.uint8, generator=generator))
    return svc, cache


def words(svc: zos.MetadataService, state_id: int) -> dict[str, int]:
    svc.flush()
    record = svc.table.records[state_id].tolist()
    return {name: record[word] for name, word in COLUMNS.items()}


def test_every_column_is_copied(device: str) -> None:
    """All but the generation, which is the state's own and rises, so that a late result of a former sequence is dropped."""
    svc = service(device, carry_tokens=True)
    for state_id in (4, 4, 4):
        svc.admit(state_id)
        svc.release(state_id)
    svc.admit(
        3, 100, 4, swa_valid_start=90, stop_at=3000, prompt_end=200, chunk_q=30, decode_q=2, kv_cached_end=95, tokens=[5, 6]
    )  # fmt: skip
    before = words(svc, 3)
    svc.table.head[3] = 104
    svc.fork(3, 4)
    assert words(svc, 4) == {**before, "head": 104, "generation": 7}
    assert words(svc, 3) == {**before, "head": 104}
    assert svc.table.token_ids is not None and svc.table.token_ids[4].tolist() == [5, 6, 0, 0, 0, 0]


@pytest.mark.parametrize("phase", [zos.Phase.LIVE, zos.Phase.FINISHED, zos.Phase.ERROR, zos.Phase.PAUSED])
def test_any_phase(device: str, phase: zos.Phase) -> None:
    """The host does not know phases: the copy has its source's, and the error that goes with it, so that check names both."""
    svc = service(device)
    svc.admit(3, 10)
    svc.flush()
    svc.table.phase[3] = phase
    if phase is zos.Phase.ERROR:
        svc.table.error[3], svc.table.error_value[3] = zos.ErrorCode.NUM_KEPT_RANGE, 99
    svc.fork(3, 4)
    found = words(svc, 4)
    assert found["phase"] == phase and found["q_start"] == 10
    if phase is zos.Phase.ERROR:
        with pytest.raises(zos.DeviceStateError, match=r"state_id 3: num_kept=99.*\nstate_id 4: num_kept=99"):
            svc.check()
    svc.set_batch([4], batch=1)
    assert svc.prepare().num_tokens.item() == (6 if phase is zos.Phase.LIVE else 0)


def test_call_order(device: str) -> None:
    """Edits before a fork are in the copy, those after are not; also of forks of forks, all in one flush."""
    svc = service(device)
    svc.admit(1, 100, 6)
    svc.set_seqlen_q(1, 2)
    svc.fork(1, 6)
    svc.fork(6, 3)  # of the copy
    svc.fork(1, 4)
    svc.set_seqlen_q(1, 5)
    svc.set_seqlen_q(6, 3)
    svc.fork(6, 5)
    svc.release(6)
    svc.admit(6, 7, 1)
    svc.fork(6, 2)
    svc.pause(2)
    svc.set_batch([1, 2, 3, 4, 5, 6], batch=6)
    svc.flush()
    found = as_array(svc.table.records)[1:7, [0, 1, 2]].tolist()
    assert found == [[1, 5, 100], [4, 1, 7], [1, 2, 100], [1, 2, 100], [1, 3, 100], [1, 1, 7]]
    assert svc.prepare().seqlens_k.tolist() == [105, 0, 102, 102, 103, 8]


def test_a_fork_may_wait_in_a_ready_queue(device: str) -> None:
    """The queue's entry has the generation that the copy gets."""
    svc = service(device)
    svc.admit(3, 10, stop_at=30)
    svc.admit(5, 10, stop_at=12)
    svc.set_ready([])
    svc.set_batch([5], batch=1)
    svc.fork(3, 4)
    svc.set_ready([4])
    for _ in range(2):
        metadata = svc.prepare()
        svc.commit(metadata, metadata.seqlens_q)
    assert metadata.state_ids.tolist() == [4] and words(svc, 4)["q_start"] == 16


def test_more_than_a_buffer_holds(device: str) -> None:
    """Runs of edits and of forks longer than a launch applies."""
    many = EDITS_PER_BUFFER + 30
    svc = service(device, capacity=2 * many + 3)
    for state_id in range(many):
        svc.admit(state_id, state_id + 1, 3)
    for state_id in range(many):
        svc.fork(state_id, many + state_id)
    svc.fork(0, 2 * many)
    svc.set_seqlen_q(0, 1)
    svc.flush()
    lengths = as_array(svc.table.q_start)
    assert lengths[: 2 * many + 1].tolist() == [*range(1, many + 1), *range(1, many + 1), 1]
    assert as_array(svc.table.seqlen_q)[[0, many, 2 * many]].tolist() == [1, 3, 3]


@pytest.mark.parametrize(
    ("src", "dst", "error", "message"),
    [
        (5, 6, ValueError, "src=5 is not in use"),
        (3, 4, ValueError, "dst=4 is in use"),
        (3, 3, ValueError, "dst=3 is in use"),
        (STATES, 6, IndexError, "state_id=12 is outside"),
        (3, -1, IndexError, "state_id=-1 is outside"),
    ],
)
def test_refused(device: str, src: int, dst: int, error: type[Exception], message: str) -> None:
    """A copy of nothing, or over a sequence, is refused before anything is staged."""
    svc = service(device)
    svc.admit(3, 10)
    svc.admit(4, 20)
    svc.flush()
    before = svc.table.records.clone()
    with pytest.raises(error, match=message):
        svc.fork(src, dst)
    svc.flush()
    assert_bitwise_equal(svc.table.records, before, "records")
    assert not svc.in_use(6)


def test_a_source_that_is_none_is_skipped(device: str) -> None:
    """The raw operator reads nothing outside."""
    svc = service(device)
    svc.admit(3, 10)
    svc.flush()
    before = svc.table.records.clone()
    for source in (STATES, -1, 10**7, -(2**31)):
        operands = edit_operands([[3, Edit.FORK, source]], [], device)
        torch.ops.zos.apply_table_edits(svc.table.records, None, *operands)
    assert_bitwise_equal(svc.table.records, before, "records")


def test_a_result_on_its_way_moves_the_source_alone(device: str) -> None:
    """It was prepared before there was a copy; nor does a result of the sequence that was in the copy's state count."""
    svc = service(device)
    for state_id in (3, 4):
        svc.admit(state_id, 10 * state_id)
    svc.set_batch([3, 4], batch=2)
    metadata = svc.prepare()
    svc.release(4)
    svc.fork(3, 4)
    svc.flush()
    svc.commit(metadata, metadata.seqlens_q)
    assert [words(svc, state_id)["q_start"] for state_id in (3, 4)] == [36, 30]
    assert svc.counters()["stale"] == 1


def test_stops_where_its_source_would(device: str) -> None:
    """Later calls are checked against the stop that came with the copy."""
    svc = service(device)
    svc.admit(3, 10, stop_at=50)
    svc.fork(3, 4)
    with pytest.raises(ValueError, match="stop_at=50 must not be below prompt_end=60 of state_id 4"):
        svc.reset(4, prompt_end=60)


# ---- state slots -----------------------------------------------------------------------------------------------------------


def test_the_whole_slot_is_copied(device: str, seed: int) -> None:
    """Rings of every kind and compression state, and nothing beside them."""
    svc, cache = with_cache(device, seed)
    svc.admit(3, 10)
    svc.flush()
    before = cache.slab.clone()
    svc.fork(3, 7)
    assert_bitwise_equal(cache.slab, before, "slab before the flush")
    svc.flush()
    pitch, size = cache.slot_pitch, LAYOUT.slot_bytes
    before[7 * pitch : 7 * pitch + size] = before[3 * pitch : 3 * pitch + size]
    assert_bitwise_equal(cache.slab, before, "slab")


def test_copies_come_in_call_order(device: str, seed: int) -> None:
    """A fork of a fork holds the first one's bytes; a state released behind its fork may be copied over."""
    svc, cache = with_cache(device, seed)
    svc.admit(1, 10)
    svc.admit(2, 20)
    svc.flush()
    first, second = cache.slot(1).clone(), cache.slot(2).clone()
    svc.fork(1, 3)
    svc.fork(3, 4)
    svc.release(1)
    svc.fork(2, 1)
    svc.fork(1, 5)
    svc.release(3)
    svc.fork(2, 3)
    svc.flush()
    for state_id, expected in ((1, second), (3, second), (4, first), (5, second)):
        assert_bitwise_equal(cache.slot(state_id), expected, f"slot {state_id}")
    assert as_array(svc.table.q_start)[1:6].tolist() == [20, 20, 20, 10, 20]


@pytest.mark.parametrize("through_a_loop", [False, True])
def test_in_order_with_steps(device: str, through_a_loop: bool, seed: int) -> None:
    """The copy has what the steps before it wrote and nothing of those behind, also where a captured graph applies other edits."""
    svc, cache = with_cache(device, seed)
    svc.admit(3, 10)
    entry = LAYOUT.entry.entry_bytes

    def write(metadata: zos.DecodeMetadata) -> torch.Tensor:
        """Write the step's position into the ring, as a store would."""
        value = (metadata.positions % 251).to(torch.uint8)[:, None].expand(-1, entry)
        state, slot = metadata.token_state_id.long(), metadata.swa_write_slot % GEOMETRY.ring
        state = torch.where(state < 0, STATES, state)  # padding writes where no state is
        cache.layer(0)[state, slot.clamp(min=0), 0] = value
        return metadata.seqlens_q

    loop = zos.DecodeLoop(svc, write, buckets=(2,))
    held: dict[int, torch.Tensor] = {}
    for round_number in range(4):
        svc.set_seqlen_q(3, 3 + round_number % 2)
        if through_a_loop:
            loop.set_batch([3])
            loop.run()
            loop.run()
        else:
            svc.set_batch([3], batch=2)
            for _ in range(2):
                metadata = svc.prepare()
                svc.commit(metadata, write(metadata))
        if device == "cuda":
            torch.cuda.synchronize()
        held[4 + round_number] = cache.slot(3).clone()
        svc.fork(3, 4 + round_number)
    svc.flush()
    for state_id, expected in held.items():
        assert_bitwise_equal(cache.slot(state_id), expected, f"slot {state_id}")
    assert as_array(svc.table.q_start)[4:8].tolist() == [16, 24, 30, 38]


def test_a_graph_that_drains_edits_meets_no_fork(device: str, seed: int) -> None:
    """A captured launch cannot copy slots that it did not know of: forks are applied before the graph, others may wait for it."""
    svc, cache = with_cache(device, seed)
    svc.admit(3, 10)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    launched: list[str] = []

    def draining() -> None:
        launched.append("draining")
        assert torch.equal(cache.slot(4), cache.slot(3)) and int(svc.table.q_start[4]) == 10
        svc.drain_edits()

    svc.fork(3, 4)
    svc.set_seqlen_q(4, 2)
    svc.replay(lambda: launched.append("plain"), draining, metadata, 1)
    assert launched == ["draining"] and int(svc.table.seqlen_q[4]) == 2
    svc.fork(3, 5)
    svc.replay(lambda: launched.append("plain"), draining, metadata, 1)
    assert int(svc.table.q_start[5]) == 10


def test_a_launch_that_fails_keeps_the_fork(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Nothing is copied by half: the next flush applies fork and slot."""
    svc, cache = with_cache("cpu", seed)
    svc.admit(3, 10)
    svc.flush()
    before = cache.slab.clone()
    launch = svc._edits.launch

    def fail() -> None:
        raise RuntimeError("no launch")

    svc.fork(3, 4)
    svc._edits.launch = fail
    with pytest.raises(RuntimeError, match="no launch"):
        svc.flush()
    assert_bitwise_equal(cache.slab, before, "slab")
    svc._edits.launch = launch
    svc.set_seqlen_q(4, 2)
    svc.flush()
    assert words(svc, 4)["seqlen_q"] == 2 and torch.equal(cache.slot(4), cache.slot(3))


@pytest.mark.parametrize(
    ("geometry", "states", "message"),
    [(zos.RingGeometry(16, 4), STATES, "cache has rings for"), (GEOMETRY, STATES - 1, "num_state_slots=11, fewer")],
)
def test_a_cache_that_does_not_fit(geometry: zos.RingGeometry, states: int, message: str) -> None:
    """Copies would go to other states' slots, or beyond."""
    with pytest.raises(ValueError, match=message):
        service("cpu").attach_cache(zos.SwaCache(zos.StateSlotLayout(geometry), states, "cpu"))


# ---- against the oracle ----------------------------------------------------------------------------------------------------


def test_random_histories(device: str, seed: int) -> None:
    """Forks among all other calls, with steps between them that reject, finish and refill: tables, records, bounds."""
    rng = np.random.default_rng([seed, 5])
    twins = Twins(device, capacity=STATES, carry_tokens=True, max_prefill_tokens=40, snapshot_every=9)
    in_use: set[int] = set()
    forks = 0

    def one_of(states: set[int]) -> int:
        return int(rng.choice(sorted(states)))

    for _ in range(150):
        free = set(range(STATES)) - in_use
        for call in rng.choice(["admit", "fork", "release", "reset", "pause", "resume", "set_seqlen_q"], 3).tolist():
            free = set(range(STATES)) - in_use
            if call == "admit" and free:
                state_id, prompt = one_of(free), int(rng.choice([0, 0, 50]))
                stop_at = int(rng.choice([0, 60]))
                twins.edit("admit", state_id, prompt_end=prompt, stop_at=stop_at, tokens=[1, 2], chunk_q=20)
                in_use.add(state_id)
            elif call == "fork" and free and in_use:
                state_id = one_of(free)
                twins.edit("fork", one_of(in_use), state_id)
                in_use.add(state_id)
                forks += 1
            elif call == "release" and len(in_use) > 6:
                state_id = one_of(in_use)
                twins.edit("release", state_id)
                in_use.remove(state_id)
            elif call in ("reset", "pause", "resume") and in_use:
                twins.edit(call, one_of(in_use))
            elif call == "set_seqlen_q" and in_use:
                twins.edit(call, one_of(in_use), int(rng.integers(1, 7)))
        if in_use and rng.random() < 0.3:
            twins.set_ready([one_of(in_use)])
        prefill = bool(rng.random() < 0.3)
        rows = rng.permutation(STATES)[:4].tolist()
        if prefill:
            twins.set_prefill_batch(rows)
        else:
            twins.set_batch(rows)
        step = twins.prepare(prefill=prefill)
        lengths = np.array(step.tickets)[:, 3].clip(0)
        kept = np.where(lengths > 6, lengths, np.minimum(rng.integers(0, 7, len(lengths)), lengths))
        twins.commit(step, kept, rng.random(len(kept)) < 0.05, rng.integers(0, 2**40, (len(kept), 6)))
        if rng.random() < 0.5:
            twins.read()
    twins.read()
    assert forks > 10
