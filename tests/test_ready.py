"""Test that a ready queue refills the batch in the right order, and that set_batch never overwrites a refill unread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.twins import Twins
from zos.mailbox import IS_ERROR, IS_FINISHED, IS_REFILLED
from zos.table import Phase

ENTRIES_AT_ONCE = 32  # that the kernel looks at together
ROWS_AT_ONCE = 1024  # likewise


def test_rows_are_refilled_in_row_order(device: str) -> None:
    """The first finished row gets the first entry; the others keep theirs, and the next step runs the newcomers."""
    twins = Twins(device)
    twins.admit(range(8))
    twins.set_batch([0, 1, 2, 3])
    twins.set_ready([7, 5, 6])
    twins.step(finish=[1, 3])
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [0, 7, 2, 5]
    assert record.flags.tolist() == [0, IS_FINISHED | IS_REFILLED, 0, IS_FINISHED | IS_REFILLED]
    assert (record.ready_taken, record.batch_version) == (2, 2)
    assert twins.known_batch() == [0, 7, 2, 5]
    assert twins.prepare().metadata.seqlens_k.tolist() == [7, 76, 27, 56]


def test_rows_that_ended_earlier_are_refilled(device: str) -> None:
    """A row without a successor is padding until one is there, however many steps later."""
    twins = Twins(device)
    twins.admit(range(8))
    twins.set_batch([0, 1])
    twins.step(finish=[0])
    twins.step()
    assert twins.prepare().metadata.num_tokens.item() == 6
    assert [record.next_state_ids.tolist() for record in twins.read()] == [[0, 1], [0, 1]]
    twins.set_ready([4])
    twins.step()
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [4, 1] and record.flags.tolist() == [IS_REFILLED, 0]
    assert twins.prepare().metadata.num_tokens.item() == 12


def test_which_rows_are_refilled(device: str) -> None:
    """In phase ERROR yes, now or earlier; padding, FREE, PAUSED, or only in error while prepared: no."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, -1, 1, 2, 3, 4])
    twins.edit("set_valid_start", 3, 1000)  # past q_start: an error of prepare, phase LIVE
    step = twins.prepare()
    twins.edit("release", 1)
    twins.edit("pause", 2)
    twins.svc.flush()
    twins.commit(step, [7, 9, 1, 1, 1, 1])
    twins.read()
    twins.set_ready([10, 11, 12])
    twins.step()
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [10, -1, 1, 2, 3, 4]
    assert record.errors == 1 and record.flags.tolist() == [IS_REFILLED, 0, 0, 0, IS_ERROR, 0]
    twins.commit(twins.prepare(), [1, 1, 1, 1, 1, 7])  # the step that fails is the one that refills
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [10, -1, 1, 2, 3, 11]
    assert record.flags[5] == IS_ERROR | IS_REFILLED


def test_entries_that_cannot_run_are_passed_over(device: str) -> None:
    """Released, of another generation, paused, finished, in the batch already, or appended twice: gone for good."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, 1, 2, 3])
    twins.step(finish=[2])
    twins.read()
    twins.set_batch([0, 1, 3])
    twins.set_ready([10, 11, 12, 2, 1, 13, 14])
    twins.set_ready([13, 15])
    twins.edit("release", 10)
    twins.edit("release", 11)
    twins.edit("admit", 11, q_start=5)
    twins.edit("pause", 12)
    twins.svc.flush()
    twins.step(finish=[0])
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [13, 1, 3] and record.ready_taken == 6
    twins.edit("resume", 12)
    twins.step(finish=[1, 3])
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [13, 14, 15] and record.ready_taken == 9


def test_a_row_that_the_host_changed_is_left_alone(device: str) -> None:
    """A late result finishes a sequence that no longer stands in its row: whoever stands there must not be replaced."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_ready([10, 11])
    twins.set_batch([0, 1, 2])
    step = twins.prepare()
    assert twins.set_batch([5, 1])
    twins.commit(step, [1, 1, 1], [1, 1, 1])
    twins.compare()  # bounds too, while the record is unread: the step moved who no longer stands in the batch
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [5, 10, -1]  # and row 2, which the batch no longer has, takes no entry
    assert twins.known_batch() == [5, 10, -1]
    twins.step(finish=[5])
    twins.read()


def test_a_late_result_finds_the_batch_grown(device: str) -> None:
    """An entry that stands in a row which the late result does not have is in the batch already."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_ready([3, 10])
    twins.set_batch([0, 1])
    step = twins.prepare()
    assert twins.set_batch([0, 1, 2, 3], batch=6)
    twins.commit(step, [1, 1], [1, 0])
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [10, 1]
    assert twins.known_batch() == [10, 1, 2, 3, -1, -1]


def test_a_result_that_counted_before_still_refills(device: str) -> None:
    """A late duplicate moves nothing, but rows that are over get what has come to the queue since."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, 1])
    step = twins.prepare()
    twins.commit(step, [1, 1], [1, 0])
    twins.set_ready([9])
    twins.svc.flush()
    twins.commit(step, [1, 1], [1, 0])
    records = twins.read()
    assert records[1].next_state_ids.tolist() == [9, 1] and (records[1].stale, records[1].duplicate) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "entries"),
    [
        (5, 2),
        (2, 5),
        (ENTRIES_AT_ONCE, ENTRIES_AT_ONCE),
        (ENTRIES_AT_ONCE + 1, 3 * ENTRIES_AT_ONCE),
        (70, ENTRIES_AT_ONCE + 8),
        (ROWS_AT_ONCE + 1, ROWS_AT_ONCE + 200),
        (2 * ROWS_AT_ONCE + 77, 300),
        (3, ROWS_AT_ONCE + 500),
    ],
)
def test_any_number_of_rows_and_entries(device: str, rows: int, entries: int, seed: int) -> None:
    """More rows than entries or the other way round, over every limit of the kernel, with entries that cannot run between."""
    rng = np.random.default_rng([seed, rows, entries])
    twins = Twins(device, capacity=rows + entries, max_batch=rows + 3)
    twins.admit(range(rows + entries), q_start=10)
    for _ in range(4):
        ids = rng.permutation(rows + entries)
        assert twins.set_batch(ids[:rows].tolist(), batch=rows + 2)
        room = min(entries, 2 * len(ids) - len(twins.slots[0].queue or []))
        waiting = rng.permutation(ids if rng.random() < 0.5 else ids[rows:])[:room].tolist()
        twins.set_ready(waiting)
        for state_id in rng.permutation(rows + entries)[: entries // 4].tolist():
            twins.edit(str(rng.choice(["pause", "resume", "reset"])), state_id)
        for _ in range(2):
            step = twins.prepare()
            ends, kept = rng.random(len(step.tickets)) < rng.choice([0.1, 0.6, 1.0]), [1] * len(step.tickets)
            twins.commit(step, np.where(rng.random(len(kept)) < 0.1, 99, kept), ends)
        twins.read()
        twins.known_batch()
        for state_id in ids.tolist():  # the next round finds sequences that run again
            twins.edit("release", state_id)
            twins.edit("admit", state_id, q_start=10)


def test_the_queue_goes_round(device: str) -> None:
    """Entry n stands at n % K: long after the first K entries the order is still that of the calls."""
    twins = Twins(device, capacity=5, max_batch=2)
    twins.admit(range(5))
    twins.set_batch([0, 1])
    room = twins.svc._edits.ready.shape[1]
    for number in range(3 * room):
        running = twins.slots[0].batch[number % 2]
        free = [state_id for state_id in range(5) if state_id not in twins.slots[0].batch]
        for state_id in free[: 1 + number % 3]:
            twins.edit("release", state_id)
            twins.edit("admit", state_id, q_start=number)
        twins.set_ready(free[: 1 + number % 3])
        twins.step(finish=[running])
        (record,) = twins.read()
        assert record.flags[number % 2] & IS_REFILLED
    assert record.ready_taken > 2 * room


def test_the_version_rises_only_with_a_change(device: str) -> None:
    """One for a set_batch, one for a step that refills, however many rows; none for a step that refills nothing."""
    twins = Twins(device)
    twins.admit(range(16))
    versions = []
    twins.set_batch([0, 1, 2])
    twins.set_ready([0, 1])  # in the batch already: passed over, no change
    for finish in ([], [2], []):
        twins.step(finish)
    twins.set_ready([8, 9])
    twins.step(finish=[0, 1])
    twins.step()
    versions = [record.batch_version for record in twins.read()]
    assert versions == [1, 1, 1, 2, 2]
    assert twins.set_batch([8])
    twins.step()
    assert [record.batch_version for record in twins.read()] == [3]


def test_an_unread_refill_refuses_set_batch(device: str) -> None:
    """Whole, counted and reported; staged again after reading it is accepted. The refilled sequence is never lost."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, 1])
    twins.set_ready([10])
    twins.step(finish=[0])
    assert not twins.set_batch([0, 1, 2])
    twins.step()
    refilled, record = twins.read()
    assert refilled.batches_refused == 0 and record.batches_refused == 1
    assert record.next_state_ids.tolist() == [10, 1, -1] and record.batch_version == refilled.batch_version
    assert twins.known_batch() == [10, 1, -1]
    assert twins.set_batch([10, 1, 2])
    twins.step()
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [10, 1, 2] and record.batches_refused == 1


def test_a_set_batch_on_top_of_a_refused_one_is_refused(device: str) -> None:
    """A refill and a refused edit must not look like the one accepted edit that the second was staged upon."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, 1])
    twins.set_ready([10])
    twins.step(finish=[0])
    assert [twins.set_batch(ids) for ids in ([2, 1], [3, 1], [4, 1])] == [False] * 3
    twins.step()
    assert twins.read()[-1].batches_refused == 3
    assert twins.known_batch() == [10, 1]
    assert [twins.set_batch(ids) for ids in ([2, 1], [3, 1])] == [True] * 2
    twins.step()
    twins.read()
    assert twins.known_batch() == [3, 1]


def test_a_smaller_batch_leaves_nothing_behind_it(device: str) -> None:
    """A refused set_batch of more rows still widens the step: behind the batch there must be padding, no former sequence."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, 1, 2, 3])
    twins.set_batch([2])
    twins.set_ready([10])
    twins.step(finish=[2])
    assert not twins.set_batch([4, 5, 6, 7])
    assert twins.prepare().metadata.token_state_id.tolist() == [10] * 6 + [-1] * 18
    twins.step()
    twins.read()


def test_a_set_batch_and_a_refill_in_one_step(device: str) -> None:
    """The edit counts first, then the refill: the version says two changes, and both are there."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_ready([10, 11])
    twins.set_batch([0, 1])
    twins.step()
    twins.read()
    twins.set_batch([5, 1, 6], flush=False)
    twins.step(finish=[5, 6])
    (record,) = twins.read()
    assert record.next_state_ids.tolist() == [10, 1, 11] and record.batch_version == 3
    assert twins.known_batch() == [10, 1, 11]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_what_the_host_knows_when_it_reads_late(device: str, lag: int, seed: int) -> None:
    """Several set_batch in flight, refills between, records read steps later: what is accepted, and what the host believes then."""
    rng = np.random.default_rng([seed, lag])
    twins = Twins(device, capacity=40, max_batch=6)
    twins.admit(range(40), q_start=10)
    twins.set_batch([0, 1, 2])
    accepted = refused = checked = 0
    since_read = since_set = 0  # steps
    for _ in range(150 * (1 + lag)):
        action = rng.choice(["set_batch", "set_ready", "step", "step", "read", "prefill"])
        state_ids = rng.permutation(40)[: rng.integers(1, 6)].tolist()
        if rng.random() < 0.3:
            twins.compare()  # bounds too, with whatever is unread
        if action == "set_batch":
            was_accepted = twins.set_batch(state_ids, batch=int(rng.integers(len(state_ids), 7)))
            accepted, refused, since_set = accepted + was_accepted, refused + (not was_accepted), 0
        elif action == "set_ready" and len(twins.svc.slot(0).waiting) < 60:
            for state_id in state_ids:
                if twins.oracle.records[state_id]["phase"] != Phase.LIVE:
                    twins.edit("release", state_id)
                    twins.edit("admit", state_id, q_start=10)
            twins.set_ready(state_ids)
        elif action == "step" and twins.slots[0].unread < 12:
            twins.step(finish=rng.permutation(40)[:12].tolist())
            since_read, since_set = since_read + 1, since_set + 1
        elif (
            action == "prefill" and twins.slots[0].unread < 12
        ):  # its record stands in the same mailbox, and says nothing of its own batch's queue
            twins.set_prefill_batch(state_ids)
            step = twins.prepare(prefill=True)
            twins.commit(step, [1] * len(step.tickets))
            since_read, since_set = since_read + 1, since_set + 1
        elif action == "read" and since_read > lag:
            twins.read()
            if since_set:  # a record tells what became of the last set_batch
                twins.known_batch()
                checked += 1
            since_read = 0
    assert accepted and refused and checked


def test_setting_the_batch_every_step_gets_through(device: str) -> None:
    """With a record read one step late and a set_batch in flight all the time, a refusal must not refuse all that follow."""
    twins = Twins(device)
    twins.admit(range(16))
    twins.set_batch([0, 1])
    twins.set_ready([10])
    publish, twins.svc.slot(0).mailbox.publish = twins.svc.slot(0).mailbox.publish, lambda: None
    refused = []
    for number in range(6):
        refused += [record.batches_refused for record in twins.svc.poll()]
        twins.svc.set_batch([2 + number, 1], batch=2)
        publish()  # as a graph's branch does, after the host has staged: the records of the steps before
        step = twins.svc.prepare()
        ends = (step.state_ids == 2) & (number == 0)
        twins.svc.commit(step, step.seqlens_q.clamp(max=1), ends)
        if device != "cpu":
            torch.cuda.synchronize()
    assert refused == [0, 1, 1, 1]
    assert step.state_ids.tolist() == [7, 1]


def test_two_slots_have_queues_of_their_own(device: str) -> None:
    """An entry of one slot never comes to another, and their versions and counts stay apart."""
    twins = Twins(device, slots=2)
    twins.admit(range(16))
    for slot in (0, 1):
        twins.set_batch([4 * slot, 4 * slot + 1], slot=slot)
        twins.set_ready([8 + 4 * slot, 9 + 4 * slot], slot=slot)
    twins.step(finish=[4, 5], slot=1)
    twins.step(finish=[0], slot=0)
    assert twins.read(1)[0].next_state_ids.tolist() == [12, 13]
    (record,) = twins.read(0)
    assert record.next_state_ids.tolist() == [8, 1] and record.ready_taken == 1


def test_bad_arguments(device: str) -> None:
    """A wrong call is named and appends nothing, not even the ids before the wrong one."""
    svc = Twins(device, capacity=4, queue=False).svc
    for state_id in (0, 1, 2):
        svc.admit(state_id=state_id)
    for state_ids, error, named in (
        ([0, 3], ValueError, "state_id=3 is not in use"),
        ([0, 1, 0], ValueError, "state_ids names state_id 0 twice"),
        ([0, 4], IndexError, "state_id=4 is outside"),
        ([0, -1], IndexError, "state_id=-1 is outside"),
        ([0, 1.5], ValueError, "state_id=1.5"),
        (7, ValueError, "state_ids=7 is not a sequence"),
    ):
        with pytest.raises(error, match=named):
            svc.set_ready(state_ids)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="slot=1"):
        svc.set_ready([0], slot=1)
    assert not svc.slot(0).has_queue
    for _ in range(2):
        svc.set_ready([0, 1, 2])
    with pytest.raises(ValueError, match="3 ids, but the ready queue of slot 0 has room for 2: attach a mailbox"):
        svc.set_ready([0, 1, 2])
    svc.flush()
    assert svc._edits.batch_states[0].tolist()[3] == 6
    assert svc.known_batch()[1] == [0, 1, 2] * 2


@pytest.mark.parametrize("queue", [False, True])
def test_a_late_result_stays_within_bounds(device: str, queue: bool) -> None:
    """A batch set between prepare and commit is not what the step moves: the sequences of its tickets are."""
    twins = Twins(device, queue=queue)
    twins.admit(range(8))
    twins.set_batch([0, 1])
    step = twins.prepare()
    twins.set_batch([4, 5])
    twins.commit(step, [6, 3])
    twins.compare()
    twins.step()
    twins.compare()
    assert [record.kept.tolist() for record in twins.read()] == [[6, 3], [1, 1]]
