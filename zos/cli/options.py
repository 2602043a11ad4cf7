"""What several commands' options have in common: numbers, output files, and which devices work here."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch

from zos.cli import InputError


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Parser of a whole number of `least` or more, up to `most`."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else None
        if value is None or value < least or (most is not None and value > most):
            upper = "or more" if most is None else f"… {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} {upper}")
        return value

    return parse


def real(above: float, most: float) -> Callable[[str], float]:
    """Parser of a number above `above`, up to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number above {above:g}, up to {most:g}")
        return value

    return parse


def usable(device: str) -> bool:
    """Whether "cpu" or "cuda" works here: a GPU, and CuPy for its kernels."""
    return device == "cpu" or (torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None)


def chosen_device(device: str) -> str:
    """Return "cpu" or "cuda" for "cpu", "cuda" or "auto"; InputError for a "cuda" that does not work here."""
    if device == "auto":
        return "cuda" if usable("cuda") else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device")
    if not usable(device):
        raise InputError("--device cuda needs CuPy: install zos[cu13] or zos[cu12], or take --device cpu")
    return device


def check_output(path: Path | None, *inputs: Path) -> None:
    """Raise InputError for an output file that could not be written or is one of the inputs: before the run, not after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InputError(f"{path}: its folder does not exist")
    if path.is_dir():
        raise InputError(f"{path}: is a folder")
    if path.exists() and any(path.samefile(other) for other in inputs):
        raise InputError(f"{path}: is the input, and would be overwritten")
