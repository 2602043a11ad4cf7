"""Launchers of floor.cu: the references that benchmarks of the two prepares stand beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from device_kernels.decode_metadata import bind_prepare_v4_decode_metadata
from device_kernels.metadata import LAYOUT
from device_kernels.module import Kernel
from device_kernels.prefill_metadata import bind_prepare_v4_prefill_metadata

EMPTY = Kernel("floor", "floor_empty", LAYOUT)
WRITE_ONLY = Kernel("floor", "floor_write_only", LAYOUT)
DEPENDENT_LOADS = Kernel("floor", "floor_dependent_loads", LAYOUT)
PREFILL_WRITE_ONLY = Kernel("floor", "floor_prefill_write_only", LAYOUT)


def bind_floor(kernel: Kernel, **operands: Any) -> Callable[[], None]:
    """Bind one of the floors to the arguments of a prepare; it runs on the strided grid, which needs no scan."""
    return bind_prepare_v4_decode_metadata(kernel, **{**operands, "packed": False})


def bind_prefill_floor(**operands: Any) -> Callable[[], None]:
    """Bind the write-only floor to the arguments of a prefill, on its grid."""
    return bind_prepare_v4_prefill_metadata(PREFILL_WRITE_ONLY, **operands)
