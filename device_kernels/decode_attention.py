"""Launcher of decode_attention.cu: a block for the tokens of a row, or several where rows are few."""

from __future__ import annotations

from typing import Any

import torch

from device_kernels.entry import CACHE_LAYOUT, WARP, pack_cache
from device_kernels.module import Kernel, pointer

WARPS = 12
WIDTH = 512  # values of an entry
HEADS_OF_A_TILE = 16
TILES_OF_A_WARP = 2
LARGEST_RING = 144
LARGEST_GROUP = 32
STAGES = 6
STAGE_BYTES = 1024  # 16 rows of 32 values
# keys in bf16, each 16 bytes further apart than it is wide, and the queries on their way
SHARED_BYTES = LARGEST_RING * (WIDTH + 8) * 2 + WARPS * STAGES * STAGE_BYTES

_ATTENTION = Kernel("decode_attention", "swa_decode_attention", CACHE_LAYOUT + "6Pf5i", SHARED_BYTES, overlaps=True)
KERNELS = (_ATTENTION,)


def fits(device: torch.device) -> bool:
    """Whether a block of the device has shared memory enough for a ring."""
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= SHARED_BYTES)


def swa_decode_attention(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    tokens_per_step: int,
) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    tokens, heads, _ = q.shape
    if q.numel() == 0:
        return
    group = min(tokens_per_step, LARGEST_GROUP)
    blocks = -(-tokens // group)
    pairs = -(-group * (heads // HEADS_OF_A_TILE) // TILES_OF_A_WARP)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    shares = max(
        1, min(processors // blocks, pairs // TILES_OF_A_WARP)
    )  # blocks for the same tokens, each with its own keys
    _ATTENTION.bind(
        q.device,
        (blocks, shares),
        (WARPS * WARP, 1),
        *pack_cache(swa_cache, WIDTH),
        q.data_ptr(),
        kv_swa_index.data_ptr(),
        swa_len.data_ptr(),
        pointer(sink),
        out.data_ptr(),
        lse.data_ptr(),
        softmax_scale,
        tokens,
        heads,
        kv_swa_index.shape[1],
        swa_cache.shape[-3],
        group,
    )()
