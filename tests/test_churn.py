"""Test that a loop whose requests come, go, pause, restart and end on the device loses no token, no request and no state slot.

ZOS_CHURN_STEPS says how many steps are run; a million take a while (docs/structure.md says how long).
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal, true_q_start
from zos.cli.acceptance import AcceptanceModel, mixed, shifted
from zos.cli.oracle_commit import CommitOracle
from zos.cli.oracle_table import FREE, LIVE
from zos.requests import Request, RequestState

STEPS = int(os.environ.get("ZOS_CHURN_STEPS", 4000))
STEPS_OF_A_HISTORY = 400
MOST_STEPS_TO_THE_END = 2000  # within which all requests must be over once none comes any more
RECORDS = 8
ENDS_EVERY, FAILS_EVERY = 64, 512  # of the steps of a sequence, in the mean
OVER = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
SHARES = {
    "submit": 0.25,
    "cancel": 0.04,
    "preempt": 0.05,
    "resume": 0.06,
    "reset": 0.03,
}  # of replays before which it happens


class Churned:
    """A loop under churn, and a model of its table that learns of nothing but the calls made and the records read."""

    def __init__(
        self, rng: np.random.Generator, rows: int | None = None, device: str = "cpu", records: int = RECORDS
    ) -> None:
        self.rng = rng
        capacity, few = int(rng.integers(2, 14)), int(rng.integers(1, 7))
        each = int(rng.choice([1, 1, 3]))
        if rows is not None:
            capacity, few = 2 * rows, rows
        self.svc = zos.MetadataService(capacity, few, device=device, max_prefill_tokens=8, compression_ratios=())
        self.acceptance = AcceptanceModel(0.6, int(rng.integers(2**31)), 5, self.svc.device)
        self.loop = zos.DecodeLoop(self.svc, self.step, steps_per_replay=each, records=records)
        self.model = CommitOracle(capacity, 6, 8, carry_tokens=False)
        self.publish = self.svc.attach_mailbox(0, records).publish
        if device == "cpu":  # a captured step publishes by itself
            self.svc.slot(0).mailbox.publish = self.publish_now_and_then  # type: ignore[union-attr, assignment]
        self.log: deque[tuple[Any, ...]] = deque()  # calls in the order in which the device sees them, and steps
        self.unlaunched: list[tuple[Any, ...]] = []  # calls that no launch has taken along
        self.requests: list[Request] = []
        self.rows: np.ndarray | None = None  # batch after the last record checked
        self.steps_checked = self.rows_checked = 0  # rows that held a sequence which could run
        self.loop.poll()  # from now on the loop waits for its reader
        for name in ("admit", "release", "reset", "pause", "resume", "set_batch"):
            self.follow(name)

    def follow(self, name: str) -> None:
        """Write down every such call to the service."""
        call = getattr(self.svc, name)

        def followed(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            self.unlaunched.append((name, arguments, options))

        setattr(self.svc, name, followed)

    def publish_now_and_then(self) -> None:
        """Publish what a step left, or let the host wait."""
        if self.rng.random() < 0.5:  # the host learns of steps late, as of a device that runs ahead
            self.publish()

    def step(self, metadata: zos.DecodeMetadata) -> zos.StepResult:
        """Keep by the acceptance model; now and then a sequence ends, or a count is out of range."""
        tickets = metadata.tickets.long()
        kept, ends = self.result(tickets, self.acceptance.step(metadata))
        return zos.StepResult(kept.to(torch.int32), ends)

    def result(self, tickets: Any, kept: Any) -> tuple[Any, Any]:
        """(num_kept, finished) by tickets, torch or NumPy alike."""
        drawn = shifted(mixed(mixed(tickets[:, 0] ^ (tickets[:, 1] << 32)) ^ tickets[:, 2]), 20)
        return kept + 90 * (drawn % FAILS_EVERY == 1), drawn % ENDS_EVERY == 0

    # ---- what happens ----------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """So many steps with churn, then on until every request is over; the table must be the model's then."""
        while self.steps_run < steps:
            for name, share in SHARES.items():
                if self.rng.random() < share:
                    getattr(self, name)()
            self.replay()
        last = self.steps_run + MOST_STEPS_TO_THE_END
        while self.loop.pending:
            assert self.steps_run < last, f"never over: {[r for r in self.requests if r.state not in OVER]}"
            for request in self.those(RequestState.PREEMPTED):
                self.loop.resume(request)
            self.replay()
        self.compare()
        lower, upper = self.svc.bounds(range(self.svc.capacity))
        assert (lower == upper).all() and (lower == as_array(self.svc.table.q_start)).all()
        assert self.svc.counters()["stale"] == self.svc.counters()["duplicate"] == 0

    def compare(self) -> None:
        """Once every record is read the table must be the model's."""
        self.publish()
        self.check(self.loop.drain())
        self.svc.flush()
        self.log += self.unlaunched
        self.unlaunched = []
        self.apply_calls()
        assert not self.log, "steps without a record"
        assert_bitwise_equal(self.svc.table.records, self.model.records_array(), "records")

    @property
    def steps_run(self) -> int:
        """Steps launched."""
        return self.loop.steps_launched

    def launch(self) -> None:
        """Replay once; the calls made so far take effect before its first step."""
        before = self.steps_run
        self.loop.run()
        self.log += [*self.unlaunched, *[("step",)] * (self.steps_run - before)]
        self.unlaunched = []

    def replay(self) -> None:
        """Launch, and now and then look at records and bounds."""
        try:
            self.launch()
        except zos.MailboxFullError:
            self.publish()
        except ValueError as error:  # nothing was submitted so far
            assert "has no batch" in str(error)
        if self.rng.random() < 0.4:
            self.check(self.loop.poll())
        if self.rng.random() < 0.1:
            lower, upper = self.svc.bounds(range(self.svc.capacity))
            truth = true_q_start(self.svc)
            assert (lower <= truth).all() and (truth <= upper).all(), f"{lower} <= {truth} <= {upper}"

    def those(self, state: RequestState) -> list[Request]:
        """Requests in a state."""
        return [request for request in self.requests if request.state is state]

    def one(self, *states: RequestState) -> Request | None:
        """One of the requests in these states."""
        found = [request for request in self.requests if request.state in states]
        return found[self.rng.integers(len(found))] if found else None

    def submit(self) -> None:
        """A request arrives, unless very many wait."""
        if self.loop.pending < 2 * self.svc.capacity:
            q_start = int(self.rng.integers(0, 200))
            stop_at = int(self.rng.choice([0, q_start + 1 + self.rng.integers(0, 120)]))
            self.requests = [request for request in self.requests if request.state not in OVER]
            self.requests.append(self.loop.submit(q_start=q_start, stop_at=stop_at))

    def cancel(self) -> None:
        """One is given up."""
        request = self.one(RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)
        if request is not None:
            self.loop.cancel(request)

    def preempt(self) -> None:
        """One has to rest."""
        request = self.one(RequestState.RUNNING)
        if request is not None:
            self.loop.preempt(request)

    def resume(self) -> None:
        """One that rests goes on."""
        request = self.one(RequestState.PREEMPTED)
        if request is not None:
            self.loop.resume(request)

    def reset(self) -> None:
        """One starts over."""
        request = self.one(RequestState.RUNNING, RequestState.PREEMPTED)
        if request is not None:
            self.svc.reset(request.state_id)  # type: ignore[arg-type]

    # ---- what must come of it ----------------------------------------------------------------------------------------------------

    def apply_calls(self) -> list[list[int]]:
        """Let the model make the calls before the next step; returns the batches that were set."""
        batches = []
        while self.log and self.log[0] != ("step",):
            name, arguments, options = self.log.popleft()
            if name == "set_batch":
                batches.append((arguments[0] + [-1] * options["batch"])[: options["batch"]])
                continue
            if name == "admit":
                assert self.model.records[arguments[0]]["phase"] == FREE, (
                    f"state {arguments[0]} is shared by two requests"
                )
            getattr(self.model, name)(*arguments, **options)
        return batches

    def check(self, records: list[zos.StepRecord]) -> None:
        """Replay records on the model: each row's ticket, what it kept, how it ended, and what the batch holds after."""
        for record in records:
            self.steps_checked += 1
            assert record.step == self.steps_checked, "records are missing, or came twice"
            batches = self.apply_calls()
            self.log.popleft()
            states = record.state_ids.tolist()
            if self.rows is not None and states != self.rows[: len(states)].tolist():
                assert states in [batch[: len(states)] for batch in batches], "a batch that nobody set"
            tickets = np.zeros((len(states), 4), np.int64)
            for row, state_id in enumerate(states):
                its = self.model.records[state_id]
                live = state_id >= 0 and its["phase"] == LIVE
                tickets[row] = (
                    (state_id, its["generation"], its["q_start"], its["seqlen_q"]) if live else (-1, 0, state_id, 0)
                )
            self.rows_checked += int((tickets[:, 0] >= 0).sum())
            kept, ends = self.result(tickets, self.acceptance.num_kept(tickets))
            outcomes = np.array(self.model.commit(tickets.tolist(), kept.tolist(), ends.tolist()), np.int32).reshape(
                -1, 5
            )
            outcomes[:, 4] |= record.flags & zos.mailbox.IS_REFILLED
            for place, name in enumerate(("state_ids", "generations", "q_start", "kept", "flags")):
                assert_bitwise_equal(getattr(record, name), outcomes[:, place], f"{name} of step {record.step}")
            named = record.next_state_ids[record.next_state_ids >= 0]
            assert len(np.unique(named)) == len(named), f"a state stands in two rows: {record.next_state_ids}"
            changed = record.next_state_ids != record.state_ids
            assert (changed == record.refilled).all()
            self.rows = record.next_state_ids


def test_churn(seed: int) -> None:
    """A step that counts twice or never, a request that is never over, a slot given to two: each would show in the model."""
    steps = 0
    while steps < STEPS:
        churn = Churned(np.random.default_rng([seed, steps]))
        churn.run(min(STEPS_OF_A_HISTORY, STEPS))
        steps += churn.steps_run


def results_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = zos.MetadataService.commit

    def twice(svc: zos.MetadataService, metadata: Any, *results: Any) -> None:
        commit(svc, metadata, *results)
        svc.table.q_start[metadata.tickets[:, 0].clamp(min=0).long()] += 1

    monkeypatch.setattr(zos.MetadataService, "commit", twice)


def ends_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zos.requests.IS_FINISHED", 0)


def a_reset_starts_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = zos.MetadataService.reset

    def wrong(svc: zos.MetadataService, state_id: int) -> None:
        reset(svc, state_id)
        svc.flush()
        svc.table.q_start[state_id] += 1

    monkeypatch.setattr(zos.MetadataService, "reset", wrong)


def a_state_gets_a_second_row(monkeypatch: pytest.MonkeyPatch) -> None:
    set_batch = zos.MetadataService.set_batch

    def wrong(svc: zos.MetadataService, state_ids: list[int], **options: Any) -> None:
        set_batch(svc, state_ids, **options)
        ids, version = svc._edits._staged_batches[0]
        ids[1:] = ids[0]
        svc._edits._staged_batches[0] = ids, version

    monkeypatch.setattr(zos.MetadataService, "set_batch", wrong)


@pytest.mark.parametrize(
    "fault", [results_count_twice, ends_go_unnoticed, a_reset_starts_at_one, a_state_gets_a_second_row],
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_planted_faults_are_found(fault: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that finds none of these would find nothing else either."""
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for number in range(STEPS_OF_A_HISTORY):
            Churned(np.random.default_rng([seed, number])).run(STEPS_OF_A_HISTORY)
