"""Launch parameters that the ring's store and load share: entry.cuh's `Cache`, and the number formats on the other side."""

from __future__ import annotations

import torch

from device_kernels.module import Kernel

WARP = 32
TOKENS_PER_WARP = 2  # as TOKENS in entry.cuh
TOKENS_PER_BLOCK = 8
VECTOR_BYTES = 16

CACHE_LAYOUT = "P4q2i"
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def kernels_by_dtype(stem: str, layout: str) -> dict[torch.dtype, Kernel]:
    """One kernel for each number format, `swa_<stem>_<format>`."""
    return {
        dtype: Kernel(stem, f"swa_{stem}_{name}", CACHE_LAYOUT + layout, overlaps=True)
        for dtype, name in DTYPE_NAMES.items()
    }


def grid(swa_cache: torch.Tensor, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Blocks (of tokens, of layers) and threads of a launch."""
    layers = swa_cache.shape[0] if swa_cache.dim() == 5 else 1
    return (-(-tokens // TOKENS_PER_BLOCK), layers), (TOKENS_PER_BLOCK // TOKENS_PER_WARP * WARP, 1)


def pack_cache(swa_cache: torch.Tensor, values: int) -> tuple[int, ...]:
    """Members of `Cache` for a uint8 [states, ring, 1, entry bytes] view, or one with a dimension of layers before them."""
    states, ring = swa_cache.shape[-4:-2]
    state_stride, slot_stride = swa_cache.stride()[-4:-2]
    layer_stride = swa_cache.stride(0) if swa_cache.dim() == 5 else 0
    address = swa_cache.data_ptr()
    aligned = not any(offset % VECTOR_BYTES for offset in (address, layer_stride, state_stride, slot_stride))
    return address, layer_stride, state_stride, slot_stride, states * ring, values, aligned


def is_vector(tensor: torch.Tensor) -> bool:
    """Whether every run of 8 values of a contiguous tensor may be accessed 16 bytes at a time."""
    return tensor.data_ptr() % VECTOR_BYTES == 0
