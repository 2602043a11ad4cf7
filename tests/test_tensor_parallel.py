"""Test that ranks which share nothing but what each step kept end with equal tables, as the example shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "tensor_parallel.py"


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=EXAMPLE.parents[1])


def test_ranks_end_with_equal_tables() -> None:
    """A rank whose table differs by a token would read and write other ring slots than the others from then on."""
    found = run_example("--ranks", "2")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("2 ranks, 120 steps, ")
    assert found.stdout.endswith("equal tables\n")


def test_rank_that_goes_wrong_is_found() -> None:
    """The example's comparison sees one token on one rank."""
    found = run_example("--broken")
    assert found.returncode != 0
    assert "rank 1 ended with another table than rank 0" in found.stderr
