"""NVTX ranges on what the host does (`zos.step`, `zos.flush`, `zos.capture`); only where ZOS_NVTX=1 was set before the import."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

ENABLED = os.environ.get("ZOS_NVTX") == "1" and torch.cuda.is_available()


def marked(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function with a range of its name; without ranges it is the function itself, so they cost nothing.

    A range around captured code would be seen once, when it is captured, and never in a replay: these are around the replay.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        if not ENABLED:
            return function

        @functools.wraps(function)
        def in_range(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
            torch.cuda.nvtx.range_push(name)
            try:
                return function(*arguments, **keywords)
            finally:
                torch.cuda.nvtx.range_pop()

        return in_range

    return decorate
