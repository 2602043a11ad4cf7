"""Launcher of ring_store.cu: a warp for every two tokens, a grid row for each layer."""

from __future__ import annotations

import torch

from device_kernels.entry import grid, is_vector, kernels_by_dtype, pack_cache
from device_kernels.module import divisor, pointer

_STORE = kernels_by_dtype("ring_store", "3Pqi" + "iIi")
KERNELS = tuple(_STORE.values())


def swa_ring_store(
    values: torch.Tensor, write_slot: torch.Tensor, swa_cache: torch.Tensor, cast_back: torch.Tensor | None
) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    if values.numel() == 0:
        return
    tokens, width = values.shape[-2:]
    _STORE[values.dtype].bind(
        values.device,
        *grid(swa_cache, tokens),
        *pack_cache(swa_cache, width),
        values.data_ptr(),
        write_slot.data_ptr(),
        pointer(cast_back),
        tokens,
        is_vector(values) and (cast_back is None or is_vector(cast_back)),
        *divisor(swa_cache.shape[-3]),
    )()
