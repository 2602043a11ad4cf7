"""Launchers of floor.cu: the references that benchmarks of the two prepares stand beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from device_kernels.decode_metadata import Grid, bind_prepare_v4_decode_metadata
from device_kernels.metadata import LAYOUT
from device_kernels.module import Kernel
from device_kernels.prefill_metadata import bind_prepare_v4_prefill_metadata

EMPTY = Kernel("floor", "floor_empty", LAYOUT)
WRITE_ONLY = Kernel("floor", "floor_write_only", LAYOUT)
DEPENDENT_LOADS = Kernel("floor", "floor_dependent_loads", LAYOUT)
PREFILL_WRITE_ONLY = Kernel("floor", "floor_prefill_write_only", LAYOUT)

_GRIDS = (
    (128, Grid(2, 7)),
    (512, Grid(4, 7)),
)  # (largest batch, grid): the floor's fastest, which need not be the prepare's
_LARGEST_GRID = Grid(8, 2)


def bind_floor(kernel: Kernel, **operands: Any) -> Callable[[], None]:
    """Bind one of the floors to the arguments of a prepare of six tokens a row; they are written as a strided batch's."""
    rows = operands["state_ids"].shape[0]
    grid = next((grid for most, grid in _GRIDS if rows <= most), _LARGEST_GRID)
    return bind_prepare_v4_decode_metadata(kernel, grid, **{**operands, "packed": False})


def bind_prefill_floor(**operands: Any) -> Callable[[], None]:
    """Bind the write-only floor to the arguments of a prefill, a warp for 32 places, or as many as share their full index."""
    return bind_prepare_v4_prefill_metadata(PREFILL_WRITE_ONLY, parts=1, **operands)
