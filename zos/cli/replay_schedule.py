"""The replay's scheduler: admits requests on a simulated clock and predicts, without asking, what the device holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from zos.cli.acceptance import AcceptanceModel
from zos.cli.traces import Request
from zos.loop import DecodeLoop
from zos.service import MetadataService
from zos.table import Phase


class Scheduler:
    """Continuous batching over the states of a service, first come, first served.

    A prompt counts as already prefilled: its sequence enters at q_start = prompt length and stops at prompt + output length.
    The device is never asked: the acceptance model tells how far each sequence is, so the batch is set only when it changes.

    Parameters
    ----------
    requests : sequence of Request
        In order of arrival, each with output.
    service : MetadataService
        With as many states as rows in a batch.
    loop : DecodeLoop
        Whose batch is set.
    acceptance : AcceptanceModel
        The one that the loop's step uses.
    step_ms : float
        What a step takes on the simulated clock.

    Attributes
    ----------
    batch : list of int
        State of each row of the next step, until `end_step` those of the last.
    clock_ms : float
    admitted, completed : int
        Requests so far.
    trail : int
        Sum of num_kept * seqlens_k of all rows so far, what commit cut at stop_at included.
    batch_sizes, step_tokens : list of int
        By step: rows, and tokens that sequences moved on by.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        service: MetadataService,
        loop: DecodeLoop,
        acceptance: AcceptanceModel,
        step_ms: float,
    ) -> None:
        self._service = service
        self._loop = loop
        self._acceptance = acceptance
        self._step_ms = step_ms
        self._waiting = deque(requests)
        self._free = list(reversed(range(service.capacity)))  # the last one released is taken first: reuse at once
        self._rows = np.zeros(0, np.int64)  # `batch` as an array
        self._finished: list[int] = []  # states to release before the next step
        # the prediction, by state
        self._phase = np.full(service.capacity, Phase.FREE, np.int64)
        self._generation = np.zeros(service.capacity, np.int64)
        self._q_start = np.zeros(service.capacity, np.int64)
        self._stop_at = np.zeros(service.capacity, np.int64)
        self.batch: list[int] = []
        self.clock_ms = 0.0
        self.admitted = 0
        self.completed = 0
        self.trail = 0
        self.batch_sizes: list[int] = []
        self.step_tokens: list[int] = []

    def begin_step(self) -> bool:
        """Stage releases, admissions and, if they change it, the batch of the next step; False when no request is left."""
        changed = bool(self._finished)
        for state_id in self._finished:
            self._release(state_id)
        self._finished = []
        if changed:
            self.batch = [state_id for state_id in self.batch if self._phase[state_id] == Phase.LIVE]
        if not self.batch and self._waiting:
            self.clock_ms = max(self.clock_ms, self._waiting[0].arrival_ms)
        while self._waiting and self._free and self._waiting[0].arrival_ms <= self.clock_ms:
            self.batch.append(self._admit(self._waiting.popleft()))
            changed = True
        if changed and self.batch:
            self._rows = np.array(self.batch)
            self._loop.set_batch(self.batch)
        return bool(self.batch)

    def end_step(self) -> None:
        """Predict what the step kept; the clock moves on."""
        rows = self._rows
        tickets = np.empty((len(rows), 4), np.int64)
        tickets[:, 0] = rows
        tickets[:, 1] = self._generation[rows]
        tickets[:, 2] = before = self._q_start[rows]
        tickets[:, 3] = self._service.geometry.tokens_per_step
        kept = self._acceptance.num_kept(tickets)
        after = np.minimum(before + kept, self._stop_at[rows])
        self._q_start[rows] = after
        self._finished = rows[after == self._stop_at[rows]].tolist()
        self._phase[self._finished] = Phase.FINISHED
        self.completed += len(self._finished)
        self.trail += int((kept * (before + tickets[:, 3])).sum())
        self.batch_sizes.append(len(rows))
        self.step_tokens.append(int((after - before).sum()))
        self.clock_ms += self._step_ms

    def predicted(self) -> dict[str, np.ndarray]:
        """int32 columns of the table by name, as the device should hold them once everything staged is applied."""
        columns = {
            "phase": self._phase,
            "generation": self._generation,
            "q_start": self._q_start,
            "stop_at": self._stop_at,
        }
        return {name: column.astype(np.int32) for name, column in columns.items()}

    def _admit(self, request: Request) -> int:
        state_id = self._free.pop()
        stop_at = request.prompt_tokens + request.output_tokens
        self._service.admit(state_id=state_id, q_start=request.prompt_tokens, stop_at=stop_at)
        self._phase[state_id] = Phase.LIVE
        self._generation[state_id] += 1
        self._q_start[state_id] = request.prompt_tokens
        self._stop_at[state_id] = stop_at
        self.admitted += 1
        return state_id

    def _release(self, state_id: int) -> None:
        self._service.release(state_id)
        self._phase[state_id] = Phase.FREE
        self._generation[state_id] += 1
        self._free.append(state_id)
