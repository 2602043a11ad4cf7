"""What tests hold results against: the oracle, the golden cases, assertions that name the first mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zos.cli.compare import POISON, first_mismatch, poison
from zos.cli.oracle import Oracle
from zos.cli.oracle_prefill import PrefillOracle

__all__ = ["POISON", "Oracle", "PrefillOracle", "assert_bitwise_equal", "golden_cases", "poison", "positions_in_ring"]

GOLDEN = Path(__file__).parent / "golden"
Array = torch.Tensor | np.ndarray


def assert_bitwise_equal(actual: Array, expected: Array, name: str) -> None:
    """Equal dtype, shape and values, or an error with the first mismatch, its coordinates and both values."""
    difference = first_mismatch(_as_array(actual), _as_array(expected))
    assert difference is None, f"{name}: {difference}"


def golden_cases(kind: str = "decode") -> list[dict[str, Any]]:
    """The decode or prefill cases, made by an oracle that this project shares no code with."""
    cases: list[dict[str, Any]] = json.loads((GOLDEN / f"{kind}_cases.json").read_text())
    return cases


def positions_in_ring(head: int, ring: int) -> list[int]:
    """Position in each slot of a ring after positions 0 … head-1 were written; -1 in a slot never written."""
    held = [-1] * ring
    for position in range(max(0, head - ring), head):
        held[position % ring] = position
    return held


def _as_array(value: Array) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
