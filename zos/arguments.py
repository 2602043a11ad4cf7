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
    except TypeError:
        raise ValueError(f"{name}={value!r} is not a whole number") from None
    if not low <= number <= high:
        raise ValueError(f"{name}={number} is outside {low} … {high}")
    return number
