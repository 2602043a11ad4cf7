"""Launcher of ring_store.cu: one warp a token."""

from __future__ import annotations

import torch

from device_kernels.entry import CACHE_LAYOUT, DTYPES, TOKENS_PER_BLOCK, WARP, is_vector, pack_cache
from device_kernels.module import Kernel, divisor, pointer

_STORE = Kernel("ring_store", "swa_ring_store", CACHE_LAYOUT + "3Pq2i" + "iIi")
KERNELS = (_STORE,)


def swa_ring_store(
    values: torch.Tensor, write_slot: torch.Tensor, swa_cache: torch.Tensor, cast_back: torch.Tensor | None
) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    tokens, width = values.shape
    if tokens == 0:
        return
    _STORE.bind(
        values.device,
        -(-tokens // TOKENS_PER_BLOCK),
        (TOKENS_PER_BLOCK * WARP, 1),
        *pack_cache(swa_cache, width),
        values.data_ptr(),
        write_slot.data_ptr(),
        pointer(cast_back),
        tokens,
        DTYPES[values.dtype],
        is_vector(values) and (cast_back is None or is_vector(cast_back)),
        *divisor(swa_cache.shape[1]),
    )()
