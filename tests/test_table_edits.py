"""Test that staged edits apply in call order, all at once, and change nothing but what they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal, edit_operands
from tests.twins import APPENDED, Twins
from zos.edits import EDITS_PER_BUFFER, NUM_BUFFERS, BatchEdit, Edit
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


def test_more_edits_than_a_buffer_holds(device: str) -> None:
    """They go out in several launches, still in call order, and the batch after them."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    for number in range(2 * EDITS_PER_BUFFER + 3):
        svc.set_seqlen_q(3, number % 7)
    svc.set_batch([3], batch=1)
    assert svc.prepare().seqlens_q.tolist() == [(2 * EDITS_PER_BUFFER + 2) % 7]


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


def test_buffers_go_round(device: str, seed: int) -> None:
    """Thousands of flushes, far more than there are buffers, of different sizes: each applies what was staged for it, once."""
    rng = np.random.default_rng(seed)
    twins = Twins(device, capacity=24, carry_tokens=True)
    twins.admit(range(24), q_start=10)
    for number in range(40 * NUM_BUFFERS):
        for state_id in rng.permutation(24)[: rng.integers(1, 6)].tolist():
            twins.edit("set_seqlen_q", state_id, int(rng.integers(0, 7)))
        if number % 7 == 0:
            twins.edit("reset", number % 24)
            twins.edit("release", number % 24)
            twins.edit("admit", number % 24, q_start=number, tokens=[number, 2**40])
        if number % 5 == 0:
            twins.set_batch(rng.permutation(24)[: rng.integers(0, 9)].tolist(), flush=False)
        twins.svc.flush()
        if number % 50 == 0:
            twins.compare()
    twins.compare()
    assert_bitwise_equal(twins.svc.table.token_ids, np.array(twins.oracle.token_ids), "token_ids")
    assert int(twins.svc._edits._applied_count[0]) == 40 * NUM_BUFFERS


def test_edits_across_buffers_keep_their_order(device: str, seed: int) -> None:
    """More than a few buffers of edits in one flush, each state's among them, with token ids, a ready queue and a batch."""
    rng = np.random.default_rng(seed)
    twins = Twins(device, capacity=600, max_batch=300, carry_tokens=True)
    twins.admit(range(600), q_start=10)
    twins.set_ready(range(500))
    for number in range(3 * EDITS_PER_BUFFER):
        state_id = int(rng.integers(600))
        kind = str(rng.choice(["set_seqlen_q", "pause", "resume", "reset", "admit"]))
        if kind == "admit":
            twins.edit("release", state_id)
            tokens = rng.integers(-(2**62), 2**62, rng.integers(0, 7)).tolist()
            twins.edit("admit", state_id, q_start=number, tokens=tokens)
        else:
            twins.edit(kind, state_id, *([number % 7] if kind == "set_seqlen_q" else []))
        if number % 100 == 99:
            twins.set_ready(rng.permutation(600)[:30].tolist())
    twins.set_batch(range(299, -1, -1), flush=False)
    launches = int(twins.svc._edits._applied_count[0])
    twins.compare()
    assert_bitwise_equal(twins.svc.table.token_ids, np.array(twins.oracle.token_ids), "token_ids")
    assert int(twins.svc._edits._applied_count[0]) - launches > 5


@pytest.mark.parametrize("queues", [0, 3])
@pytest.mark.parametrize("edits", [3, 4, EDITS_PER_BUFFER - 1, EDITS_PER_BUFFER, EDITS_PER_BUFFER + 1])
def test_a_buffer_at_its_fullest(device: str, edits: int, queues: int) -> None:
    """As many edits as fit, every admission with token ids, batches of every slot, queues appended to: nothing overlaps."""
    twins = Twins(device, capacity=2 * EDITS_PER_BUFFER, max_batch=5, slots=3, carry_tokens=True)
    twins.admit(range(3))
    twins.svc.flush()
    for state_id in range(3, 3 + edits - queues):
        twins.edit("admit", state_id, tokens=[state_id, -1, 2**62, 3, 4, 5])
    for slot in range(3):
        twins.set_ready(range(slot, min(slot + 1, queues)), slot)
        twins.set_batch(range(5 * slot, 5 * slot + 5), slot=slot, flush=False)
        twins.set_prefill_batch(range(slot, slot + 5), slot)
    twins.compare()
    assert_bitwise_equal(twins.svc.table.token_ids, np.array(twins.oracle.token_ids), "token_ids")
    assert twins.svc._batches[3:6].tolist() == [list(range(slot, slot + 5)) for slot in range(3)]


def test_a_queue_counts_only_entries_that_are_there(device: str) -> None:
    """A launch that carries the first of the appended entries must not let a step take the later ones."""
    twins = Twins(device, capacity=4 * EDITS_PER_BUFFER)
    twins.admit(range(4 * EDITS_PER_BUFFER))
    twins.svc.flush()
    twins.svc.set_ready(range(EDITS_PER_BUFFER + 44))
    edits = twins.svc._edits
    counts = []
    while edits:
        twins.svc._flush_with(edits.launch)
        counts.append(edits.batch_states[0, APPENDED].item())
    assert counts == [EDITS_PER_BUFFER, EDITS_PER_BUFFER + 44]


def test_nothing_is_launched_on_staged_edits(device: str) -> None:
    """A warm-up between staging and flush launches the kernel on nothing; the edits wait, and apply once."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    svc.set_batch([3], batch=1)
    for _ in range(3):
        svc.warmup()
    assert svc.table.phase[3].item() == zos.Phase.FREE and svc._edits
    assert svc.prepare().seqlens_k.tolist() == [11]
    assert svc.table.generation[3].item() == 1 and not svc._edits


def test_a_failing_replay_keeps_the_edits(device: str) -> None:
    """A graph that cannot be launched applies nothing: all is staged still, in order, whichever of the launches it was."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    for number in range(2 * EDITS_PER_BUFFER + 5):
        svc.set_seqlen_q(3, number % 7)
    svc.set_batch([3, -1], batch=2)
    applied = svc._edits._applied_count[0]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            svc.replay(lambda: None, lambda: 1 / 0, metadata, 1)
    assert svc.slot_steps_launched() == 0
    svc.replay(lambda: pytest.fail("the graph without a drain"), svc.drain_edits, metadata, 0)
    assert not svc._edits
    metadata = svc.prepare()
    assert metadata.seqlens_q.tolist() == [(2 * EDITS_PER_BUFFER + 4) % 7, 0]
    assert svc._edits._applied_count[0] == applied + 3


def test_a_failing_launch_on_nothing_takes_no_buffer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next flush would be packed behind the buffer that the next launch applies."""
    svc = service(device)
    with monkeypatch.context() as patch:
        patch.setattr(svc._edits, "launch", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            svc.warmup()
    svc.admit(state_id=3, q_start=5)
    svc.set_batch([3], batch=1)
    assert svc.prepare().seqlens_k.tolist() == [11]


def test_failed_launch_keeps_the_edits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost: what a failing launch did not apply is staged still."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    svc.set_batch([3], batch=1)
    with monkeypatch.context() as patch:
        patch.setattr(svc._edits, "launch", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            svc.prepare()
    svc.set_batch([3, -1, -1], batch=3)  # newer than what the failed launch had packed
    assert svc.prepare().seqlens_k.tolist() == [11, 0, 0]


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
