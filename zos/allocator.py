"""StateSlotAllocator: hands out state slots, and takes one back only when no step in flight can touch it any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zos.arguments import whole_number


class StateSlotAllocator:
    """Free state slots, first freed, first handed out.

    Parameters
    ----------
    state_ids : iterable of int
        The slots to hand out.

    Examples
    --------
    >>> allocator = StateSlotAllocator(range(2))
    >>> allocator.take(), allocator.take(), allocator.take()
    (0, 1, None)
    >>> allocator.retire(0, after_step=7)
    >>> allocator.seen(6), allocator.take()
    ([], None)
    >>> allocator.seen(7), allocator.take()
    ([0], 0)
    """

    def __init__(self, state_ids: Iterable[int]) -> None:
        self._free = deque(dict.fromkeys(state_ids))
        self._retired: deque[tuple[int, int]] = deque()  # (last step that could touch it, state id), in order of steps
        self._in_use: set[int] = set()
        self._last_seen = 0  # step

    @property
    def free(self) -> int:
        """Slots that `take` can hand out now."""
        return len(self._free)

    def take(self) -> int | None:
        """Return a slot for a new sequence, None when all are in use or not yet seen to be free."""
        if not self._free:
            return None
        state_id = self._free.popleft()
        self._in_use.add(state_id)
        return state_id

    def give_back(self, state_id: int) -> None:
        """Give a slot back that no step was told of: it is the next one handed out."""
        self._check_taken(state_id)
        self._in_use.remove(state_id)
        self._free.appendleft(state_id)

    def retire(self, state_id: int, after_step: int) -> None:
        """Give a slot back once the record of `after_step`, the last step launched that could touch it, has been read.

        Raises
        ------
        ValueError
            The slot was not taken, or steps go backwards.
        """
        self._check_taken(state_id)
        whole_number("after_step", after_step, self._retired[-1][0] if self._retired else 0, 2**63 - 1)
        self._in_use.remove(state_id)
        self._retired.append((after_step, state_id))
        self.seen(self._last_seen)

    def settle(self, last_step: int) -> None:
        """No step after this one was launched: slots given back after a later one wait for this one."""
        self._retired = deque((min(after_step, last_step), state_id) for after_step, state_id in self._retired)

    def seen(self, step: int) -> list[int]:
        """Free the slots whose last step is at most `step`, and return them."""
        self._last_seen = max(self._last_seen, step)
        freed = []
        while self._retired and self._retired[0][0] <= self._last_seen:
            freed.append(self._retired.popleft()[1])
        self._free.extend(freed)
        return freed

    def _check_taken(self, state_id: int) -> None:
        if state_id not in self._in_use:
            raise ValueError(f"state_id={state_id} was not taken from this allocator")
