"""Launcher of decode_metadata.cu: one launch a step, two for packed batches of more than `ONE_LAUNCH_ROWS` rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from device_kernels.module import Kernel, divisor, pointer

WARP = 32
MAX_COMPRESSIONS = 16
VECTOR_BYTES = 16
ROWS_PER_CHUNK = 256  # rows summed by one block of sum_row_places
ONE_LAUNCH_ROWS = 2048  # packed: up to here each block sums the rows before its own; beyond, that sum would dominate

LAYOUT = "21P" + "q" + "9i" + "iIi" * (1 + 2 * MAX_COMPRESSIONS)
_PREPARE = Kernel("decode_metadata", "prepare_v4_decode_metadata", LAYOUT)
_SUM_PLACES = Kernel("decode_metadata", "sum_row_places", LAYOUT)
KERNELS = (_PREPARE, _SUM_PLACES)


def chunk_count(num_rows: int) -> int:
    """Elements that the `chunk_places` workspace needs for a batch of num_rows rows."""
    return -(-num_rows // ROWS_PER_CHUNK)


class Grid(NamedTuple):
    """How a launch is laid out: blocks of `rows` batch rows with `warps` warps each."""

    rows: int
    warps: int


# (largest batch, grid): the fastest of those tried on an H200 (docs/performance.md). First about one block a multiprocessor,
# with a warp for each token's indices and one for the scalars; then larger blocks, so that a single wave covers the batch.
_GRIDS = ((128, Grid(1, 7)), (256, Grid(2, 7)), (512, Grid(4, 4)), (1024, Grid(8, 4)), (2048, Grid(8, 2)))
_LARGEST_GRID = Grid(16, 1)


def choose_grid(num_rows: int, tokens_per_step: int) -> Grid:
    """Layout of the launch for a batch."""
    rows, warps = next((grid for most, grid in _GRIDS if num_rows <= most), _LARGEST_GRID)
    return Grid(rows, min(warps, tokens_per_step + 1))


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
    chunk_places: torch.Tensor,
    compression_ratios: Sequence[int],
    compression_entries: Sequence[int],
    window: int,
    ring: int,
    tokens_per_step: int,
    packed: bool,
    kernel: Kernel = _PREPARE,
) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernel on them.

    `kernel`: what to launch on them; floor.py times other kernels on the same arguments and grid.
    """
    num_rows = state_ids.shape[0]
    if num_rows == 0:
        return lambda: None
    grid = choose_grid(num_rows, tokens_per_step)
    compressions = [
        member
        for ring_sizes in zip(compression_ratios, compression_entries, strict=True)
        for size in ring_sizes
        for member in divisor(size)
    ]
    chunked = packed and num_rows > ONE_LAUNCH_ROWS
    index_address = kv_swa_index.data_ptr()
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
        chunk_places.data_ptr(),
        compression_write_slot.stride(0),
        records.shape[0],
        num_rows,
        positions.shape[0],
        window,
        tokens_per_step,
        len(compression_ratios),
        ROWS_PER_CHUNK if chunked else 0,
        packed,
        window * kv_swa_index.element_size() % VECTOR_BYTES == 0 and index_address % VECTOR_BYTES == 0,
        *divisor(ring),
        *compressions,
        *(0,) * (6 * MAX_COMPRESSIONS - len(compressions)),
    )
    blocks = 1 + -(-num_rows // grid.rows)  # block 0 sums the batch up
    prepare = kernel.bind(records.device, blocks, (grid.warps * WARP, grid.rows), *values)
    if not chunked:
        return prepare
    sum_places = _SUM_PLACES.bind(records.device, chunk_count(num_rows), (ROWS_PER_CHUNK, 1), *values)

    def sum_then_prepare() -> None:
        sum_places()
        prepare()

    return sum_then_prepare


def prepare_v4_decode_metadata(*operands: Any) -> None:
    """Launch the kernel once on the arguments of `bind_prepare_v4_decode_metadata`."""
    bind_prepare_v4_decode_metadata(*operands)()
