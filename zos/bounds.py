"""SequenceBounds: how far each sequence is at least and at most, known on the host without asking the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zos.mailbox import IS_DUPLICATE, IS_ERROR, IS_FINISHED, IS_STALE, StepRecord
from zos.origins import Origins

EPOCHS_UNREAD = 64  # runs of steps of a slot that nobody reads which are kept apart before they are summed up
RESETS_UNSURE = 8  # resets of a state whose effect is not known yet that are kept apart
COMPACT_AT = 1024  # states that a slot's steps may move are listed more than once up to so many
NEVER = np.iinfo(np.int64).max
MOVES, FINISHED, IN_ERROR = range(3)  # what a state is known to be: one that steps may move, or else why not

ADMIT, RELEASE, RESET, FORK = "admit", "release", "reset", "fork"


class _Staged(NamedTuple):
    """An edit that is not launched yet."""

    kind: str
    state_id: int
    q_start: int
    stop_at: int
    source: int  # state that a FORK copies


@dataclass
class Epoch:
    """Neighbouring steps of a slot that could only move these states."""

    states: np.ndarray
    tokens: int  # most that a step moves each of them by
    first: int  # number of the first step
    last: int


@dataclass
class _Past:
    """A state's life before a reset of which it is not known whether it came too late: after the sequence had finished."""

    lower: int
    upper: int
    until: list[int]  # by slot: the last step before the reset
    lost: bool  # whether records of those steps may never be read


NOBODY = np.zeros(0, np.int64)


class SequenceBounds:
    """Lower and upper q_start of every state, made of staged edits, launched steps and records read.

    A state is exactly where the last record of its life left it; every step launched since may have moved it by nothing or by a
    whole step. Steps are counted by slot, as the slot's mailbox numbers them; an edit takes effect between the steps that were
    launched before it and those after, so a record's number says which life of a state its row tells of.

    A reset leaves a finished sequence as it is, and whether it was finished by then the host may not know yet. Until a record says
    so, both lives count: the one before the reset and the one after.

    A forked state is where its source was: what steps before the fork did to the source, and no record told yet, they did to both.

    Parameters
    ----------
    capacity : int
        Number of states.
    slots : int
        Metadata slots.
    """

    def __init__(self, capacity: int, slots: int) -> None:
        self._known = np.zeros(capacity, np.int64)  # q_start as admitted or reset, or as of the last record read
        self._summed = np.zeros(
            (slots, capacity), np.int64
        )  # by slot: most that steps moved it whose epochs are not kept
        self._stop_at = np.full(capacity, NEVER)
        self._ended = np.full(capacity, FINISHED, np.int8)
        self._admitted = np.zeros((slots, capacity), np.int64)  # by slot: steps launched before the state was admitted
        self._since = np.zeros((slots, capacity), np.int64)  # the same, before it was admitted or last reset
        self._until = np.full((slots, capacity), NEVER)  # steps launched before it was released
        self._pasts: dict[int, list[_Past]] = {}  # state -> its lives before resets of unknown effect, oldest first
        self._looks: list[tuple[bytes, bytes] | None] = [
            None
        ] * slots  # states and generations of the last record, if plain
        self._rows_moved: list[tuple[np.ndarray, np.ndarray]] = [
            (NOBODY, NOBODY)
        ] * slots  # its rows that count, and their states
        self._staged: deque[_Staged] = deque()
        self._launched = [0] * slots
        self._read = [0] * slots
        self._most_epochs = [EPOCHS_UNREAD] * slots
        self._epochs: list[deque[Epoch]] = [deque() for _ in range(slots)]
        self._origins = Origins(self._read, self._epochs)
        self._states: dict[tuple[int, bool], np.ndarray] = {}  # (slot, prefill) -> states that its batch may name
        self._prepared: dict[tuple[int, bool], np.ndarray] = {}  # the same, of the last step prepared

    # ---- what the service tells ----------------------------------------------------------------------------------------------

    def stage(self, kind: str, state_id: int, q_start: int = 0, stop_at: int = 0, source: int = -1) -> None:
        """An ADMIT, RELEASE, RESET or FORK is staged: `bounds` reckons with it."""
        self._staged.append(_Staged(kind, state_id, q_start, stop_at or NEVER, source))

    @property
    def edits_staged(self) -> bool:
        """Whether an edit that changes a sequence's life is staged."""
        return bool(self._staged)

    def edits_launched(self, count: int) -> None:
        """The oldest `count` staged edits take effect after the steps launched so far, before all later ones."""
        for _ in range(count):
            edit = self._staged.popleft()
            if edit.kind == ADMIT:
                self._start(edit.state_id, edit.q_start)
                self._stop_at[edit.state_id] = edit.stop_at
                self._admitted[:, edit.state_id] = self._launched
                self._until[:, edit.state_id] = NEVER
                self._pasts.pop(edit.state_id, None)
                self._origins.forget(edit.state_id)
            elif edit.kind == FORK:
                self._fork(edit.state_id, edit.source)
            elif edit.kind == RELEASE:
                self._until[:, edit.state_id] = self._launched
            else:
                self._reset(edit.state_id)

    def set_states(self, slot: int, prefill: bool, states: np.ndarray, also: bool = False) -> None:
        """From the next prepare on, steps of this slot may move these states; `also` those that were said before."""
        if also and (slot, prefill) in self._states:
            states = np.concatenate([self._states[slot, prefill], states])
        self._states[slot, prefill] = np.unique(states) if len(states) > COMPACT_AT else states

    def attach(self, slot: int, records: int) -> None:
        """Records of the slot will be read from now on."""
        self._most_epochs[slot] = max(EPOCHS_UNREAD, records)
        self._lose(slot, self._launched[slot])

    def prepared(self, slot: int, prefill: bool = False) -> None:
        """A step was prepared: its result, whenever it comes, moves states that the slot's batch may name now."""
        states = self._states.get((slot, prefill))
        if states is not None:
            self._prepared[slot, prefill] = states

    def prepared_unseen(self, slot: int) -> None:
        """As `prepared`, by a graph whose rows are not known: some of those prepared before it may still wait for a result."""
        before = self._prepared.get((slot, False))
        self.prepared(slot)
        states = self._prepared.get((slot, False))
        if before is not None and states is not None and before is not states:
            self._prepared[slot, False] = self._states[slot, False] = np.unique(np.concatenate([before, states]))

    def launched(self, slot: int, steps: int, tokens: int, prefill: bool = False) -> None:
        """So many more steps of a slot are launched, which may move each state that was prepared by `tokens` each."""
        before = self._launched[slot]
        self._launched[slot] = last = before + steps
        epochs, states = self._epochs[slot], self._prepared.get((slot, prefill))
        if states is None:
            return
        if epochs:
            epoch = epochs[-1]
            if epoch.last == before and epoch.states is states and epoch.tokens == tokens:
                epoch.last = last
                return
        epochs.append(Epoch(states, tokens, before + 1, last))
        if len(epochs) > self._most_epochs[slot]:
            self._sum_up(slot, epochs[0].last)

    def settle(self, slot: int, last_step: int) -> int:
        """The slot's last step is this one, earlier than was counted; returns by how many."""
        fewer = self._launched[slot] - last_step
        self._launched[slot] = last_step
        for stamps in (self._since[slot], self._admitted[slot]):
            np.minimum(stamps, last_step, out=stamps)
        np.minimum(self._until[slot], last_step, out=self._until[slot], where=self._until[slot] != NEVER)
        for pasts in self._pasts.values():
            for past in pasts:
                past.until[slot] = min(past.until[slot], last_step)
        self._origins.shorten(slot, last_step)
        epochs = self._epochs[slot]
        while epochs and epochs[-1].first > last_step:
            epochs.pop()
        if epochs:
            epochs[-1].last = min(epochs[-1].last, last_step)
        return fewer

    def read(self, slot: int, record: StepRecord) -> None:
        """A record of the slot was read."""
        step = record.step
        if step > self._read[slot] + 1:
            self._lose(slot, step - 1)
        self._read[slot] = step
        epochs = self._epochs[slot]
        while epochs and epochs[0].last <= step:
            epochs.popleft()
        # In the steady state one record is like the one before it but for q_start: then its rows need no other look.
        plain = not (self._pasts or self._origins or record.flags.any())
        looks = (record.state_ids.tobytes(), record.generations.tobytes()) if plain else None
        if looks is not None and looks == self._looks[slot]:
            rows, states = self._rows_moved[slot]
            self._known[states] = np.maximum(self._known[states], record.q_start[rows])
            self._summed[slot][states] = 0
            return
        rows = np.flatnonzero((record.generations > 0) & ((record.flags & IS_STALE) == 0))
        states = record.state_ids[rows]
        if self._pasts:
            self._learn_of_resets(slot, record, rows)
        own = self._since[slot][states] < step
        self._looks[slot] = looks if own.all() else None
        rows, states = self._with_forks(slot, step, rows, states, own) if self._origins else (rows[own], states[own])
        self._rows_moved[slot] = rows, states
        self._known[states] = np.maximum(self._known[states], record.q_start[rows])
        flags = record.flags[rows]
        # All of the slot's steps before this one are in its q_start; but that of a duplicate is its ticket's.
        self._summed[slot][states[(flags & IS_DUPLICATE) == 0]] = 0
        if (flags & (IS_FINISHED | IS_ERROR)).any():
            self._ended[states[(flags & IS_ERROR) != 0]] = IN_ERROR
            self._ended[states[(flags & IS_FINISHED) != 0]] = FINISHED
        if self._origins:
            self._origins.settle()

    def launched_steps(self, slot: int) -> int:
        """Steps of a slot launched so far."""
        return self._launched[slot]

    # ---- what it knows -------------------------------------------------------------------------------------------------------

    def lives_on(self, slot: int, state_id: int, step: int) -> bool:
        """Whether a state was admitted or reset after a step of the slot, so that an error in that step is past."""
        staged = any(edit.state_id == state_id and edit.kind != RELEASE for edit in self._staged)
        return staged or step <= int(self._since[slot, state_id])

    def bounds(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper) q_start of states, int64 each, once everything staged and launched has run."""
        asked = len(states)
        states = self._with_sources(states)
        lower, upper = self._known[states], self._upper()[states]
        sure = lower == upper  # also of what it is: a sequence that no step may have moved has not finished
        if self._pasts:
            self._settle_resets()
            for place, state_id in enumerate(states.tolist()):
                for past in self._pasts.get(state_id, ()):
                    lower[place] = min(lower[place], past.lower)
                    upper[place] = max(upper[place], past.upper)
                    sure[place] = False
        if self._staged:
            self._reckon(states, lower, upper, sure)
        return lower[:asked], upper[:asked]

    def _reckon(self, states: np.ndarray, lower: np.ndarray, upper: np.ndarray, sure: np.ndarray) -> None:
        """Apply staged edits to bounds."""
        place = {state_id: number for number, state_id in enumerate(states.tolist())}
        finished = self._ended[states] == FINISHED
        for edit in self._staged:
            i = place.get(edit.state_id)
            if i is None:
                continue
            if edit.kind == ADMIT:
                lower[i] = upper[i] = edit.q_start
                sure[i], finished[i] = True, False
            elif edit.kind == FORK:
                j = place.get(edit.source)
                if j is not None:  # else nobody asked for a state that comes from this one
                    lower[i], upper[i], sure[i], finished[i] = lower[j], upper[j], sure[j], finished[j]
            elif edit.kind == RESET and not (sure[i] and finished[i]):
                lower[i] = 0
                upper[i] = 0 if sure[i] else upper[i]
        if len(place) < len(states):  # a state twice
            last = [place[state_id] for state_id in states.tolist()]
            lower[:], upper[:] = lower[last], upper[last]

    def _upper(self) -> np.ndarray:
        """Most that each state's q_start is, if its resets took effect: int64 [capacity]."""
        moved = self._summed.sum(0)
        for slot, epochs in enumerate(self._epochs):
            for epoch in epochs:
                moved[epoch.states] += self._steps_of(slot, epoch, epoch.last) * epoch.tokens
        for state_id in self._origins:
            moved[state_id] += self._origins.moved(state_id)
        moved[self._ended != MOVES] = 0
        upper: np.ndarray = np.minimum(self._known + moved, self._stop_at)
        return upper

    def _upper_of(self, state_id: int) -> int:
        """As `_upper`, of one state."""
        known, moved = int(self._known[state_id]), int(self._summed[:, state_id].sum()) + self._origins.moved(state_id)
        for slot, epochs in enumerate(self._epochs):
            begin, until = max(int(self._since[slot, state_id]), self._read[slot]), int(self._until[slot, state_id])
            for epoch in epochs:
                steps = min(epoch.last, until) - max(begin, epoch.first - 1)
                if steps > 0 and (epoch.states == state_id).any():
                    moved += steps * epoch.tokens
        return min(known + moved, int(self._stop_at[state_id])) if self._ended[state_id] == MOVES else known

    def _steps_of(self, slot: int, epoch: Epoch, last: int) -> np.ndarray:
        """Steps of an epoch, up to the `last`, that no record was read of and that may have moved each of its states."""
        begin = np.maximum(self._since[slot][epoch.states], max(epoch.first - 1, self._read[slot]))
        end = np.minimum(self._until[slot][epoch.states], min(epoch.last, last))
        steps: np.ndarray = np.maximum(end - begin, 0)
        return steps

    # ---- lives of a state ----------------------------------------------------------------------------------------------------

    def _start(self, state_id: int, q_start: int) -> None:
        """A life begins, after the steps launched so far."""
        self._known[state_id] = q_start
        self._ended[state_id] = MOVES
        self._summed[:, state_id] = 0
        self._since[:, state_id] = self._launched
        self._looks = [None] * len(self._looks)  # what a record says of the state's former life counts no more

    def _reset(self, state_id: int) -> None:
        self._settle_resets()
        pasts = self._pasts.get(state_id, [])
        if self._ended[state_id] == FINISHED and not pasts:
            return
        upper = self._upper_of(state_id)
        if self._known[state_id] < upper:  # it may have finished in one of these steps
            lost = bool(self._summed[:, state_id].any())
            pasts.append(_Past(int(self._known[state_id]), upper, list(self._launched), lost))
            if len(pasts) > RESETS_UNSURE:
                first, second = pasts[:2]
                lost = first.lost or second.lost
                pasts[:2] = [_Past(0, max(first.upper, second.upper), second.until, lost)]
            self._pasts[state_id] = pasts
        self._start(state_id, 0)
        self._origins.reset(state_id)

    def _fork(self, state_id: int, source: int) -> None:
        """A life begins where that of another state is, after the steps launched so far."""
        self._start(state_id, int(self._known[source]))
        self._ended[state_id], self._stop_at[state_id] = self._ended[source], self._stop_at[source]
        self._pasts.pop(state_id, None)
        if source in self._pasts:
            self._pasts[state_id] = [replace(past, until=list(past.until)) for past in self._pasts[source]]
        before = self._admitted[:, source], self._since[:, source]
        given_up = self._origins.fork(state_id, source, *before, self._launched)
        self._summed[:, state_id] = self._summed[:, source] + given_up
        self._admitted[:, state_id] = self._launched
        self._until[:, state_id] = NEVER
        self._origins.settle()

    def _with_forks(
        self, slot: int, step: int, rows: np.ndarray, states: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A record's rows that count, and the states that they tell of: their own, and those that come from it by forks."""
        told = list(zip(rows[own].tolist(), states[own].tolist(), strict=True))
        for row, state_id in zip(rows.tolist(), states.tolist(), strict=True):
            told += [(row, forked) for forked in self._origins.moved_with(state_id, slot, step)]
        both = np.array(told, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _with_sources(self, states: np.ndarray) -> np.ndarray:
        """States, and behind them others that they come from by forks which are staged."""
        wanted, sources = set(states.tolist()), []
        for edit in reversed(self._staged):
            if edit.kind == FORK and edit.state_id in wanted and edit.source not in wanted:
                sources.append(edit.source)
                wanted.add(edit.source)
        return np.concatenate([states, np.array(sources, np.int64)]) if sources else states

    def _settle_resets(self) -> None:
        """A reset has taken effect if no record of the steps before it says that the sequence had finished."""
        for state_id, pasts in list(self._pasts.items()):
            read = [past for past in pasts if self._is_read(past.until)]
            if read and not any(past.lost for past in pasts):
                del pasts[: len(read)]
                if not pasts:
                    del self._pasts[state_id]

    def _is_read(self, until: Sequence[int]) -> bool:
        return all(read >= last for read, last in zip(self._read, until, strict=True))

    def _learn_of_resets(self, slot: int, record: StepRecord, rows: np.ndarray) -> None:
        """A sequence that ran on had not finished before; one that finished did not care about later resets."""
        finished = (record.flags[rows] & IS_FINISHED) != 0
        for row, named, ends in zip(rows.tolist(), record.state_ids[rows].tolist(), finished.tolist(), strict=True):
            own = [named] if record.step > self._admitted[slot, named] else []
            for state_id in own + self._origins.forks_of(named, slot, record.step):
                pasts = self._pasts.get(state_id)
                if pasts is None:
                    continue
                life = next((i for i, past in enumerate(pasts) if record.step <= past.until[slot]), len(pasts))
                del pasts[:life]
                if pasts and ends:
                    self._known[state_id], self._ended[state_id] = record.q_start[row], FINISHED
                    self._summed[:, state_id] = 0
                    pasts.clear()
                if not pasts:
                    del self._pasts[state_id]

    # ---- steps without a record ------------------------------------------------------------------------------------------------

    def _sum_up(self, slot: int, last: int) -> None:
        """Keep what the slot's steps up to `last` may have moved as one number a state, so that their epochs need not be kept."""
        epochs = self._epochs[slot]
        for state_id in self._origins:
            self._summed[slot, state_id] += self._origins.moved(state_id, slot, last)
        for epoch in epochs:
            if epoch.first > last:
                break
            steps = self._steps_of(slot, epoch, last)
            self._summed[slot][epoch.states] += steps * epoch.tokens
        while epochs and epochs[0].last <= last:
            epochs.popleft()

    def _lose(self, slot: int, last: int) -> None:
        """Records of the slot's steps up to `last` will not be read."""
        self._sum_up(slot, last)
        self._read[slot] = last
        for pasts in self._pasts.values():
            for past in pasts:
                past.lost = True
