"""Launcher of decode_metadata.cu: one launch a step, two for packed batches of more than `ONE_LAUNCH_ROWS` rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from device_kernels.module import Kernel, divisor, pointer

WARP = 32
MAX_WARPS = 32
VECTOR_BYTES = 16
ROWS_PER_CHUNK = 256  # rows summed by one block of sum_row_places
ONE_LAUNCH_ROWS = 1024  # packed: up to here each block sums the rows before its own; beyond, that sum would dominate
FILL_BLOCKS = 128  # blocks worth having before a block takes a second row; about one per multiprocessor
PACKED_ROWS_PER_BLOCK = 5  # at most: fewer blocks sum the batch; 5 rows of 6 tokens fill a block's 32 warps
STRIDED_ROWS_PER_BLOCK = 1

_LAYOUT = "22P" + "q" + "10i" + "iIi"
_PREPARE = Kernel("decode_metadata", "prepare_v4_decode_metadata", _LAYOUT)
_SUM_PLACES = Kernel("decode_metadata", "sum_row_places", _LAYOUT)
KERNELS = (_PREPARE, _SUM_PLACES)


def chunk_count(num_rows: int) -> int:
    """Elements that the `chunk_places` workspace needs for a batch of num_rows rows."""
    return -(-num_rows // ROWS_PER_CHUNK)


def rows_per_block(num_rows: int, tokens_per_step: int, packed: bool) -> int:
    """Rows that one block writes: one warp a token and one for the scalars, as many rows as keep the device busy."""
    most = PACKED_ROWS_PER_BLOCK if packed else STRIDED_ROWS_PER_BLOCK
    fit = max(1, (MAX_WARPS - 1) // tokens_per_step)
    return min(most, fit, max(1, num_rows // FILL_BLOCKS))


def bind_prepare_v4_decode_metadata(
    records: torch.Tensor,
    state_ids: torch.Tensor,
    token_ids: torch.Tensor | None,
    kv_swa_index_offset_len: torch.Tensor,
    kv_swa_index: torch.Tensor,
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
    compressions: torch.Tensor,
    chunk_places: torch.Tensor,
    window: int,
    ring: int,
    tokens_per_step: int,
    packed: bool,
) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernel on them."""
    num_rows = state_ids.shape[0]
    if num_rows == 0:
        return lambda: None
    index_address = kv_swa_index.data_ptr()
    rows = rows_per_block(num_rows, tokens_per_step, packed)
    chunked = packed and num_rows > ONE_LAUNCH_ROWS
    values = (
        records.data_ptr(),
        state_ids.data_ptr(),
        pointer(token_ids),
        kv_swa_index_offset_len.data_ptr(),
        index_address,
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
        compressions.data_ptr(),
        chunk_places.data_ptr(),
        compression_write_slot.stride(0),
        records.shape[0],
        num_rows,
        positions.shape[0],
        window,
        tokens_per_step,
        compressions.shape[0],
        rows,
        ROWS_PER_CHUNK if chunked else 0,
        packed,
        window * kv_swa_index.element_size() % VECTOR_BYTES == 0 and index_address % VECTOR_BYTES == 0,
        *divisor(ring),
    )
    warps = min(MAX_WARPS, rows * tokens_per_step + 1)
    prepare = _PREPARE.bind(records.device, 1 + -(-num_rows // rows), warps * WARP, *values)
    if not chunked:
        return prepare
    sum_places = _SUM_PLACES.bind(records.device, chunk_count(num_rows), ROWS_PER_CHUNK, *values)

    def sum_then_prepare() -> None:
        sum_places()
        prepare()

    return sum_then_prepare


def prepare_v4_decode_metadata(*operands: Any) -> None:
    """Launch the kernel once on the arguments of `bind_prepare_v4_decode_metadata`."""
    bind_prepare_v4_decode_metadata(*operands)()
