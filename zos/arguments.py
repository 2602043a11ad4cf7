"""Checks of what callers pass in."""

from __future__ import annotations

from typing import Any

import torch

INT32_LARGEST = 2**31 - 1


def whole_number(name: str, value: Any, low: int, high: int = INT32_LARGEST) -> int:
    """Return `value` as an int; raise ValueError naming the argument unless it is a whole number in low … high (inclusive)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}={value!r} is not a whole number")
    number: int = value.__index__()
    if not low <= number <= high:
        raise ValueError(f"{name}={number} is outside {low} … {high}")
    return number


def resolve_device(device: str | torch.device) -> torch.device:
    """Device with its index; ValueError unless it is the CPU or a CUDA device that exists."""
    resolved = torch.device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device} is neither a CPU nor a CUDA device")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={device} given, but torch finds no CUDA device")
        if resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
    return resolved
