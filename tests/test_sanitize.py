"""Test that what compute-sanitizer watches on a GPU runs and compares: an error in it would else cost time on one."""

from __future__ import annotations

import pytest

import zos
from tests import sanitize


def test_it_runs_on_the_cpu_too() -> None:
    """The same calls on the other path; sizes that only choose among the GPU's grids are left out."""
    sanitize.exercise("cpu", capacity=100)
    sanitize.loop("cpu", zos.DecodeLoop, steps_per_replay=2)
    sanitize.loop("cpu", zos.DeviceLoop)


@pytest.mark.parametrize("kind", [zos.DecodeLoop, zos.DeviceLoop])
def test_loops_that_differ_are_found(monkeypatch: pytest.MonkeyPatch, kind: type[zos.DecodeLoop]) -> None:
    """A loop that takes its steps at other times than the CPU's is not taken for equal."""
    run, calls = kind.run, []

    def once_more(loop: zos.DecodeLoop, steps: int | None = None) -> None:
        calls.append(loop)
        run(loop, 2 if len(calls) == 1 else steps)  # the first of the two loops that are compared

    monkeypatch.setattr(kind, "run", once_more)
    with pytest.raises(AssertionError, match=kind.__name__):
        sanitize.loop("cpu", kind)
