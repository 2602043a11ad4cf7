"""Test that a soak sees what it is for: memory that grows, tokens that drift, a rate that falls."""

from __future__ import annotations

import time

import numpy as np

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
    """A buffer that every replay leaves behind."""
    left: list[np.ndarray] = []
    found = soak("cpu", ROWS, 60, seed, lambda run: left.append(np.ones(LEAKED, np.uint8)))
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
