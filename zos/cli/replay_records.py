"""The checks of a replay by requests: a host model follows the step records, and says what each of them must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from zos.cli.acceptance import AcceptanceModel
from zos.cli.replay_check import StepChecker
from zos.cli.replay_log import Call, LoggedService
from zos.cli.replay_prediction import Prediction
from zos.cli.replay_schedule import PrefillFigures
from zos.loop import DecodeLoop
from zos.mailbox import IS_FINISHED, IS_REFILLED, StepRecord
from zos.requests import Request, RequestState
from zos.service import MetadataService
from zos.table import Phase

NOBODY = -1


class RecordChecker:
    """Follows the steps of a loop on a model of table, batch and ready queue, and holds every record against it.

    The model moves by what was asked of the service (its log) and by the acceptance model alone: what a record says is compared,
    never believed. It is the schedule that a StepChecker asks for, and that one counts the mismatches of both.

    Parameters
    ----------
    service : LoggedService
        Under test.
    loop : DecodeLoop
        Its loop, on slot 0.
    acceptance : AcceptanceModel
        Tells num_kept.
    requests : int
        How many there will be.
    twin : MetadataService, optional
        The same service on the other path.

    Attributes
    ----------
    steps : StepChecker
        Judges a step's outputs, where the host looks in between.
    batch, prefill_batch, trail, prediction, figures
        As Scheduler.
    batch_sizes, step_tokens : list of int
        By step: rows that a sequence was served in, and tokens kept.
    refilled, refused : int
        Rows that the device refilled, set_batch edits that it refused.
    """

    def __init__(
        self,
        service: LoggedService,
        loop: DecodeLoop,
        acceptance: AcceptanceModel,
        requests: int,
        twin: MetadataService | None = None,
    ) -> None:
        geometry, capacity = service.geometry, service.capacity
        self._service = service
        self._acceptance = acceptance
        self._tokens_per_step = geometry.tokens_per_step
        self.prediction = Prediction(capacity, geometry.window, self._tokens_per_step, service.max_prefill_tokens)
        self.figures: PrefillFigures | None = None
        self.batch, self.prefill_batch = [NOBODY], list[int]()
        self.batch_sizes: list[int] = []
        self.step_tokens: list[int] = []
        self.trail = self.refilled = self.refused = 0
        self.steps = StepChecker(service, loop, self, acceptance, twin)
        # By request
        self._outputs = np.zeros(requests, np.int64)  # tokens that it is to generate
        self._tokens = np.zeros(requests, np.int64)  # that it did, since it was admitted or reset
        self._ended = np.zeros(requests, bool)
        self._owner = np.full(capacity, NOBODY, np.int64)  # number of the request in each state
        # The batch on the device, and its ready queue
        self._rows = np.full(service.max_batch, -1, np.int32)
        self._version = self._taken = self._last_refill = self._step = 0
        self._ready: deque[tuple[int, int]] = deque()  # (state, generation)
        self._launches: deque[tuple[int, list[Call]]] = deque()  # (first step, calls that take effect before it)
        self._calls: dict[str, Callable[..., object]] = {
            "admit": self._admit, "release": self._release, "reset": self._reset, "set_ready": self._set_ready,
            "pause": self.prediction.pause, "resume": self.prediction.resume, "bounds": self._check_bounds,
        }  # fmt: skip

    def launched(self, first_step: int) -> None:
        """Say that what the service has logged took effect before step `first_step`."""
        self._launches.append((first_step, self._service.log))
        self._service.log = []

    def look_at_bounds(self, requests: Iterable[Request]) -> None:
        """Remember what the service says of the states of live requests; judged when the model has come as far."""
        states = [request.state_id for request in requests if request.state_id is not None]
        self._compare("requests", {"states of two requests": (len(states) - len(set(states)), 0)})
        lower, upper = self._service.bounds(states)
        all_read = self._service.steps_read == self._service.slot_steps_launched()
        self._service.log.append(("bounds", (np.array(states, np.int64), lower, upper, all_read)))

    def follow(self, records: Sequence[StepRecord]) -> None:
        """Move the model on by the steps of `records`, and compare."""
        for record in records:
            self._step += 1
            while self._launches and self._launches[0][0] <= self._step:
                self._apply(self._launches.popleft()[1])
            self._follow(record)
            self._step = record.step

    def finish(self, requests: Sequence[Request], trail: int) -> None:
        """Compare, at the end, what the whole run left behind: table, counters, trail, and what each request came to."""
        self._apply(self._service.log)
        self._service.log = []
        self.steps.finish(trail)
        states = [request.state for request in requests]
        done = np.array([state is RequestState.FINISHED for state in states], bool)
        over = done | np.array([state is RequestState.CANCELLED for state in states], bool)
        lengths = np.array([request.q_start - request.columns["stop_at"] for request in requests], np.int64)
        self._compare(
            "requests",
            {
                "requests that are over": (over, np.ones_like(over)),
                "ends, by finished request": (self._ended[: len(done)][done], done[done]),
                "tokens, by finished request": (self._tokens[: len(done)][done], self._outputs[: len(done)][done]),
                "length past stop_at, by finished request": (lengths[done], np.zeros_like(lengths[done])),
            },
        )

    # ---- what was asked ------------------------------------------------------------------------------------------------------

    def _apply(self, calls: list[Call]) -> None:
        batch = None
        for name, arguments in calls:
            if name == "set_batch":
                batch = arguments  # of several the last one counts; it is applied after everything else
            else:
                self._calls[name](*arguments)
        if batch is None:
            return
        ids, read = batch
        if self._last_refill > read:  # a compare-and-set that did not know of it
            self.refused += 1
            return
        self._rows[:] = -1
        self._rows[: len(ids)] = ids
        self._version += 1

    def _admit(self, state_id: int, request: Request | None, q_start: int, stop_at: int) -> None:
        phase = int(self.prediction.columns["phase"][state_id])
        self._compare(
            "requests",
            {
                f"owner of state {state_id}, admitted": (int(self._owner[state_id]), NOBODY),
                f"phase of state {state_id}, admitted": (phase, int(Phase.FREE)),
                "stop_at of the next to arrive": (stop_at, request.columns["stop_at"] if request else NOBODY),
            },
        )
        self.prediction.admit(state_id, q_start, stop_at)
        if request is not None:
            self._owner[state_id] = request.number
            self._outputs[request.number] = request.columns["stop_at"] - request.columns["q_start"]

    def _release(self, state_id: int) -> None:
        self._owner[state_id] = NOBODY
        self.prediction.release(state_id)

    def _reset(self, state_id: int) -> None:
        if self.prediction.reset(state_id):
            number = self._owner[state_id]
            self._tokens[number], self._outputs[number] = 0, self.prediction.columns["stop_at"][state_id]

    def _set_ready(self, state_ids: Sequence[int]) -> None:
        generations = self.prediction.columns["generation"]
        self._ready += [(state_id, int(generations[state_id])) for state_id in state_ids]

    def _check_bounds(self, states: np.ndarray, lower: np.ndarray, upper: np.ndarray, all_read: bool) -> None:
        truth = self.prediction.columns["q_start"][states]
        self._compare("bounds", {"lower q_start": (np.minimum(lower, truth), lower)})
        self._compare("bounds", {"upper q_start": (np.maximum(upper, truth), upper)})
        if all_read:
            self._compare("bounds", {"q_start known exactly": (lower, upper)})

    # ---- what came of it -----------------------------------------------------------------------------------------------------

    def _follow(self, record: StepRecord) -> None:
        columns, rows = self.prediction.columns, len(record.state_ids)
        ids = self._rows[:rows].copy()
        self.batch = ids.tolist()
        served = np.flatnonzero((ids >= 0) & (columns["phase"][ids] == Phase.LIVE))
        states = ids[served]
        tickets = self.prediction.tickets(states.astype(np.int64))
        kept = self._acceptance.num_kept(tickets)
        self.prediction.decode(states, kept)
        self.trail += int((kept * (tickets[:, 2] + tickets[:, 3])).sum())
        generation, q_start, moved, flags = np.zeros((4, rows), np.int32)
        generation[served], q_start[served] = tickets[:, 1], columns["q_start"][states]
        moved[served] = q_start[served] - tickets[:, 2]
        flags[served[columns["phase"][states] == Phase.FINISHED]] = IS_FINISHED
        flags[self._refill(rows)] |= IS_REFILLED
        self.batch_sizes.append(len(served))
        self.step_tokens.append(int(moved.sum()))
        self._count_tokens(record)
        named = record.next_state_ids[record.next_state_ids >= 0]
        self._compare(
            "model",
            {
                "step": (record.step, self._step),
                "prefill": (record.prefill, False),
                "state_ids": (record.state_ids, ids),
                "generations": (record.generations, generation),
                "q_start": (record.q_start, q_start),
                "kept": (record.kept, moved),
                "flags": (record.flags, flags),
                "next_state_ids": (record.next_state_ids, self._rows[:rows]),
                "states that stand twice in the batch": (len(named) - len(set(named.tolist())), 0),
                "batch_version": (record.batch_version, self._version),
                "batches_refused": (record.batches_refused, self.refused),
                "ready_taken": (record.ready_taken, self._taken),
                "rows in error or deferred": (record.errors + record.deferred, 0),
                "results dropped": (record.stale + record.duplicate, 0),
            },
        )

    def _refill(self, rows: int) -> list[int]:
        """Put waiting sequences into rows of the first `rows` whose sequence is over; returns those."""
        phase, generation = self.prediction.columns["phase"], self.prediction.columns["generation"]
        ids, refilled = self._rows[:rows], list[int]()
        for row in np.flatnonzero((ids >= 0) & (phase[ids] == Phase.FINISHED)).tolist():
            while self._ready:
                state_id, wanted = self._ready.popleft()
                self._taken += 1
                fits = phase[state_id] == Phase.LIVE and generation[state_id] == wanted
                if fits and not (self._rows == state_id).any():
                    self._rows[row] = state_id
                    refilled.append(row)
                    break
        if refilled:
            self.refilled += len(refilled)
            self._version += 1
            self._last_refill = self._step
        return refilled

    def _count_tokens(self, record: StepRecord) -> None:
        """Count what the record says for the request that each state belongs to."""
        known = (record.generations > 0) & (record.state_ids >= 0) & (record.state_ids < len(self._owner))
        numbers = self._owner[record.state_ids[known]]
        owned = numbers >= 0
        np.add.at(self._tokens, numbers[owned], record.kept[known][owned])
        self._ended[numbers[owned & record.finished[known]]] = True

    def _compare(self, judge: str, pairs: dict[str, tuple[Any, Any]]) -> None:
        """Compare pairs of (actual, expected) by name."""
        actual = {name: np.asarray(pair[0]) for name, pair in pairs.items()}
        self.steps.compare(judge, actual, {name: np.asarray(pair[1]) for name, pair in pairs.items()})
