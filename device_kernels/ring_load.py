"""Launcher of ring_load.cu: a warp for every two history rows, a grid row for each layer."""

from __future__ import annotations

import torch

from device_kernels.entry import grid, is_vector, kernels_by_dtype, pack_cache
from device_kernels.module import divisor

_LOAD = kernels_by_dtype("ring_load", "2Pq3i" + "iIi")
KERNELS = tuple(_LOAD.values())


def swa_ring_load(swa_cache: torch.Tensor, load_plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    rows = load_plan.shape[0] * window
    if rows == 0 or out.numel() == 0:
        return
    _LOAD[out.dtype].bind(
        out.device,
        *grid(swa_cache, rows),
        *pack_cache(swa_cache, out.shape[-1]),
        load_plan.data_ptr(),
        out.data_ptr(),
        out.shape[-2],
        rows,
        swa_cache.shape[-3],
        is_vector(out),
        *divisor(window),
    )()
