"""Test that the bounds which the host keeps of every length hold, whatever is staged, launched, late, repeated or unread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import zos
import zos.bounds
from tests.reference import as_array, true_q_start
from zos.batches import BatchEdits
from zos.bounds import SequenceBounds
from zos.metadata import StepMetadata

CAPACITY, ROWS, SLOTS, PROMPT = 7, 3, 2, 24
HISTORIES, CALLS = 800, 45


def check(svc: zos.MetadataService, exact: bool = False) -> None:
    """Lower <= truth <= upper; all equal where every record is read."""
    lower, upper = svc.bounds(range(CAPACITY))
    truth = true_q_start(svc)
    assert (lower <= truth).all() and (truth <= upper).all(), f"{lower} <= {truth} <= {upper}"
    assert not exact or (lower == upper).all(), f"{lower} … {upper} but every record is read"


def service() -> zos.MetadataService:
    return zos.MetadataService(CAPACITY, ROWS, device="cpu", max_prefill_tokens=PROMPT, metadata_slots=SLOTS,
                               compression_ratios=())  # fmt: skip


def replay_own_graph(
    svc: zos.MetadataService, slot: int, batch: int, results: list[tuple[torch.Tensor, torch.Tensor]]
) -> StepMetadata:
    """What a replay of a caller's graph of these steps does: captured commits count no step and publish nothing."""
    metadata = svc.slot_metadata(slot, batch, 6 * batch)
    svc._order.capturing = lambda: True  # type: ignore[method-assign]
    for result in results:
        svc.launch_prepare(metadata)
        svc.commit(metadata, *result)
        if svc.slot(slot).mailbox is not None:
            svc.publish(slot)
    del svc._order.capturing
    svc.launched(len(results), slot)
    return metadata


class _History:
    """Random calls, as an engine with two micro-batches, late results, graphs of its own and slow readers makes them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.svc = service()
        self.mailboxes = [bool(rng.random() < 0.7) for _ in range(SLOTS)]
        for slot in range(SLOTS):
            if self.mailboxes[slot]:
                self.svc.attach_mailbox(slot, records=int(rng.choice([4, 256])))
        self.lost = False  # whether records were overwritten before they were read
        self.queues = [bool(rng.random() < 0.5) for _ in range(SLOTS)]
        self.reads = rng.random() < 0.8
        self.looks = rng.choice([0.1, 1.0])
        self.prepared: dict[tuple[int, bool], StepMetadata] = {}
        self.in_use: set[int] = set()
        self.trail: list[str] = []

    def run(self, calls: int) -> None:
        """Make so many calls, and check the bounds after each."""
        for _ in range(calls):
            call = str(self.rng.choice(CALL_NAMES, p=CALL_CHANCES))
            self.trail.append(call)
            getattr(self, call)()
            if self.rng.random() < self.looks:
                self.check(exact=False)
        self.svc.flush()
        for slot in range(SLOTS):
            if self.mailboxes[slot]:
                self.read(self.svc.drain, slot)
        has_record = [self.mailboxes[slot] or not self.svc.slot_steps_launched(slot) for slot in range(SLOTS)]
        self.check(exact=all(has_record) and not self.lost)

    def check(self, exact: bool) -> None:
        """Say which calls led to bounds that do not hold."""
        try:
            check(self.svc, exact)
        except AssertionError as error:
            raise AssertionError(f"{error}; after {self.trail}") from error

    def one_of(self, states: set[int]) -> int | None:
        return int(self.rng.choice(sorted(states))) if states else None

    def some(self, most: int) -> list[int]:
        return self.rng.permutation(CAPACITY)[: self.rng.integers(0, most + 1)].tolist()

    def slot(self) -> int:
        return int(self.rng.integers(SLOTS))

    def admit(self) -> None:
        state_id = self.one_of(set(range(CAPACITY)) - self.in_use)
        if state_id is None:
            return
        prompt_end = int(self.rng.choice([0, 0, 40]))
        q_start = 0 if prompt_end else int(self.rng.integers(0, 50))
        stop_at = int(self.rng.choice([0, max(prompt_end, q_start) + 1, max(prompt_end, q_start) + 9]))
        self.svc.admit(state_id, q_start, prompt_end=prompt_end, stop_at=stop_at, chunk_q=int(self.rng.choice([0, 5])))
        self.in_use.add(state_id)

    def release(self) -> None:
        state_id = self.one_of(self.in_use)
        if state_id is not None:
            self.svc.release(state_id)
            self.in_use.remove(state_id)

    def fork(self) -> None:
        src, dst = self.one_of(self.in_use), self.one_of(set(range(CAPACITY)) - self.in_use)
        if src is not None and dst is not None:
            self.svc.fork(src, dst)
            self.in_use.add(dst)

    def reset(self) -> None:
        state_id = self.one_of(self.in_use)
        if state_id is not None:
            self.svc.reset(state_id)

    def pause(self) -> None:
        state_id = self.one_of(self.in_use)
        if state_id is not None:
            self.svc.pause(state_id)

    def resume(self) -> None:
        state_id = self.one_of(self.in_use)
        if state_id is not None:
            self.svc.resume(state_id)

    def set_batch(self) -> None:
        rows = int(self.rng.integers(0, ROWS + 1))
        self.svc.set_batch(self.some(rows), batch=rows, slot=self.slot())

    def set_prefill_batch(self) -> None:
        self.svc.set_prefill_batch(self.some(2), slot=self.slot())

    def set_ready(self) -> None:
        slot = self.slot()
        if self.queues[slot] and self.svc.slot(slot).batch is not None:
            states = [state_id for state_id in self.some(2) if state_id in self.in_use]
            if len(states) <= 2 * CAPACITY - len(self.svc.slot(slot).waiting):
                self.svc.set_ready(states, slot=slot)

    def flush(self) -> None:
        self.svc.flush()

    def prepare(self) -> None:
        slot = self.slot()
        if self.svc.slot(slot).batch is not None:
            self.prepared[slot, False] = self.svc.prepare(slot)

    def prepare_prefill(self) -> None:
        slot = self.slot()
        if self.svc.slot(slot).prefill_buffers is not None:
            self.prepared[slot, True] = self.svc.prepare_prefill(slot)

    def results(self, metadata: StepMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept counts, now and then none or too many, and sequences that end."""
        length = as_array(metadata.tickets[:, 3]).astype(np.int64)
        kept = np.where(length > 6, length, np.minimum(self.rng.integers(0, 7, metadata.batch), length))
        kept += 9 * (self.rng.random(metadata.batch) < 0.04)
        ends = self.rng.random(metadata.batch) < 0.15
        return torch.from_numpy(kept.astype(np.int32)), torch.from_numpy(ends)

    def commit(self) -> None:
        """The result of a prepared step: at once, after other calls, or once more."""
        if self.prepared:
            metadata = self.prepared[list(self.prepared)[self.rng.integers(len(self.prepared))]]
            self.svc.commit(metadata, *self.results(metadata))

    def step(self) -> None:
        """A whole step at once."""
        slot = self.slot()
        if self.svc.slot(slot).batch is not None:
            self.prepared[slot, False] = metadata = self.svc.prepare(slot)
            self.svc.commit(metadata, *self.results(metadata))

    def replay(self) -> None:
        """A graph of one's own, now and then without the flush before it."""
        slot, steps = self.slot(), int(self.rng.integers(1, 4))
        state = self.svc.slot(slot)
        if state.batch is None:
            return
        if self.rng.random() < 0.7:
            self.svc.flush()
        results = [self.results(self.svc.slot_metadata(slot, state.batch, state.tokens)) for _ in range(steps)]
        self.prepared[slot, False] = replay_own_graph(self.svc, slot, state.batch, results)

    def poll(self) -> None:
        slot = self.slot()
        if self.mailboxes[slot] and self.reads:
            self.read(self.svc.poll, slot)

    def read(self, call: Callable[[int], object], slot: int) -> None:
        while True:
            try:
                call(slot)
                return
            except zos.MailboxOverrunError:
                self.lost = True


CHANCES = {"admit": 4, "fork": 3, "release": 3, "reset": 3, "pause": 1, "resume": 1, "set_batch": 3, "set_prefill_batch": 1,
           "set_ready": 2, "flush": 2, "prepare": 2, "prepare_prefill": 1, "commit": 3, "step": 6, "replay": 2,
           "poll": 3}  # fmt: skip
CALL_NAMES = list(CHANCES)
CALL_CHANCES = np.array(list(CHANCES.values())) / sum(CHANCES.values())


def test_bounds_hold(seed: int) -> None:
    """An allocator that trusts an upper bound which is too low writes past its blocks; one never exact never frees any."""
    for number in range(HISTORIES):
        _History(np.random.default_rng([seed, number])).run(CALLS)


# ---- histories in which one mistake shows ---------------------------------------------------------------------------------


def result(kept: int, ends: bool, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows,), kept, dtype=torch.int32), torch.full((rows,), ends)


def step(svc: zos.MetadataService, kept: int, ends: bool = False) -> None:
    """A step in which every row keeps so many tokens."""
    metadata = svc.prepare()
    svc.commit(metadata, *result(kept, ends, metadata.batch))


def service_of(*states: int, records: int = 256, queue: Sequence[int] = ()) -> zos.MetadataService:
    """Make a service with these states in its batch, each at 10, and others in its ready queue; not read so far."""
    svc = service()
    svc.attach_mailbox(records=records)
    for state_id in (*states, *queue):
        svc.admit(state_id, q_start=10)
    svc.set_batch(states, batch=len(states))
    if queue:
        svc.set_ready(queue)
    return svc


def drain(svc: zos.MetadataService) -> None:
    """Read what is left; older records may be overwritten."""
    with contextlib.suppress(zos.MailboxOverrunError):
        svc.drain()
    svc.drain()


def batch_set_before_the_result() -> None:
    svc = service_of(3)
    metadata = svc.prepare()
    svc.set_batch([4], batch=1)
    svc.flush()
    svc.commit(metadata, *result(4, False, 1))
    check(svc)


def finished_before_a_staged_reset() -> None:
    svc = service_of(3)
    metadata = svc.prepare()
    svc.reset(3)
    check(svc)
    svc.commit(metadata, *result(4, True, 1))
    check(svc)
    svc.flush()
    check(svc)
    drain(svc)
    check(svc, exact=True)


def finished_before_resets_and_admitted_again() -> None:
    svc = service_of(3)
    step(svc, kept=4, ends=True)
    for _ in range(2):
        svc.reset(3)
        step(svc, kept=2)
        check(svc)
    svc.release(3)
    svc.admit(3, q_start=20)
    step(svc, kept=5)
    drain(svc)
    check(svc, exact=True)
    step(svc, kept=5)
    check(svc)
    drain(svc)
    check(svc, exact=True)


def set_refused_twice() -> None:
    svc = service_of(3, queue=[4])
    step(svc, kept=1, ends=True)  # 4 takes the row
    svc.set_batch([5], batch=1)
    svc.flush()
    svc.set_batch([6], batch=1)
    step(svc, kept=4)
    check(svc)


def smaller_batch_refused() -> None:
    svc = service_of(3, 4, queue=[5, 6])
    ends = torch.tensor([True, False])
    metadata = svc.prepare()
    svc.commit(metadata, metadata.seqlens_q, ends)  # 5 takes the first row
    svc.set_batch([0], batch=1)
    step(svc, kept=1)
    drain(svc)
    step(svc, kept=1, ends=True)  # 6 takes the first row
    svc.set_batch([0, 1], batch=2)
    for _ in range(2):
        step(svc, kept=4)
    assert svc.table.q_start[4].item() == 16 + 2 * 4, "the batch was not what this test is about"
    check(svc)


def record_overwritten() -> None:
    svc = service_of(3, 4, records=2)
    step(svc, kept=4)
    svc.set_batch([4], batch=1)
    for _ in range(3):
        step(svc, kept=1)
    drain(svc)
    check(svc)


def record_of_the_end_overwritten() -> None:
    svc = service_of(3, records=2)
    step(svc, kept=1, ends=True)
    for _ in range(3):
        step(svc, kept=1)
    drain(svc)
    check(svc)
    svc.reset(3)
    svc.flush()
    check(svc)


def record_of_a_life_before() -> None:
    svc = service_of(3)
    step(svc, kept=6)
    svc.reset(3)
    step(svc, kept=2)
    drain(svc)
    check(svc, exact=True)


def result_of_a_life_before() -> None:
    svc = service_of(3)
    metadata = svc.prepare()
    svc.reset(3)
    svc.flush()
    svc.commit(metadata, *result(4, False, 1))
    drain(svc)
    check(svc, exact=True)


def result_repeated() -> None:
    svc = service_of(3, records=2)
    metadata = svc.prepare()
    for _ in range(4):
        svc.commit(metadata, *result(4, False, 1))
    drain(svc)
    check(svc)


def result_after_a_graph() -> None:
    svc = service_of(3, 4)
    metadata = svc.prepare()
    svc.set_batch([5], batch=1)
    svc.flush()
    replay_own_graph(svc, 0, 1, [result(1, False, 1)])
    svc.commit(metadata, *result(4, False, 2))
    check(svc)


def prefill_beside_a_queue() -> None:
    svc = service_of(3, queue=[4])
    svc.admit(5, prompt_end=30)
    svc.set_prefill_batch([5])
    step(svc, kept=1, ends=True)
    metadata = svc.prepare_prefill()
    svc.commit(metadata, *result(0, False, 1))
    check(svc)
    drain(svc)
    check(svc, exact=True)
    step(svc, kept=2)
    check(svc)


def counts_the_batch_of_now(bounds: SequenceBounds, *arguments: Any) -> None:
    bounds.prepared(arguments[0], *arguments[3:])
    LAUNCHED(bounds, *arguments)


def counts_an_edit_when_staged(bounds: SequenceBounds, *arguments: Any) -> None:
    STAGE(bounds, *arguments)
    EDITS_LAUNCHED(bounds, 1)


def takes_every_set_for_accepted(svc: BatchEdits, batch_row: int, rows: np.ndarray) -> None:
    BATCH_LAUNCHED(svc, batch_row, rows)
    svc._bounds.set_states(batch_row, False, rows)


def forgets_steps_without_a_record(bounds: SequenceBounds, slot: int, last: int) -> None:
    while bounds._epochs[slot] and bounds._epochs[slot][0].last <= last:
        bounds._epochs[slot].popleft()


def takes_lives_for_one(bounds: SequenceBounds, state_id: int, q_start: int) -> None:
    since = bounds._since[:, state_id].copy()
    START(bounds, state_id, q_start)
    bounds._since[:, state_id] = since


def takes_shown_rows_for_all(svc: BatchEdits, slot: int, record: zos.StepRecord) -> None:
    LEARN_FROM(svc, slot, record)
    state = svc.slot(slot)
    state.rows = state.in_force = record.next_state_ids
    svc._bounds.set_states(slot, False, state.may_move())


def takes_a_prefill_for_a_decode_step(svc: BatchEdits, slot: int, record: zos.StepRecord) -> None:
    LEARN_FROM(svc, slot, record._replace(prefill=False))


LAUNCHED, STAGE, EDITS_LAUNCHED = SequenceBounds.launched, SequenceBounds.stage, SequenceBounds.edits_launched
BATCH_LAUNCHED, LEARN_FROM, START = BatchEdits._batch_launched, BatchEdits._learn_from, SequenceBounds._start
PAST = zos.bounds._Past
# history -> the mistake that it would show: what is replaced by what
MISTAKES: dict[Callable[[], None], list[tuple[Any, str, Any]]] = {
    batch_set_before_the_result: [(SequenceBounds, "launched", counts_the_batch_of_now)],
    finished_before_a_staged_reset: [
        (SequenceBounds, "stage", counts_an_edit_when_staged),
        (SequenceBounds, "edits_launched", lambda bounds, count: None),
    ],
    finished_before_resets_and_admitted_again: [
        (SequenceBounds, "_settle_resets", lambda bounds: bounds._pasts.clear())
    ],
    set_refused_twice: [(BatchEdits, "_batch_launched", takes_every_set_for_accepted)],
    smaller_batch_refused: [(BatchEdits, "_learn_from", takes_shown_rows_for_all)],
    record_overwritten: [(SequenceBounds, "_sum_up", forgets_steps_without_a_record)],
    record_of_the_end_overwritten: [(zos.bounds, "_Past", lambda *arguments: PAST(*arguments[:3], lost=False))],
    record_of_a_life_before: [(SequenceBounds, "_start", takes_lives_for_one)],
    result_of_a_life_before: [(zos.bounds, "IS_STALE", 0)],
    result_repeated: [(zos.bounds, "IS_DUPLICATE", 0)],
    result_after_a_graph: [(SequenceBounds, "prepared_unseen", SequenceBounds.prepared)],
    prefill_beside_a_queue: [(BatchEdits, "_learn_from", takes_a_prefill_for_a_decode_step)],
}


@pytest.mark.parametrize("history", MISTAKES, ids=lambda history: history.__name__)
def test_history(history: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these once gave bounds that did not hold; the check would say so again: it does of a service with that mistake."""
    history()
    for place, name, replacement in MISTAKES[history]:
        monkeypatch.setattr(place, name, replacement)
    with pytest.raises((AssertionError, IndexError)):
        history()
