"""Launcher of ring_load.cu: one warp a history row."""

from __future__ import annotations

import torch

from device_kernels.entry import CACHE_LAYOUT, DTYPES, TOKENS_PER_BLOCK, WARP, is_vector, pack_cache
from device_kernels.module import Kernel

_LOAD = Kernel("ring_load", "swa_ring_load", CACHE_LAYOUT + "2Pq4i")
KERNELS = (_LOAD,)


def swa_ring_load(swa_cache: torch.Tensor, load_plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    rows = load_plan.shape[0] * window
    if rows == 0:
        return
    _LOAD.bind(
        out.device,
        -(-rows // TOKENS_PER_BLOCK),
        (TOKENS_PER_BLOCK * WARP, 1),
        *pack_cache(swa_cache, out.shape[1]),
        load_plan.data_ptr(),
        out.data_ptr(),
        rows,
        swa_cache.shape[1],
        DTYPES[out.dtype],
        is_vector(out),
        window,
    )()
