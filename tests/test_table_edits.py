"""Test that staged edits apply in call order, all at once, and change nothing but what they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal, edit_operands
from zos.edits import BatchEdit, Edit
from zos.table import COLUMNS


def service(device: str, **options: Any) -> zos.MetadataService:
    return zos.MetadataService(capacity=16, max_batch=4, device=device, **options)


def record(svc: zos.MetadataService, state_id: int) -> dict[str, int]:
    svc.flush()
    words = svc.table.records[state_id].tolist()
    return {name: words[word] for name, word in COLUMNS.items()}


def test_admit_sets_every_column(device: str) -> None:
    """Nothing of the slot's former tenant stays but its generation, which rises (A07's kind)."""
    svc = service(device, carry_tokens=True)
    svc.table.records[3] = 77
    svc.admit(
        state_id=3, q_start=1000, seqlen_q=4, swa_valid_start=900, stop_at=3000, prompt_end=2000, chunk_q=512, decode_q=2,
        kv_cached_end=950, tokens=[5, 6],
    )  # fmt: skip
    assert record(svc, 3) == {
        "phase": zos.Phase.LIVE, "seqlen_q": 4, "q_start": 1000, "prompt_end": 2000, "swa_valid_start": 900,
        "kv_cached_end": 950, "generation": 78, "error": 0, "head": 1000, "stop_at": 3000, "chunk_q": 512, "decode_q": 2,
        "error_value": 0,
    }  # fmt: skip
    assert svc.table.token_ids is not None and svc.table.token_ids[3].tolist() == [5, 6, 0, 0, 0, 0]


def test_nothing_happens_before_the_flush(device: str) -> None:
    """Host calls only stage."""
    svc = service(device)
    before = svc.table.records.clone()
    svc.admit(state_id=3, q_start=5)
    svc.set_batch([3])
    assert_bitwise_equal(svc.table.records, before, "records")
    assert svc.prepare().num_tokens.item() == 6


def test_edits_of_one_state_apply_in_call_order(device: str) -> None:
    """Release and admit again in one flush: two generations on, with the second tenant's values."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    svc.admit(state_id=2, q_start=50)
    svc.set_seqlen_q(3, 1)
    svc.pause(3)
    svc.release(3)
    svc.admit(state_id=3, q_start=9, seqlen_q=6)
    svc.set_seqlen_q(3, 2)
    svc.set_seqlen_q(3, 4)
    svc.set_valid_start(3, 8)
    found = record(svc, 3)
    assert (found["generation"], found["q_start"], found["seqlen_q"], found["phase"]) == (3, 9, 4, zos.Phase.LIVE)
    assert found["swa_valid_start"] == 8
    assert record(svc, 2)["q_start"] == 50


def test_pause_and_resume_are_conditional(device: str) -> None:
    """A finished sequence is neither paused nor resumed: the device knows, the host may not yet."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    svc.resume(3)
    assert record(svc, 3)["phase"] == zos.Phase.LIVE
    svc.pause(3)
    svc.pause(3)
    assert record(svc, 3)["phase"] == zos.Phase.PAUSED
    svc.table.phase[3] = zos.Phase.FINISHED
    svc.pause(3)
    svc.resume(3)
    assert record(svc, 3)["phase"] == zos.Phase.FINISHED


@pytest.mark.parametrize("phase", list(zos.Phase))
def test_reset(device: str, phase: zos.Phase) -> None:
    """LIVE, PAUSED and ERROR start over at position 0; a finished or free state stays as it is."""
    svc = service(device, carry_tokens=True)
    svc.admit(
        state_id=3, q_start=50, swa_valid_start=9, stop_at=500, chunk_q=32, decode_q=4, kv_cached_end=7, tokens=[1]
    )
    before = record(svc, 3)
    svc.table.phase[3] = phase
    svc.table.error[3], svc.table.error_value[3] = 7, 99
    svc.reset(3, prompt_end=100)
    after = record(svc, 3)
    if phase in (zos.Phase.FREE, zos.Phase.FINISHED):
        assert after == {**before, "phase": phase, "error": 7, "error_value": 99}
        return
    assert after == {
        **before, "phase": zos.Phase.LIVE, "q_start": 0, "swa_valid_start": 0, "head": 0, "kv_cached_end": 0, "error": 0,
        "error_value": 0, "generation": 2, "prompt_end": 100, "seqlen_q": 32,
    }  # fmt: skip
    assert svc.table.token_ids is not None and svc.table.token_ids[3].tolist() == [0] * 6
    svc.reset(3)
    assert record(svc, 3)["seqlen_q"] == 4


def test_release_clears_the_error(device: str) -> None:
    """A freed state is no longer reported by check."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    svc.flush()
    svc.table.error[3] = 7
    svc.release(3)
    svc.flush()
    svc.check()
    assert record(svc, 3)["phase"] == zos.Phase.FREE


def test_other_states_stay(device: str, seed: int) -> None:
    """An edit touches one record only."""
    svc = service(device)
    svc.table.records.copy_(torch.randint(0, 1000, (16, 16), generator=torch.Generator().manual_seed(seed)))
    before = svc.table.records.clone()
    svc.admit(state_id=7, q_start=5)
    svc.flush()
    keep = [state for state in range(16) if state != 7]
    assert_bitwise_equal(svc.table.records[keep], before[keep], "records")


def test_last_batch_of_a_slot_wins(device: str) -> None:
    """Several set_batch calls before a prepare: the last one is prepared."""
    svc = service(device, metadata_slots=2)
    for state_id in range(4):
        svc.admit(state_id=state_id, q_start=10 * state_id)
    svc.set_batch([0, 1, 2], batch=3)
    svc.set_batch([3], batch=2)
    svc.set_batch([2], batch=1, slot=1)
    assert svc.prepare().seqlens_k.tolist() == [36, 0]
    assert svc.prepare(slot=1).seqlens_k.tolist() == [26]


def test_edits_outside_are_skipped(device: str) -> None:
    """The raw operator with ids, batch rows or payloads that do not exist writes nothing anywhere."""
    svc = service(device, carry_tokens=True)
    svc.admit(state_id=3, q_start=5, tokens=[9])
    svc.flush()
    before = [svc.table.records.clone(), svc.table.token_ids.clone()]
    edits = [[state_id, Edit.SET_SEQLEN_Q, 3] for state_id in (16, 10**7, -1, -(2**31))]
    edits += [[3, Edit.APPEND_READY, row, place] for row, place in ((2, 0), (-1, 0), (0, 8), (0, -1))]
    batch_edits = [
        [1, BatchEdit.SET_BATCH, 500, 100, -1],  # more ids than a batch has
        [2, BatchEdit.SET_BATCH, 0, 1, -1],  # a batch row that is none
        [-1, BatchEdit.SET_BATCH, 0, 1, -1],
        [1, BatchEdit.SET_BATCH, 2**31 - 2, 4, -1],
        [1, BatchEdit.SET_BATCH, -2, 4, -1],
        [2, BatchEdit.SET_APPENDED, 5, 0],
        [1, 9, 0, 4, -1],  # a kind that is none
    ]
    guarded = [tensor.clone() for tensor in edit_operands([], [], device, batch_rows=4)[:4]]
    operands = list(edit_operands(edits, batch_edits, device))
    for at in (0, 2, 3):
        operands[at] = guarded[at][1:3]
    torch.ops.zos.apply_table_edits(svc.table.records, svc.table.token_ids, *operands)
    for counts in ([-1, 0], [0, -1], [32, 0], [2**31 - 1, 2**31 - 1]):  # rows that the buffer does not have
        operands[1][0, :2] = torch.tensor(counts, dtype=torch.int32)
        torch.ops.zos.apply_table_edits(svc.table.records, svc.table.token_ids, *operands)
    for tensor, plain in zip(guarded, edit_operands([], [], device, batch_rows=4), strict=False):
        assert tensor is guarded[1] or (tensor == plain).all()
    assert [count.item() for count in operands[4:6]] == [5, 5]
    assert_bitwise_equal(svc.table.records, before[0], "records")
    assert_bitwise_equal(svc.table.token_ids, before[1], "token_ids")
