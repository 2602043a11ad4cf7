"""Test that a short soak finds nothing in a sound loop, and each fault that is planted in it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak import soak

ROOT = Path(__file__).parents[1]
ROWS = 60_000
FEW_ROWS = 12_000


def soaked(device: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit code, figures) of a soak in a process of its own, whose memory nobody else uses."""
    out = folder / "soak.json"
    command = [sys.executable, "-m", "tests.soak", f"--device={device}", f"--rows={ROWS}", f"--json={out}", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert out.exists(), run.stderr
    return run.returncode, json.loads(out.read_text())


def test_sound(device: str, tmp_path: Path, seed: int) -> None:
    """A loop that leaks, or whose table drifts from what was asked of it, dies after days instead of here."""
    _, found = soaked(device, tmp_path, f"--seed={seed}")
    assert found["rows"] >= ROWS and found["records_compared"] == found["steps"]
    assert found["counters"]["stale"] == found["counters"]["duplicate"] == 0
    assert min(found["calls"].values()) > 0 and len(found["calls"]) == 6
    # A few seconds beside other processes say nothing of throughput, nor of memory of the device that they share.
    assert [fault for fault in found["faults"] if not fault.startswith(("slow", "leak: device"))] == []


def test_planted_leak(device: str, tmp_path: Path, seed: int) -> None:
    """64 KiB that each replay holds on to are found, by the place where they are, with exit code 1."""
    code, found = soaked(device, tmp_path, f"--seed={seed}", "--plant=leak")
    place = "host" if device == "cpu" else "tensor"
    assert code == 1
    assert any(fault.startswith(f"leak: {place} memory grew") for fault in found["faults"])


@pytest.mark.parametrize("fault", ["drift", "slow"])
def test_planted_faults(device: str, fault: str, seed: int) -> None:
    """A table that is not the model's, and a loop that grows slower, are found."""
    found = soak(device, FEW_ROWS, math.inf, seed, fault)
    assert any(message.startswith(fault) for message in found["faults"])
