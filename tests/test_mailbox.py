"""Test that every step leaves one true record, that records arrive whole and in order, and that none is lost unnoticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import zos
from host_fallback.mailbox import CHECKSUM, HEAD, MAIL_HEADER_WORDS, PAYLOAD_WORDS, TAIL
from tests.reference import assert_bitwise_equal
from tests.twins import Step, Twins
from zos.cli.cases import random_result, random_table
from zos.cli.compare import record_arrays
from zos.cli.setups import Setup
from zos.mailbox import IS_DEFERRED, IS_DUPLICATE, IS_ERROR, IS_FINISHED, IS_REFILLED, IS_STALE, Mailbox

FLAGS = (IS_FINISHED, IS_ERROR, IS_STALE, IS_DUPLICATE, IS_DEFERRED, IS_REFILLED)


def running(device: str, records: int = 4, **options: Any) -> zos.MetadataService:
    """Make a service with two sequences in its batch, whose mailbox is attached."""
    svc = zos.MetadataService(capacity=8, max_batch=2, device=device, **options)
    for state_id in (3, 5):
        svc.admit(state_id=state_id, q_start=10 * state_id)
    svc.set_batch([3, 5])
    svc.attach_mailbox(records=records)
    return svc


def run(svc: zos.MetadataService, steps: int = 1) -> None:
    """Run steps that keep one token of each row."""
    for _ in range(steps):
        metadata = svc.prepare()
        svc.commit(metadata, metadata.seqlens_q.clamp(max=1))
    if svc.device.type == "cuda":
        torch.cuda.synchronize()


def mailbox_of(svc: zos.MetadataService) -> Mailbox:
    mailbox = svc.slot(0).mailbox
    assert mailbox is not None
    return mailbox


def publish_by_hand(svc: zos.MetadataService) -> Callable[[], None]:
    """Let commits leave records unpublished, as captured ones do; returns what publishes."""
    mailbox = mailbox_of(svc)
    publish, mailbox.publish = mailbox.publish, lambda: None

    def publish_now() -> None:
        publish()
        if svc.device.type == "cuda":
            torch.cuda.synchronize()

    return publish_now


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("max_batch", [1, 40, 2500])
def test_records_equal_the_oracle(device: str, layout: str, max_batch: int, seed: int) -> None:
    """Every field of every row, for decode and prefill steps of any size over tables with anything in them."""
    rng = np.random.default_rng([seed, max_batch])
    setup = Setup(zos.RingGeometry(16, 5), layout, (), True, 200, capacity=max_batch + 50, max_batch=max_batch)
    twins = Twins(
        device,
        capacity=setup.capacity,
        max_batch=max_batch,
        kept_tokens=True,
        geometry=setup.geometry,
        token_layout=layout,
        max_prefill_tokens=setup.max_prefill_tokens,
        carry_tokens=True,
    )
    twins.admit(range(setup.capacity))
    twins.svc.flush()
    met: Counter[int] = Counter()
    for _ in range(8 if max_batch > 1000 else 40):
        twins.load(random_table(rng, setup)[0])
        ids = rng.permutation(setup.capacity).astype(np.int32)
        ids[rng.random(len(ids)) < 0.05] = -1
        rows = int(rng.choice([0, 1, max_batch, max_batch, rng.integers(0, max_batch + 1)]))
        budget = int(rng.integers(6, rows * 6 + 1)) if layout == "packed" and rows and rng.random() < 0.5 else None
        assert twins.set_batch(ids[:rows].tolist(), max_tokens=budget)
        twins.set_prefill_batch(ids[: min(rows, 7)].tolist())
        room = min(5, 2 * setup.capacity - len(twins.slots[0].queue or []))
        twins.set_ready([state_id for state_id in ids[rows : rows + room].tolist() if state_id >= 0])
        for prefill in (False, True, False):
            step = twins.prepare(prefill=prefill)
            for _ in range(rng.integers(1, 3)):  # also a second time
                if rng.random() < 0.2:
                    twins.edit("reset", int(rng.integers(setup.capacity)))
                    twins.edit("pause", int(rng.integers(setup.capacity)))
                    twins.svc.flush()
                _commit_random(rng, setup, twins, step)
            for record in twins.read():
                met.update({flag: int((record.flags & flag > 0).sum()) for flag in FLAGS})
    assert max_batch != 40 or all(met[flag] for flag in FLAGS if flag != IS_DEFERRED or layout == "packed"), met


def _commit_random(rng: np.random.Generator, setup: Setup, twins: Twins, step: Step) -> None:
    tickets = np.array(step.tickets, np.int64).reshape(-1, 4)
    result = random_result(rng, setup, tickets)
    ids = rng.integers(-(2**62), 2**62, (len(tickets), 6)) if rng.random() < 0.7 else None
    twins.commit(step, result.num_kept, result.finished, result.next_tokens, ids)


def test_an_eager_commit_publishes_at_once(device: str) -> None:
    """Without a graph to publish beside, the record must not wait for the next step."""
    svc = running(device)
    run(svc)
    (record,) = svc.poll()
    assert (record.step, record.prefill) == (1, False)
    assert record.state_ids.tolist() == record.next_state_ids.tolist() == [3, 5]
    assert record.q_start.tolist() == [31, 51] and record.kept.tolist() == [1, 1]
    assert record.generations.tolist() == [1, 1] and not (record.finished | record.failed | record.refilled).any()
    assert record.kept_tokens is None
    assert svc.poll() == []


def test_several_records_are_published_in_order(device: str) -> None:
    """One publication brings all that is due, the oldest first; one without news brings nothing."""
    svc = running(device)
    publish = publish_by_hand(svc)
    run(svc, 3)
    assert svc.poll() == []
    publish()
    publish()
    assert [(record.step, record.q_start[0]) for record in svc.poll()] == [(1, 31), (2, 32), (3, 33)]


@pytest.mark.parametrize("records", [2, 3, 64])
def test_the_ring_goes_round(device: str, records: int) -> None:
    """A reader that keeps up gets every record, however often the ring has gone round."""
    svc = running(device, records)
    seen = []
    for number in range(5 * records):
        run(svc, 1 + number % records)
        seen += svc.poll()
    assert [record.step for record in seen] == list(range(1, len(seen) + 1))
    assert [record.q_start[0] for record in seen] == list(range(31, 31 + len(seen)))


@pytest.mark.parametrize("at_once", [False, True])
def test_an_overrun_is_named_and_reading_goes_on(device: str, at_once: bool) -> None:
    """Records overwritten before they were read are named, also when they were never published; the others come."""
    svc = running(device)
    run(svc, 2)
    assert [record.step for record in svc.poll()] == [1, 2]
    publish = publish_by_hand(svc) if at_once else None
    run(svc, 9)
    if publish:
        publish()
        mailbox_of(svc).publish = publish
    with pytest.raises(zos.MailboxOverrunError, match=r"records 3 … 7 were overwritten .* more than 4 records"):
        svc.poll()
    assert [record.step for record in svc.poll()] == [8, 9, 10, 11]
    run(svc)
    assert [record.step for record in svc.drain()] == [12]


def test_records_read_before_an_overrun_come_later(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device laps a reader in the midst of a poll: what it had read already is not lost with the error."""
    svc = running(device)
    run(svc, 3)
    read, calls = Mailbox.read, []

    def lapped(mailbox: Mailbox) -> Any:
        calls.append(1)
        if len(calls) == 3:
            run(svc, 8)
        return read(mailbox)

    monkeypatch.setattr(Mailbox, "read", lapped)
    with pytest.raises(zos.MailboxOverrunError, match="records 3 … 7 were"):
        svc.poll()
    assert [record.step for record in svc.poll()] == [1, 2, 8, 9, 10, 11]


def whole_record(svc: zos.MetadataService) -> np.ndarray:
    """Run a step, and return the mail of its record."""
    run(svc)
    return mailbox_of(svc)._mails[1]


@pytest.mark.parametrize("word", [0, 16, 21, -1])
def test_a_record_with_a_wrong_word_is_not_returned(device: str, word: int) -> None:
    """The tail is there, a word of the payload not yet: torn, as a weakly ordered CPU may see it; whole at a later look."""
    svc = running(device)
    mail = whole_record(svc)
    payload = mail[MAIL_HEADER_WORDS : MAIL_HEADER_WORDS + mail[PAYLOAD_WORDS]]
    payload[word] += 1
    assert svc.poll() == []
    payload[word] -= 1
    assert [record.step for record in svc.poll()] == [1]


def test_torn_records_of_other_kinds(device: str) -> None:
    """Words that changed places, a wrong checksum, a length that is none: nothing of them is returned."""
    svc = running(device)
    mail = whole_record(svc)
    payload = mail[MAIL_HEADER_WORDS:]
    for _ in range(2):
        payload[[16, 17]] = payload[[17, 16]]  # the rows' states: the sum of the words stays
        if payload[16] == 5:
            assert svc.poll() == []
    for word, wrong in ((CHECKSUM, 0), (PAYLOAD_WORDS, 0), (PAYLOAD_WORDS, -5), (PAYLOAD_WORDS, 2**30), (TAIL, 0)):
        right, mail[word] = int(mail[word]), wrong
        assert svc.poll() == []
        mail[word] = right
    assert [record.step for record in svc.poll()] == [1]


def test_a_record_being_overwritten_is_not_returned(device: str) -> None:
    """Its head has a newer number than its tail: the payload may be of either."""
    svc = running(device)
    mail = whole_record(svc)
    mail[HEAD] = 5
    with pytest.raises(zos.MailboxOverrunError, match="records 1 … 1 were"):
        svc.poll()
    assert svc.poll() == []
    run(svc)
    assert [record.step for record in svc.poll()] == [2]


def test_wait(device: str) -> None:
    """It returns up to the step asked for, publishes what no commit did, and gives up in time without losing a record."""
    svc = running(device)
    publish = publish_by_hand(svc)
    run(svc, 2)
    publish()
    run(svc)
    with pytest.raises(TimeoutError, match=r"record of step 3 did not come within 0.01 s; last read: 2"):
        svc.wait(3, timeout_s=0.01)
    mailbox_of(svc).publish = publish
    assert [record.step for record in svc.wait(3)] == [1, 2, 3]
    assert svc.wait(3) == svc.wait(1) == []
    with pytest.raises(ValueError, match="step=4 is not launched: slot 0 has launched 3"):
        svc.wait(4)


def test_drain_publishes_the_last_step(device: str) -> None:
    """Captured steps publish one step late: the last record must not wait for a replay that does not come."""
    svc = running(device)
    publish = publish_by_hand(svc)
    run(svc, 3)
    mailbox_of(svc).publish = publish
    assert [record.step for record in svc.drain()] == [1, 2, 3]
    assert svc.drain() == []


def test_attached_after_steps_have_run(device: str) -> None:
    """Numbers go on from the steps that left no record; a mailbox with records is not replaced, an empty one is."""
    svc = running(device, records=2)
    run(svc, 2)
    with pytest.raises(ValueError, match="slot 0 has a mailbox, and steps have left records in it"):
        svc.attach_mailbox()
    late = zos.MetadataService(capacity=8, max_batch=2, device=device)
    late.admit(state_id=3, q_start=10)
    late.set_batch([3])
    run(late, 5)
    for records in (2, 3):
        late.attach_mailbox(records=records)
    run(late, 3)
    assert [(record.step, record.q_start[0]) for record in late.drain()] == [(6, 16), (7, 17), (8, 18)]


def test_records_are_the_readers_own(device: str) -> None:
    """What was returned stays as it is when the ring comes round to its place."""
    svc = running(device, records=2)
    run(svc)
    (record,) = svc.poll()
    before = {name: array.copy() for name, array in record_arrays(record).items()}
    run(svc, 6)
    for name, array in record_arrays(record).items():
        assert_bitwise_equal(array, before[name], name)


def test_two_slots_have_mailboxes_of_their_own(device: str) -> None:
    """Each slot's steps are numbered and recorded apart, in whatever order they end."""
    twins = Twins(device, slots=2)
    twins.admit(range(16))
    twins.set_batch([0, 1], slot=0)
    twins.set_batch([4, 5, 6], slot=1)
    first, second = twins.prepare(0), twins.prepare(1)
    twins.commit(second, [1, 2, 3])
    twins.commit(first, [4, 5])
    twins.step(slot=1)
    assert [record.step for record in twins.read(1)] == [1, 2]
    assert [record.kept.tolist() for record in twins.read(0)] == [[4, 5]]


def test_prefill_and_decode_steps_share_a_mailbox(device: str) -> None:
    """A prefill's record says nothing of its own batch's version: the host would take it for the decode batch's."""
    twins = Twins(device)
    twins.admit(range(8))
    twins.admit([8, 9], q_start=0, prompt_end=300, chunk_q=200)
    twins.set_batch([0, 1])
    twins.set_ready([5, 6])
    twins.set_prefill_batch([8, 9])
    twins.step(finish=[0])
    for _ in range(2):
        twins.commit(twins.prepare(prefill=True), [0, 0])
    twins.step(finish=[1])
    records = twins.read()
    assert [record.prefill for record in records] == [False, True, True, False]
    assert [record.next_state_ids.tolist() for record in records] == [[5, 1], [8, 9], [8, 9], [5, 6]]
    assert [record.batch_version for record in records] == [2, 2, 2, 3]
    assert twins.known_batch() == [5, 6] and twins.set_batch([5, 6, 7])


def test_bad_use(device: str) -> None:
    """No mailbox, none of that slot, too few records, token ids that records have no room for."""
    svc = zos.MetadataService(capacity=8, max_batch=2, device=device)
    for call in (svc.poll, svc.drain, svc.publish, lambda: svc.wait(0)):
        with pytest.raises(ValueError, match="slot=0 has no mailbox: call attach_mailbox first"):
            call()
    with pytest.raises(ValueError, match="records=1"):
        svc.attach_mailbox(records=1)
    with pytest.raises(IndexError, match="slot=1"):
        svc.attach_mailbox(slot=1)
    svc = running(device)
    metadata = svc.prepare()
    with pytest.raises(ValueError, match="kept_tokens given, but the mailbox of slot 0 has no room for them"):
        svc.commit(metadata, metadata.seqlens_q, kept_tokens=torch.zeros(2, 6, dtype=torch.int64, device=device))
    assert svc.drain() == []


def test_warmup_leaves_no_record(device: str) -> None:
    """A step on private padding is nobody's step: numbers, batch and queue stay as they are."""
    twins = Twins(device)
    twins.admit(range(4))
    twins.set_batch([0, 1])
    twins.set_ready([2])
    twins.step(finish=[0])
    twins.svc.warmup()
    twins.step()
    assert [record.step for record in twins.read()] == [1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 3])
def test_captured_steps_leave_records(steps: int) -> None:
    """A graph of prepare and commit, with a publication between two commits, replayed: every record, and those of eager steps."""
    twins = Twins("cuda", records=16)
    svc = twins.svc
    twins.admit(range(8))
    twins.set_batch([0, 1, 2])
    twins.set_ready([5, 6, 7])
    svc.warmup()
    svc.flush()  # a capture would replay what is staged
    metadata = svc.slot_metadata(0, 3, 18)
    num_kept = torch.full((3,), 2, dtype=torch.int32, device="cuda")
    finished = torch.tensor([False, True, False], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            svc.publish()
            svc.prepare()
            svc.commit(metadata, num_kept, finished)
    assert svc.poll() == [] and svc.slot_steps_launched() == 0
    for _ in range(4):
        svc.flush()
        graph.replay()
        svc.launched(steps)
        for _ in range(steps):
            tickets = twins.oracle.prepare(twins.slots[0].batch[:3])["tickets"]
            twins.slots[0].commit(tickets, [2, 2, 2], [False, True, False])
    assert svc.slot_steps_launched() == 4 * steps
    twins.read()
    twins.step()
    assert [record.step for record in twins.read()] == [4 * steps + 1]
