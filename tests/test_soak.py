"""Test that a soak sees what it is for: memory that grows, tokens that drift, a rate that falls."""

from __future__ import annotations

import mmap
import time

from tests.soak import Soak, soak

ROWS = 60_000
LEAKED = 2**16  # bytes a replay


def test_a_sound_run(device: str, seed: int) -> None:
    """No fault, and everything was judged."""
    found = soak(device, ROWS, seconds=60, seed=seed)
    assert found.wrong_rows == 0 and found.rows >= ROWS and found.requests > 100
    # Other tests take time as they like; a process that has just met a GPU still grows, so that is for the long run to judge.
    allowed = ("rate",) if device == "cpu" else ("rate", "memory")
    assert not [fault for fault in found.faults() if not any(word in fault for word in allowed)]


def test_growth_is_found(seed: int) -> None:
    """A buffer that every replay leaves behind; straight from the system, as the heap may have room that earlier tests left."""
    left: list[mmap.mmap] = []

    def leak(run: Soak) -> None:
        left.append(mmap.mmap(-1, LEAKED))
        left[-1].write(bytes(LEAKED))

    found = soak("cpu", ROWS, 60, seed, leak)
    assert any("host memory grows" in fault for fault in found.faults()), found


def test_drift_is_found(seed: int) -> None:
    """A device that moves one sequence on by a token more, once."""

    def drift(run: Soak) -> None:
        if run.rows > ROWS // 2 and not run.wrong_rows:
            run.svc.table.q_start[run.svc.table.seqlen_q > 0] += 1

    found = soak("cpu", ROWS, 60, seed, drift)
    assert found.wrong_rows, "nothing was seen"


def test_slowing_down_is_found(seed: int) -> None:
    """Replays that take longer and longer."""
    found = soak("cpu", ROWS, 60, seed, lambda run: time.sleep(run.rows / ROWS * 0.01))
    assert any("of the first one's rate" in fault for fault in found.faults()), found
