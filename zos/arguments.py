"""Checks of what callers pass in."""

from __future__ import annotations

import operator
from typing import Any

INT32_LARGEST = 2**31 - 1
INT64_LARGEST = 2**63 - 1


def whole_number(name: str, value: Any, low: int, high: int = INT32_LARGEST) -> int:
    """Return `value` as an int; raise ValueError naming the argument unless it is a whole number in low … high (inclusive)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, RuntimeError):  # torch's, of a tensor without values
        raise ValueError(f"{name}={value!r} is not a whole number") from None
    if not low <= number <= high:
        raise ValueError(f"{name}={number} is outside {low} … {high}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; raise ValueError naming the argument unless it is one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False")
    return value


def duration(name: str, value: Any) -> float:
    """Return `value` as seconds; raise ValueError naming the argument unless it is a number of 0 or more: NaN never ends."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if not number >= 0:
        raise ValueError(f"{name}={value!r} is no number of seconds, 0 or more")
    return number
