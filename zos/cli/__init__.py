"""zos.cli: the commands of `zos`, one file each; the library never imports them."""

from __future__ import annotations

from typing import Any

SHOWN_CHARACTERS = 40


class InputError(ValueError):
    """What the user gave cannot be used: the command prints this one line and ends with exit code 2."""


def short(value: Any) -> str:
    """Show a value on one line, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"


def plain(text: str, most: int = 200) -> str:
    """Text as it is where it fits a line of a terminal, else quoted and cut: it comes from a file, and may hold anything."""
    return text if len(text) <= most and text.isprintable() else f"{repr(text)[:most]}…"
