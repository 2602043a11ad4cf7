"""Test that a result counts exactly once, moves a sequence by what was kept, and ends it where it should end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal


def service(device: str, **options: Any) -> zos.MetadataService:
    return zos.MetadataService(capacity=16, max_batch=4, device=device, **options)


def kept(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def columns(svc: zos.MetadataService, state_id: int, *names: str) -> list[int]:
    return [int(getattr(svc.table, name)[state_id]) for name in names]


def test_keeps_what_was_kept(device: str) -> None:
    """q_start grows by num_kept, head by the whole step: rejected drafts were written too."""
    svc = service(device)
    svc.admit(state_id=3, q_start=1000)
    svc.admit(state_id=5, q_start=7, seqlen_q=2)
    svc.set_batch([3, 5], batch=2)
    svc.commit(svc.prepare(), kept(device, 4, 2))
    assert columns(svc, 3, "q_start", "head", "phase", "seqlen_q") == [1004, 1006, zos.Phase.LIVE, 6]
    assert columns(svc, 5, "q_start", "head") == [9, 9]
    svc.commit(svc.prepare(), kept(device, 1, 1))
    assert columns(svc, 3, "q_start", "head") == [1005, 1010]


def test_counts_once(device: str) -> None:
    """The second arrival of a result is a duplicate; the sequence moves no further."""
    svc = service(device)
    svc.admit(state_id=3, q_start=10)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    for _ in range(3):
        svc.commit(metadata, kept(device, 2))
    assert columns(svc, 3, "q_start") == [12]
    svc.check()
    assert svc.counters() == {"stale": 0, "duplicate": 2, "deferred": 0, "errors": 0}


def test_no_result_changes_nothing(device: str) -> None:
    """num_kept = 0 means that no result exists, whatever else the arguments hold."""
    svc = service(device, carry_tokens=True)
    svc.admit(state_id=3, q_start=10, tokens=[1, 2, 3, 4, 5, 6])
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    before, tokens = svc.table.records.clone(), svc.table.token_ids.clone()
    finished = torch.ones(1, dtype=torch.bool, device=device)
    svc.commit(metadata, kept(device, 0), finished, torch.full((1, 6), 99, device=device))
    assert_bitwise_equal(svc.table.records, before, "records")
    assert_bitwise_equal(svc.table.token_ids, tokens, "token_ids")


def test_stale_results_are_dropped(device: str) -> None:
    """A result of the state's former life (released, reset, finished) moves nothing and is counted."""
    svc = service(device)
    for state_id in (1, 2, 3):
        svc.admit(state_id=state_id, q_start=10)
    svc.set_batch([1, 2, 3], batch=3)
    metadata = svc.prepare()
    svc.release(1)
    svc.admit(state_id=1, q_start=10)  # same position, another sequence
    svc.reset(2)
    svc.release(3)
    svc.flush()
    before = svc.table.records.clone()
    svc.commit(metadata, kept(device, 5, 5, 5))
    assert_bitwise_equal(svc.table.records, before, "records")
    svc.check()
    assert svc.counters()["stale"] == 3


def test_paused_sequence_still_takes_its_result(device: str) -> None:
    """Pausing keeps outstanding results valid; the row is padding until it is resumed."""
    svc = service(device)
    svc.admit(state_id=3, q_start=10)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    svc.pause(3)
    svc.flush()
    svc.commit(metadata, kept(device, 5))
    assert columns(svc, 3, "q_start", "phase") == [15, zos.Phase.PAUSED]
    assert svc.prepare().seqlens_k.tolist() == [0]
    svc.resume(3)
    assert svc.prepare().seqlens_k.tolist() == [21]


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_impossible_count_is_an_error(device: str, bad: int) -> None:
    """More kept than prepared, or a negative count: phase ERROR, position unchanged, the neighbour unharmed."""
    svc = service(device)
    svc.admit(state_id=3, q_start=10, seqlen_q=4)
    svc.admit(state_id=4, q_start=10, seqlen_q=4)
    svc.set_batch([3, 4], batch=2)
    svc.commit(svc.prepare(), kept(device, bad, 4))
    assert columns(svc, 3, "phase", "q_start", "error_value") == [zos.Phase.ERROR, 10, bad]
    assert columns(svc, 4, "phase", "q_start") == [zos.Phase.LIVE, 14]
    with pytest.raises(zos.DeviceStateError, match=rf"state_id 3: num_kept={bad} .*0 … seqlen_q") as caught:
        svc.check()
    assert [fault.state_id for fault in caught.value.faults] == [3]
    assert svc.counters()["errors"] == 1


@pytest.mark.parametrize(
    ("stop_at", "count", "q_start", "phase"), [(13, 6, 13, 2), (16, 6, 16, 2), (17, 6, 16, 1), (11, 1, 11, 2)]
)
def test_stop_at(device: str, stop_at: int, count: int, q_start: int, phase: int) -> None:
    """A sequence ends exactly at stop_at, also in the middle of the kept tokens, and is padding from the next step on."""
    svc = service(device)
    svc.admit(state_id=3, q_start=10, stop_at=stop_at)
    svc.set_batch([3], batch=1)
    svc.commit(svc.prepare(), kept(device, count))
    assert columns(svc, 3, "q_start", "phase", "head") == [q_start, phase, 16]
    assert svc.prepare().num_tokens.item() == (0 if phase == zos.Phase.FINISHED else 6)


def test_finished_flag_and_next_tokens(device: str) -> None:
    """`finished` ends a row on the device; next_tokens become its input ids; padding rows' arguments are never looked at."""
    svc = service(device, carry_tokens=True)
    svc.admit(state_id=3, q_start=10)
    svc.admit(state_id=5, q_start=20)
    svc.set_batch([3, -1, 5], batch=3)
    finished = torch.tensor([True, True, False], device=device)
    tokens = torch.arange(18, device=device).reshape(3, 6)
    svc.commit(svc.prepare(), kept(device, 1, 77, 2), finished, tokens)
    assert columns(svc, 3, "phase", "q_start") == [zos.Phase.FINISHED, 11]
    assert columns(svc, 5, "phase", "q_start") == [zos.Phase.LIVE, 22]
    assert svc.table.token_ids is not None and svc.table.token_ids[5].tolist() == [12, 13, 14, 15, 16, 17]
    assert svc.prepare().input_ids.tolist() == [12, 13, 14, 15, 16, 17] + [0] * 12


def test_prefilling_row(device: str) -> None:
    """Chunks are kept whole and sized on the device; `finished` waits for the prompt's end; then decode_q takes over."""
    svc = service(device)
    svc.admit(state_id=3, q_start=0, prompt_end=11, chunk_q=5, decode_q=3)
    svc.set_batch([3], batch=1)
    finished = torch.ones(1, dtype=torch.bool, device=device)
    svc.commit(svc.prepare(), kept(device, -99), finished)
    assert columns(svc, 3, "q_start", "seqlen_q", "phase") == [5, 5, zos.Phase.LIVE]
    svc.commit(svc.prepare(), kept(device, 0), finished)
    assert columns(svc, 3, "q_start", "seqlen_q", "phase") == [10, 1, zos.Phase.LIVE]
    svc.commit(svc.prepare(), kept(device, 0))
    assert columns(svc, 3, "q_start", "seqlen_q", "phase", "head") == [11, 3, zos.Phase.LIVE, 11]
    assert svc.prepare().seqlens_q.tolist() == [3]
    svc.check()


@pytest.mark.parametrize(("count", "q_start", "phase"), [(300, 310, 1), (299, 10, 3), (0, 10, 3)])
def test_long_chunk_is_kept_whole(device: str, count: int, q_start: int, phase: int) -> None:
    """A chunk longer than a step, on a row without prompt_end, overwrote history: all of it counts, or the row is in error."""
    svc = service(device)
    svc.admit(state_id=3, q_start=10, seqlen_q=300)
    svc.flush()
    generation = columns(svc, 3, "generation")[0]
    tickets = torch.tensor([[3, generation, 10, 300]], dtype=torch.int32, device=device)
    torch.ops.zos.commit(
        svc.table.records, None, tickets, kept(device, count), None, None, svc.operator_counters, 6, 8192
    )
    assert columns(svc, 3, "q_start", "phase") == [q_start, phase]


def test_metadata_of_another_shape_is_refused(device: str) -> None:
    """The slot's buffers hold another batch's tickets by now."""
    svc, other = service(device), service(device)
    svc.admit(state_id=3, q_start=10)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    svc.set_batch([3], batch=2)
    svc.prepare()
    with pytest.raises(zos.MetadataReplacedError, match="has 1 rows, but the slot was since prepared with 2"):
        svc.commit(metadata, kept(device, 1))
    with pytest.raises(ValueError, match="another MetadataService"):
        other.commit(metadata, kept(device, 1))
    assert columns(svc, 3, "q_start") == [10]


def test_slots_are_independent(device: str) -> None:
    """Two batches in flight, committed in either order."""
    svc = service(device, metadata_slots=2)
    svc.admit(state_id=1, q_start=10)
    svc.admit(state_id=2, q_start=20)
    svc.set_batch([1], batch=1, slot=0)
    svc.set_batch([2], batch=1, slot=1)
    first, second = svc.prepare(slot=0), svc.prepare(slot=1)
    svc.commit(second, kept(device, 3))
    svc.commit(first, kept(device, 2))
    assert columns(svc, 1, "q_start") + columns(svc, 2, "q_start") == [12, 23]
