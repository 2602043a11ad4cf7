"""Test that a state slot is handed out again only once every step that could touch it is known to be over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from zos.allocator import StateSlotAllocator


def check_random_use(make: Callable[[int], StateSlotAllocator], rng: np.random.Generator) -> None:
    """Take, retire and see steps at random; no slot in use or in flight may come out, and none may be lost."""
    size = int(rng.integers(1, 8))
    allocator = make(size)
    in_use: set[int] = set()
    in_flight: dict[int, int] = {}  # slot -> last step that could touch it
    launched = seen = 0
    for _ in range(60):
        call = rng.integers(4)
        if call == 0:
            slot = allocator.take()
            assert (slot is None) == (len(in_use) + len(in_flight) == size)
            if slot is not None:
                assert slot not in in_use, "two sequences share a slot"
                assert slot not in in_flight, "a step in flight can still touch the slot"
                in_use.add(slot)
        elif call == 1 and in_use:
            slot = int(rng.choice(sorted(in_use)))
            allocator.retire(slot, after_step=launched)
            in_use.remove(slot)
            in_flight[slot] = launched
        elif call == 2:
            launched += int(rng.integers(0, 3))
        else:
            seen = int(rng.integers(seen, launched + 1))
            allocator.seen(seen)
        in_flight = {slot: step for slot, step in in_flight.items() if step > seen}
        assert allocator.free == size - len(in_use) - len(in_flight)


def test_random_use(seed: int) -> None:
    """A slot handed out too early is shared by two sequences; one never handed out again is lost."""
    rng = np.random.default_rng(seed)
    for _ in range(300):
        check_random_use(lambda size: StateSlotAllocator(range(size)), rng)


class _TakesBackAtOnce(StateSlotAllocator):
    """What an allocator without `seen` does."""

    def retire(self, state_id: int, after_step: int) -> None:
        super().retire(state_id, after_step)
        self.seen(after_step)


class _ForgetsWhatWasSeen(StateSlotAllocator):
    """Waits for the next record, also where the last one has been read: there may be none."""

    def retire(self, state_id: int, after_step: int) -> None:
        seen, self._last_seen = self._last_seen, -1
        super().retire(state_id, after_step)
        self._last_seen = seen


@pytest.mark.parametrize("broken", [_TakesBackAtOnce, _ForgetsWhatWasSeen])
def test_broken_allocators_are_found(broken: type[StateSlotAllocator], seed: int) -> None:
    """The check above would let neither of these pass."""
    rng = np.random.default_rng(seed)
    with pytest.raises(AssertionError):
        for _ in range(300):
            check_random_use(lambda size: broken(range(size)), rng)


def test_first_freed_first_handed_out() -> None:
    """A slot rests as long as it can; one whose admission was refused is the next again."""
    allocator = StateSlotAllocator([4, 2, 9, 2])
    assert [allocator.take() for _ in range(4)] == [4, 2, 9, None]
    allocator.retire(9, after_step=5)
    allocator.retire(4, after_step=7)
    allocator.give_back(2)
    assert allocator.seen(7) == [9, 4]
    assert [allocator.take() for _ in range(4)] == [2, 9, 4, None]


def test_steps_that_never_ran() -> None:
    """A device-driven run that ended early: slots waiting for its later steps wait for the last one that ran."""
    allocator = StateSlotAllocator(range(1))
    allocator.take()
    allocator.retire(0, after_step=64)
    allocator.settle(last_step=20)
    assert allocator.seen(19) == []
    assert allocator.seen(20) == [0]


def test_bad_use() -> None:
    """A slot given back twice would be handed out twice."""
    allocator = StateSlotAllocator(range(3))
    for slot in (allocator.take(), allocator.take()):
        assert slot is not None
        allocator.retire(slot, after_step=4)
    for give_back in (lambda: allocator.retire(0, after_step=5), lambda: allocator.give_back(2)):
        with pytest.raises(ValueError, match="was not taken from this allocator"):
            give_back()
    allocator.take()
    with pytest.raises(ValueError, match="after_step=3"):
        allocator.retire(2, after_step=3)
