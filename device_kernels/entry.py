"""Launch parameters that the ring's store and load share: entry.cuh's `Cache`, and the number formats on the other side."""

from __future__ import annotations

import torch

WARP = 32
TOKENS_PER_BLOCK = 8  # one warp each
VECTOR_BYTES = 16

CACHE_LAYOUT = "P3q2i"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in entry.cuh


def pack_cache(swa_cache: torch.Tensor, values: int) -> tuple[int, ...]:
    """Members of `Cache` for a uint8 [states, ring, 1, entry bytes] view."""
    states, ring = swa_cache.shape[:2]
    state_stride, slot_stride = swa_cache.stride()[:2]
    address = swa_cache.data_ptr()
    aligned = not (address % VECTOR_BYTES or state_stride % VECTOR_BYTES or slot_stride % VECTOR_BYTES)
    return address, state_stride, slot_stride, states * ring, values, aligned


def is_vector(tensor: torch.Tensor) -> bool:
    """Whether every run of 16 values of a contiguous tensor may be accessed 16 bytes at a time."""
    return tensor.data_ptr() % VECTOR_BYTES == 0
