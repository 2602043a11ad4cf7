"""Test that the mutation tool reports what no test sees, and that what it excuses is still there."""

from __future__ import annotations

import shutil

import pytest

from tests import mutate, test_ring
from tests.mutate import EQUIVALENT, RING_CUH, RING_PY, Mutant, killer, mutants, report

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def one(file: str, before: str, after: str) -> Mutant:
    """The only mutant that makes a line this one."""
    (found,) = (m for m in mutants(file) if before in m.before and after in m.after)
    return found


def test_excuses_are_mutants() -> None:
    """An excuse whose line has changed excuses nothing any more."""
    names = [mutant.name for file in (RING_CUH, RING_PY) for mutant in mutants(file)]
    assert set(EQUIVALENT) <= set(names) and len(names) > 450


@needs_compiler
@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        (RING_CUH, "return larger(begin - q_start, 0);", "larger(begin - q_start, 1)"),
        (RING_CUH, "valid_start > q_start) error", "valid_start >= q_start) error"),
        (RING_PY, "return max(begin - q_start, 0)", "min(begin - q_start, 0)"),
        (RING_PY, "return j < seqlen_q - slots", "j <= seqlen_q - slots"),
    ],
)
def test_killed(file: str, before: str, after: str) -> None:
    """Off-by-ones of both languages are seen."""
    assert killer(one(file, before, after)) == "AssertionError"


@needs_compiler
def test_a_survivor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no test looks at a function, its mutant survives, and the report names it; one that is excused is counted apart."""
    mutant = one(RING_PY, "return j < seqlen_q - slots", "j <= seqlen_q - slots")
    monkeypatch.setattr(test_ring, "TWINS", [name for name in test_ring.TWINS if name != "overwritten"])
    assert killer(mutant) is None
    figures = report([(mutant, None)], seconds=1.0)
    assert figures["survivors"] == [f"{mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}"]
    monkeypatch.setitem(mutate.EQUIVALENT, mutant.name, "for this test")
    assert report([(mutant, None)], 1.0)["survivors"] == []
