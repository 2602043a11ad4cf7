"""Test that the buffers which carry staged edits apply all of them once and in order, going round, filling up, failing."""

from __future__ import annotations

import numpy as np
import pytest

import zos
from tests.reference import assert_bitwise_equal
from tests.twins import APPENDED, Twins
from zos.edits import EDITS_PER_BUFFER, NUM_BUFFERS
from zos.step_checks import BUFFER_HEADER_WORDS, EDIT_WORDS


def service(device: str) -> zos.MetadataService:
    return zos.MetadataService(capacity=16, max_batch=4, device=device)


def test_more_edits_than_a_buffer_holds(device: str) -> None:
    """They go out in several launches, still in call order, and the batch after them."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    for number in range(2 * EDITS_PER_BUFFER + 3):
        svc.set_seqlen_q(3, number % 7)
    svc.set_batch([3], batch=1)
    assert svc.prepare().seqlens_q.tolist() == [(2 * EDITS_PER_BUFFER + 2) % 7]


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


@pytest.mark.parametrize("edits", [1, 2 * EDITS_PER_BUFFER + 5])
def test_failed_launch_keeps_the_edits(device: str, edits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or applied twice: what a failing launch did not apply is staged still, before what comes after."""
    svc = service(device)
    svc.admit(state_id=3, q_start=5)
    for number in range(edits):
        svc.set_seqlen_q(3, 1 + number % 5)
    svc.set_batch([3], batch=1)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(svc._edits, "launch", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                svc.prepare()
        svc.set_valid_start(3, 2)
        svc.set_batch([3, -1, -1], batch=3)
    assert svc.prepare().seqlens_q.tolist() == [1 + (edits - 1) % 5, 0, 0]
    assert svc.table.swa_valid_start[3].item() == 2
    for length in (2, 4):
        svc.set_seqlen_q(3, length)
        assert svc.prepare().seqlens_q.tolist() == [length, 0, 0]
    assert svc.table.generation[3].item() == 1


def test_edits_of_a_state_stand_together(seed: int) -> None:
    """The kernel gives a state's edits to one thread: rows of a buffer must be by state, and of each in call order."""
    rng = np.random.default_rng(seed)
    svc = service("cpu")
    for state_id in range(16):
        svc.admit(state_id)
    svc.flush()
    expected: dict[int, list[int]] = {}
    for number in range(200):
        state_id = int(rng.integers(16))
        svc.set_valid_start(state_id, number)
        expected.setdefault(state_id, []).append(number)
    edits = svc._edits
    place = edits._packed % NUM_BUFFERS
    edits.pack()
    buffer = np.array(edits._buffers[place].cast("i"), np.int32)
    rows = buffer[BUFFER_HEADER_WORDS:][: 200 * EDIT_WORDS].reshape(200, EDIT_WORDS)
    assert buffer[0] == 200
    assert rows[:, [0, 2]].tolist() == [[state, number] for state in sorted(expected) for number in expected[state]]
