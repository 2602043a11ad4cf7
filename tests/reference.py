"""What tests hold results against: the oracle, the golden cases, and assertions that name the first mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zos.cli.compare import first_mismatch
from zos.metadata import DecodeMetadata

GOLDEN_DECODE = Path(__file__).parent / "golden" / "decode_cases.json"
POISON = -7  # no output may hold it


def assert_bitwise_equal(actual: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray, name: str) -> None:
    """Equal dtype, shape and values, or an error with the first mismatch, its coordinates and both values."""
    difference = first_mismatch(_as_array(actual), _as_array(expected))
    assert difference is None, f"{name}: {difference}"


def poison(metadata: DecodeMetadata) -> None:
    """Fill every output with a value that none may hold, so that an element left unwritten shows."""
    for value in vars(metadata).values():
        for tensor in value.values() if isinstance(value, dict) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor is not metadata.state_ids:
                tensor.fill_(POISON)


def golden_cases() -> list[dict[str, Any]]:
    """The decode cases, made by an oracle that this project shares no code with."""
    cases: list[dict[str, Any]] = json.loads(GOLDEN_DECODE.read_text())
    return cases


def positions_in_ring(head: int, ring: int) -> list[int]:
    """Position that each slot of a ring holds after positions 0 … head-1 were written; -1 for a slot never written."""
    held = [-1] * ring
    for position in range(max(0, head - ring), head):
        held[position % ring] = position
    return held


def _as_array(value: torch.Tensor | np.ndarray) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
