"""Requests of a loop: submitted in arrival order, they get a state slot and a batch row, and give both back when they are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from zos.allocator import StateSlotAllocator
from zos.errors import MailboxOverrunError
from zos.mailbox import IS_DEFERRED, IS_DUPLICATE, IS_ERROR, IS_FINISHED, IS_STALE, StepRecord
from zos.service import MetadataService

NO_RESULT = IS_STALE | IS_DUPLICATE | IS_DEFERRED  # rows that say nothing of where their sequence is
ENDS = IS_FINISHED | IS_ERROR
NEVER = np.iinfo(np.int64).max


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"  # for a state slot
    RUNNING = "running"  # it has a slot, and a batch row or a place in the ready queue
    PREEMPTED = "preempted"  # it keeps its slot, no step serves it
    FINISHED = "finished"
    FAILED = "failed"  # its state is in error on the device
    CANCELLED = "cancelled"


class StateLengths:
    """What a scheduler knows of each state that a request has, so that a record's rows are read all at once."""

    def __init__(self, capacity: int) -> None:
        # One place more, which -1, the state of a row without one, names: no request ever has it.
        self.q_start = np.zeros(capacity + 1, np.int64)  # length, as of the last record read
        # Steps launched before the request got the state; NEVER: no request has it
        self.after_step = np.full(capacity + 1, NEVER)

    def learn(self, record: StepRecord) -> np.ndarray:
        """Take in how far sequences are; returns the rows whose sequence may have ended."""
        states, flags = record.state_ids, record.flags
        tells = (self.after_step[states] < record.step) & ((flags & NO_RESULT) == 0)
        ends = tells & ((flags & ENDS) != 0)
        moved = tells & ~ends & (record.q_start != 0)  # 0: the row had no tokens
        self.q_start[states[moved]] = record.q_start[moved]
        return np.flatnonzero(ends)


@dataclass(eq=False)
class Request:
    """One sequence that a loop was asked to run; what `DecodeLoop.submit` returns."""

    number: int  # in order of arrival
    columns: dict[str, Any]  # arguments of MetadataService.admit
    state: RequestState = RequestState.WAITING
    state_id: int | None = None  # its state slot, while it has one
    _lengths: StateLengths | None = field(default=None, repr=False)  # where its length stands while it has a slot
    _last_q_start: int = 0  # its length when it gave the slot back

    @property
    def q_start(self) -> int:
        """Length, as of the last record read."""
        if self._lengths is None or self.state_id is None:
            return self._last_q_start
        return int(self._lengths.q_start[self.state_id])

    def take_state(self, state_id: int, lengths: StateLengths, q_start: int, after_step: int) -> None:
        """Have a state of this length from now on; records of steps up to `after_step` tell of another's."""
        self.state_id, self._lengths = state_id, lengths
        lengths.q_start[state_id], lengths.after_step[state_id] = q_start, after_step

    def leave_state(self) -> None:
        """Have no state any more; its length stays what it was."""
        if self._lengths is not None and self.state_id is not None:
            self._last_q_start = self.q_start
            self._lengths.after_step[self.state_id] = NEVER
        self.state_id = None


class RequestScheduler:
    """What a loop does for requests: slots, batch rows and the ready queue, decided from records alone, never by asking the device.

    A request runs in the batch while there are rows; past that it waits in the ready queue, from which `commit` refills rows on
    the device. The host learns of that from the records, so its edits of the batch are compare-and-set: one that came too late
    is refused whole, and the next replay sets the batch anew.

    Parameters
    ----------
    service : MetadataService
        Whose states the requests get.
    slot : int
        Metadata slot.
    max_rows : int
        Most rows of a batch.
    """

    def __init__(self, service: MetadataService, slot: int, max_rows: int) -> None:
        self._service = service
        self._slot = slot
        self._max_rows = max_rows
        self._requests: dict[int, Request] = {}  # by number; those not over
        self._by_state: dict[int, Request] = {}  # by state id
        self._lengths = StateLengths(service.capacity)
        self._waiting: deque[Request] = deque()
        self._allocator: StateSlotAllocator | None = None
        self._submitted = 0
        self._inbox: list[StepRecord] = []  # read, not yet delivered
        self._has_reader = False  # whether the caller has ever asked for records
        self._dropped: tuple[int, int] | None = None  # first and last step of records that came before it asked

    def use_states(self, state_ids: Iterable[int]) -> None:
        """Say which states requests may get. Default: all of the service's that are not in use.

        Raises
        ------
        ValueError
            Requests were submitted already, or a state is in use.
        IndexError
            An id is out of range.
        """
        if self._allocator is not None:
            raise ValueError("requests were submitted already: their states are handed out")
        ids = list(state_ids)
        in_use = [state_id for state_id in ids if self._service.in_use(state_id)]
        if in_use:
            raise ValueError(f"state_id={in_use[0]} is in use: release it first")
        self._allocator = StateSlotAllocator(ids)

    def submit(self, **columns: Any) -> Request:
        """Ask for a sequence to be run, in arrival order.

        Parameters
        ----------
        **columns
            Arguments of MetadataService.admit but for state_id, which the loop chooses: q_start, stop_at, swa_valid_start, tokens …

        Returns
        -------
        Request
            Its `state` and `q_start` follow the records that are read.

        Raises
        ------
        ValueError
            A value breaks a rule of `admit`, or the loop has no mailbox to learn from.
        """
        if self._service.slot(self._slot).mailbox is None:
            raise ValueError("the loop has no mailbox (records=0): it would never learn that a request is over")
        self._service.check_admission(**columns)
        if self._allocator is None:
            self.use_states(
                state_id for state_id in range(self._service.capacity) if not self._service.in_use(state_id)
            )
        if not self._submitted:
            self._service.set_ready([], self._slot)
        request = Request(self._submitted, columns)
        self._submitted += 1
        self._requests[request.number] = request
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Drop a request; results still outstanding are dropped by the device. No-op for one that is over."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._over(request, RequestState.CANCELLED)
        elif request.state in (RequestState.RUNNING, RequestState.PREEMPTED):
            self._over(request, RequestState.CANCELLED)

    def preempt(self, request: Request) -> None:
        """Let a running request rest: it keeps its slot and what it has, and results still outstanding count."""
        if request.state is not RequestState.RUNNING or request.state_id is None:
            raise ValueError(f"request {request.number} is {request.state.value}, not running")
        self._service.pause(request.state_id)
        request.state = RequestState.PREEMPTED

    def resume(self, request: Request) -> None:
        """Let a preempted request run on."""
        if request.state is not RequestState.PREEMPTED or request.state_id is None:
            raise ValueError(f"request {request.number} is {request.state.value}, not preempted")
        self._service.resume(request.state_id)
        request.state = RequestState.RUNNING

    @property
    def pending(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    # ---- for the loop --------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Before a replay: read what has come, admit what fits, and set the batch or the ready queue where that changes them."""
        assert self._allocator is not None
        self._take(self._service.poll(self._slot))
        while self._waiting and (state_id := self._allocator.take()) is not None:
            request = self._waiting[0]
            try:
                self._service.admit(state_id, **request.columns)
            except ValueError:  # somebody else admitted the state: the request waits on
                self._allocator.give_back(state_id)
                raise
            self._waiting.popleft()
            request.state = RequestState.RUNNING
            q_start = int(self._service.bounds([state_id])[0][0])
            request.take_state(state_id, self._lengths, q_start, self._service.slot_steps_launched(self._slot))
            self._by_state[state_id] = request
        rows, queued = self._service.known_batch(self._slot)
        running = {
            state_id: request for state_id, request in self._by_state.items() if request.state is RequestState.RUNNING
        }
        live = [state_id for state_id in rows if state_id in running]
        in_rows = set(live)
        queued = [state_id for state_id in queued if state_id in running and state_id not in in_rows]
        placed = in_rows.union(queued)
        arrivals = sorted(running.keys() - placed, key=lambda state_id: running[state_id].number)
        room = self._max_rows - len(live)
        if room > 0 and (arrivals or queued):
            self._stage_rows(live + (queued + arrivals)[:room])
            arrivals = arrivals[max(0, room - len(queued)) :]
        elif self._shrinks(len(live), len(rows)):
            self._stage_rows(live)
        if arrivals:  # those that the queue has no room for come later: entries of requests that left it count until they are taken
            self._service.set_ready(arrivals[: self._service.ready_room(self._slot)], self._slot)

    def _take(self, records: list[StepRecord]) -> None:
        """Learn from records, and keep them for `poll`."""
        self._inbox += records
        if not self._has_reader:
            self._drop_oldest()
        for record in records if self._by_state else ():
            for row in self._lengths.learn(record).tolist():
                state_id = int(record.state_ids[row])
                request = self._by_state[state_id]
                if record.flags[row] & IS_FINISHED:
                    self._lengths.q_start[state_id] = record.q_start[row]
                    self._over(request, RequestState.FINISHED)
                elif not self._service.lives_on(state_id, record.step, self._slot):
                    self._over(request, RequestState.FAILED)
        if self._allocator is not None and records:
            self._allocator.seen(records[-1].step)

    def _drop_oldest(self) -> None:
        """Keep no more records for a caller who has never asked for one than the mailbox would hold."""
        mailbox = self._service.slot(self._slot).mailbox
        surplus = 0 if mailbox is None else max(0, len(self._inbox) - mailbox.records)
        if surplus:
            first = self._inbox[0].step if self._dropped is None else self._dropped[0]
            self._dropped = first, self._inbox[surplus - 1].step
            del self._inbox[:surplus]

    def _delivered(self) -> list[StepRecord]:
        self._has_reader = True
        if self._dropped is not None:
            (first, last), self._dropped = self._dropped, None
            raise MailboxOverrunError(
                f"records {first} … {last} came before anyone had asked for records, and were dropped"
            )
        records, self._inbox = self._inbox, []
        return records

    def _over(self, request: Request, state: RequestState) -> None:
        request.state = state
        del self._requests[request.number]
        if request.state_id is not None and self._allocator is not None:
            self._service.release(request.state_id)
            # Steps launched so far may still have the state in their batch.
            self._allocator.retire(request.state_id, self._service.slot_steps_launched(self._slot))
            del self._by_state[request.state_id]
            request.leave_state()

    def _stage_rows(self, state_ids: list[int]) -> None:
        """Set the batch of the next steps."""
        raise NotImplementedError

    def _shrinks(self, live: int, rows: int) -> bool:
        """Whether so many live of so many rows would fit a smaller batch."""
        raise NotImplementedError
