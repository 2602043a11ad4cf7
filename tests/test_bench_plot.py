"""Test that `zos bench --plot` draws what was measured, and says when there is nothing to draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import failure
from zos.cli import InputError
from zos.cli.bench import Row
from zos.cli.bench import row as measured
from zos.cli.bench_plot import curves, draw


def rows() -> list[Row]:
    """Two variants at two sizes beside two references, and a bench of one size."""
    return [
        *(measured("prepare", variant, size, us + size, name, us) for variant, us in (("strided", 2.0), ("packed", 3.0))
          for size in (1, 64) for name in ("floor", "empty")),
        measured("ring", "store", 8192, 60.0, "copy", 50.0),
    ]  # fmt: skip


def test_curves() -> None:
    """Each variant and each reference is one line; what has one size only is none."""
    variants, references = curves(rows(), "prepare")
    assert variants == {"strided": {1: 3.0, 64: 66.0}, "packed": {1: 4.0, 64: 67.0}}
    assert set(references) == {"floor", "empty"} and references["floor"] == {1: 3.0, 64: 3.0}
    assert curves(rows(), "ring") == ({}, {})


def test_picture(tmp_path: Path) -> None:
    """A PNG with a panel; nothing to draw is an error of input."""
    draw(rows(), tmp_path / "plot.png", "a machine")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="more than one size"):
        draw(rows()[-1:], tmp_path / "none.png", "a machine")
    assert not (tmp_path / "none.png").exists()


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A place that cannot be written is named before anything is measured."""
    assert "folder does not exist" in failure(capsys, "bench", "--quick", "--plot", str(tmp_path / "none" / "plot.png"))
