"""Origins: of forked states, whose steps brought them to where they are, until records have told what those steps did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from zos.bounds import Epoch

ORIGINS_KEPT = 8  # forks that a state comes from, one of the other, whose unread steps are kept apart


@dataclass
class Origin:
    """Part of a forked state's life that it spent as another state: records of that one's steps tell of the fork as well.

    By slot, the steps launched before the source was admitted, before it was admitted or last reset, and before the fork.
    """

    source: int
    admitted: list[int]
    since: list[int]
    until: list[int]
    counts: bool = True  # whether the state still is where the source brought it: it was not reset since

    def copy(self) -> Origin:
        """Return one for another fork, which may be reset by itself."""
        return Origin(self.source, list(self.admitted), list(self.since), list(self.until), self.counts)


class Origins:
    """Where forked states come from, oldest part first.

    Parameters
    ----------
    read : list of int
        Steps of each slot whose records are read; kept by SequenceBounds, as are
    epochs : list of deque of Epoch
        runs of steps of each slot of which not all records are.
    """

    def __init__(self, read: list[int], epochs: list[deque[Epoch]]) -> None:
        self._read = read
        self._epochs = epochs
        self._of: dict[int, list[Origin]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __bool__(self) -> bool:
        return bool(self._of)

    def fork(
        self, state_id: int, source: int, admitted: np.ndarray, since: np.ndarray, launched: Sequence[int]
    ) -> np.ndarray:
        """Note where a state comes from; returns int64 [slots]: most that steps moved it which are not kept apart any more."""
        origins = [origin.copy() for origin in self._of.get(source, ())]
        origins.append(Origin(source, admitted.tolist(), since.tolist(), list(launched)))
        self._of[state_id] = origins[-ORIGINS_KEPT:]
        given_up = [origin for origin in origins[:-ORIGINS_KEPT] if origin.counts]
        slots = range(len(self._read))
        return np.array([sum(self._moved(origin, slot) for origin in given_up) for slot in slots], np.int64)

    def forget(self, state_id: int) -> None:
        """Another sequence is in a state."""
        self._of.pop(state_id, None)

    def reset(self, state_id: int) -> None:
        """A state starts over; what its sources did tells only whether it could."""
        for origin in self._of.get(state_id, ()):
            origin.counts = False

    def settle(self) -> None:
        """Forget those of which every record is read."""
        for state_id, origins in list(self._of.items()):
            unread = [o for o in origins if any(map(int.__gt__, o.until, self._read))]
            if unread:
                self._of[state_id] = unread
            else:
                del self._of[state_id]

    def shorten(self, slot: int, last_step: int) -> None:
        """The slot's last step is this one, earlier than was counted."""
        for origins in self._of.values():
            for origin in origins:
                for steps in (origin.admitted, origin.since, origin.until):
                    steps[slot] = min(steps[slot], last_step)

    def forks_of(self, state_id: int, slot: int, step: int) -> list[int]:
        """Forked states that were this one in a step, in whatever life it was then."""
        return [
            forked
            for forked, origins in self._of.items()
            if any(o.source == state_id and o.admitted[slot] < step <= o.until[slot] for o in origins)
        ]

    def moved_with(self, state_id: int, slot: int, step: int) -> list[int]:
        """Forked states that this one's step moved, and that still are where it brought them."""
        return [
            forked
            for forked, origins in self._of.items()
            if any(o.counts and o.source == state_id and o.since[slot] < step <= o.until[slot] for o in origins)
        ]

    def moved(self, state_id: int, slot: int | None = None, last: int | None = None) -> int:
        """Most that unread steps before its forks moved a state; of one slot, up to its step `last`."""
        slots = range(len(self._read)) if slot is None else (slot,)
        origins = [origin for origin in self._of.get(state_id, ()) if origin.counts]
        return sum(self._moved(origin, each, last) for origin in origins for each in slots)

    def _moved(self, origin: Origin, slot: int, last: int | None = None) -> int:
        moved, begin = 0, max(origin.since[slot], self._read[slot])
        for epoch in self._epochs[slot]:
            until = min(epoch.last, origin.until[slot], epoch.last if last is None else last)
            steps = until - max(begin, epoch.first - 1)
            if steps > 0 and (epoch.states == origin.source).any():
                moved += steps * epoch.tokens
        return moved
