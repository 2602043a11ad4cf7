"""Launch parameters that both prepares take: metadata.cuh's `Params`, packed from the operators' arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from device_kernels.module import divisor, pointer

WARP = 32
MAX_COMPRESSIONS = 16
VECTOR_BYTES = 16

LAYOUT = "24P" + "q" + "10i" + "iIi" * (1 + 2 * MAX_COMPRESSIONS)


def pack_parameters(
    *,
    records: torch.Tensor,
    state_ids: torch.Tensor,
    token_ids: torch.Tensor | None,
    kv_swa_index_offset_len: torch.Tensor,
    kv_swa_full_index_pivots: torch.Tensor,
    swa_len: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor | None,
    swa_write_slot: torch.Tensor,
    token_row: torch.Tensor,
    token_state_id: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    num_tokens: torch.Tensor,
    compression_write_slot: torch.Tensor,
    compression_index: torch.Tensor,
    tickets: torch.Tensor,
    counters: torch.Tensor,
    compression_ratios: Sequence[int],
    compression_entries: Sequence[int],
    window: int,
    ring: int,
    tokens_per_step: int,
    limit: int,
    kv_swa_index: torch.Tensor | None = None,
    chunk_places: torch.Tensor | None = None,
    swa_load_plan: torch.Tensor | None = None,
    last_token_index: torch.Tensor | None = None,
    kv_swa_full_index: torch.Tensor | None = None,
    rows_per_chunk: int = 0,
    packed: bool = True,
) -> tuple[int, ...]:
    """Values of the struct's members in their order; an output that a prepare does not have is a null pointer."""
    index_address = pointer(kv_swa_full_index if kv_swa_index is None else kv_swa_index)
    index_bytes = window * swa_len.element_size()
    compressions = [
        member
        for ring_sizes in zip(compression_ratios, compression_entries, strict=True)
        for size in ring_sizes
        for member in divisor(size)
    ]
    return (
        records.data_ptr(),
        state_ids.data_ptr(),
        pointer(token_ids),
        kv_swa_index_offset_len.data_ptr(),
        pointer(kv_swa_index),
        kv_swa_full_index_pivots.data_ptr(),
        swa_len.data_ptr(),
        positions.data_ptr(),
        pointer(input_ids),
        swa_write_slot.data_ptr(),
        token_row.data_ptr(),
        token_state_id.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seqlens_q.data_ptr(),
        seqlens_k.data_ptr(),
        num_tokens.data_ptr(),
        compression_write_slot.data_ptr(),
        compression_index.data_ptr(),
        tickets.data_ptr(),
        counters.data_ptr(),
        pointer(chunk_places),
        pointer(swa_load_plan),
        pointer(last_token_index),
        pointer(kv_swa_full_index),
        compression_write_slot.stride(0),
        records.shape[0],
        state_ids.shape[0],
        positions.shape[0],
        window,
        tokens_per_step,
        limit,
        len(compression_ratios),
        rows_per_chunk,
        packed,
        index_bytes % VECTOR_BYTES == 0 and index_address % VECTOR_BYTES == 0,
        *divisor(ring),
        *compressions,
        *(0,) * (6 * MAX_COMPRESSIONS - len(compressions)),
    )
