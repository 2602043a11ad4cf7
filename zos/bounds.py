"""SequenceBounds: how far each sequence is at least and at most, known on the host without asking the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from zos.mailbox import IS_ERROR, IS_FINISHED, StepRecord

EPOCHS_UNREAD = 64  # runs of steps of a slot without a mailbox that are kept apart before they are summed up


@dataclass
class _Epoch:
    """Neighbouring steps of a slot that could only move these states."""

    states: np.ndarray
    tokens: int  # most that a step moves each of them by
    first: int  # number of the first step
    last: int


class SequenceBounds:
    """Lower and upper q_start of every state, made of staged edits, launched steps and records read.

    A state is exactly where the last record of its generation left it; every step launched since may have moved it by nothing or by
    a whole step. Steps are counted by slot, as the slot's mailbox numbers them.

    Parameters
    ----------
    capacity : int
        Number of states.
    slots : int
        Metadata slots.
    """

    def __init__(self, capacity: int, slots: int) -> None:
        self._known = np.zeros(capacity, np.int64)  # q_start after the last record read, or as edited
        self._most = np.zeros(capacity, np.int64)  # the same, but for resets that may not have taken effect
        self._stop_at = np.full(capacity, np.iinfo(np.int64).max, np.int64)
        self._generation = np.zeros(capacity, np.int64)
        self._still = np.ones(capacity, bool)  # no step moves it: finished, in error, not in use
        self._since = np.zeros((slots, capacity), np.int64)  # by slot: steps up to this one do not count for the state
        self._resets: set[int] = set()  # states reset while they may have been finished, which a reset leaves alone
        self._launched = [0] * slots
        self._read = [0] * slots
        self._has_reader = [False] * slots
        self._epochs: list[deque[_Epoch]] = [deque() for _ in range(slots)]
        self._states: dict[tuple[int, bool], np.ndarray] = {}  # (slot, prefill) -> states that its next step may move

    # ---- what the service tells ----------------------------------------------------------------------------------------------

    def admit(self, state_id: int, q_start: int, stop_at: int) -> None:
        """A state starts over at q_start, in a new generation."""
        self._known[state_id] = self._most[state_id] = q_start
        self._stop_at[state_id] = stop_at or np.iinfo(np.int64).max
        self._still[state_id] = False
        self._new_generation(state_id)

    def reset(self, state_id: int) -> None:
        """A state starts over at 0, unless it is finished by then."""
        if self._still[state_id] and self._stop_at[state_id] <= self._known[state_id]:
            return  # known to be finished
        upper = int(self.bounds(np.array([state_id]))[1][0])
        self._new_generation(state_id)
        self._known[state_id], self._most[state_id] = 0, upper
        self._still[state_id] = False
        self._resets.add(state_id)

    def release(self, state_id: int) -> None:
        """A state is no longer in use."""
        self._still[state_id] = True
        self._new_generation(state_id)

    def set_states(self, slot: int, prefill: bool, states: np.ndarray) -> None:
        """From the next step on, steps of this slot may move these states."""
        self._states[slot, prefill] = states[(states >= 0) & (states < len(self._known))]  # a batch may hold anything

    def states(self, slot: int, prefill: bool = False) -> np.ndarray:
        """States that the slot's next step may move."""
        return self._states.get((slot, prefill), np.zeros(0, np.int64))

    def attach(self, slot: int) -> None:
        """Records of the slot will be read from now on."""
        self._sum_up(slot)
        self._has_reader[slot] = True
        self._read[slot] = self._launched[slot]

    def launched(
        self, slot: int, steps: int, tokens: int, prefill: bool = False, states: np.ndarray | None = None
    ) -> None:
        """So many more steps of a slot are launched, which may move each of `states` (default: its own) by `tokens` each."""
        first = self._launched[slot] + 1
        self._launched[slot] = last = first + steps - 1
        epochs = self._epochs[slot]
        if states is None:
            states = self._states.get((slot, prefill))
        if states is None:
            return
        if epochs and epochs[-1].states is states and epochs[-1].tokens == tokens and epochs[-1].last == first - 1:
            epochs[-1].last = last
            return
        epochs.append(_Epoch(states, tokens, first, last))
        if not self._has_reader[slot] and len(epochs) > EPOCHS_UNREAD:
            self._sum_up(slot)

    def read(self, slot: int, record: StepRecord) -> None:
        """A record of the slot was read."""
        self._read[slot] = record.step
        epochs = self._epochs[slot]
        while epochs and epochs[0].last <= record.step:
            epochs.popleft()
        rows = np.flatnonzero(record.generations)
        states, generations = record.state_ids[rows], record.generations[rows]
        over = (record.flags[rows] & (IS_FINISHED | IS_ERROR)) != 0
        if self._resets:
            self._undo_resets(states[over & (self._generation[states] == generations + 1)], record, rows)
        own = self._generation[states] == generations
        states, q_start, over = states[own], record.q_start[rows][own], over[own]
        self._known[states] = np.maximum(self._known[states], q_start)
        self._most[states] = self._known[states]
        self._still[states[over]] = True
        self._resets.difference_update(states.tolist() if self._resets else ())

    def generation(self, state_id: int) -> int:
        """Generation that a state has once everything staged is applied."""
        return int(self._generation[state_id])

    def launched_steps(self, slot: int) -> int:
        """Steps of a slot launched so far."""
        return self._launched[slot]

    # ---- what it knows -------------------------------------------------------------------------------------------------------

    def bounds(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper) q_start of states, int64 each, once everything staged and launched has run."""
        self._settle_resets()
        moved = np.zeros(len(self._known), np.int64)
        for slot, epochs in enumerate(self._epochs):
            for epoch in epochs:
                begin = np.maximum(self._since[slot][epoch.states], max(epoch.first - 1, self._read[slot]))
                moved[epoch.states] += np.maximum(epoch.last - begin, 0) * epoch.tokens
        moved[self._still] = 0
        upper = np.maximum(np.minimum(self._most + moved, self._stop_at), self._most)
        return self._known[states].copy(), upper[states]

    def _sum_up(self, slot: int) -> None:
        """Add what the slot's steps may have moved to the upper bounds, so that the steps need not be kept."""
        kept = {other: epochs for other, epochs in enumerate(self._epochs) if other != slot}
        for other in kept:
            self._epochs[other] = deque()
        self._most = self.bounds(np.arange(len(self._known)))[1]
        self._epochs[slot].clear()
        for other, epochs in kept.items():
            self._epochs[other] = epochs

    def _new_generation(self, state_id: int) -> None:
        self._generation[state_id] += 1
        self._since[:, state_id] = self._launched
        self._resets.discard(state_id)

    def _settle_resets(self) -> None:
        """A reset has taken effect if no record of the steps before it says that the state had finished."""
        for state_id in tuple(self._resets):
            if all(read >= since for read, since in zip(self._read, self._since[:, state_id], strict=True)):
                self._most[state_id] = self._known[state_id]
                self._resets.discard(state_id)

    def _undo_resets(self, states: np.ndarray, record: StepRecord, rows: np.ndarray) -> None:
        """These states had finished before they were reset: the reset changed nothing."""
        ended = [state_id for state_id in states.tolist() if state_id in self._resets]
        q_start = dict(zip(record.state_ids[rows].tolist(), record.q_start[rows].tolist(), strict=True))
        failed = dict(zip(record.state_ids[rows].tolist(), record.failed[rows].tolist(), strict=True))
        for state_id in ended:
            if failed[state_id]:
                continue  # a state in error is reset
            self._resets.discard(state_id)
            self._generation[state_id] -= 1
            self._known[state_id] = self._most[state_id] = q_start[state_id]
            self._still[state_id] = True
