"""Launcher of decode_metadata.cu: one launch a step, two for packed batches of more than `ONE_LAUNCH_ROWS` rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from device_kernels.metadata import LAYOUT, WARP, pack_parameters
from device_kernels.module import Kernel

ROWS_PER_CHUNK = 256  # rows summed by one block of sum_row_places
ONE_LAUNCH_ROWS = 4096  # packed: up to here each block sums the rows before its own; beyond, that sum would dominate

_PREPARE = Kernel("decode_metadata", "prepare_v4_decode_metadata", LAYOUT, overlaps=True)
_SUM_PLACES = Kernel("decode_metadata", "sum_row_places", LAYOUT, overlaps=True)
KERNELS = (_PREPARE, _SUM_PLACES)


def chunk_count(num_rows: int) -> int:
    """Elements that the `chunk_places` workspace needs for a batch of num_rows rows."""
    return -(-num_rows // ROWS_PER_CHUNK)


class Grid(NamedTuple):
    """How a launch is laid out: blocks of `rows` batch rows with `warps` warps each."""

    rows: int
    warps: int


# (largest batch, grid): the fastest of those tried on an H200 (docs/performance.md). First a warp for each token's indices and one
# for the scalars, then more rows a block, so that a single wave covers the batch.
_GRIDS = ((128, Grid(1, 7)), (512, Grid(4, 7)), (1024, Grid(8, 3)), (2048, Grid(8, 2)))
_LARGEST_GRID = Grid(32, 1)


def choose_grid(num_rows: int, tokens_per_step: int) -> Grid:
    """Layout of the launch for a batch."""
    rows, warps = next((grid for most, grid in _GRIDS if num_rows <= most), _LARGEST_GRID)
    return Grid(rows, min(warps, tokens_per_step + 1))


def bind_prepare_v4_decode_metadata(
    kernel: Kernel = _PREPARE, grid: Grid | None = None, **operands: Any
) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernel on them.

    `kernel`: what to launch on them, and `grid`: how; floor.py times other kernels on the same arguments.
    """
    device, num_rows = operands["records"].device, operands["state_ids"].shape[0]
    step, packed = operands["tokens_per_step"], operands["packed"]
    if num_rows == 0:
        return lambda: None
    grid = grid or choose_grid(num_rows, step)
    chunked = packed and num_rows > ONE_LAUNCH_ROWS
    values = pack_parameters(**operands, limit=step, rows_per_chunk=ROWS_PER_CHUNK if chunked else 0)
    blocks = 1 + -(-num_rows // grid.rows)  # block 0 sums the batch up
    prepare = kernel.bind(device, (blocks, 1), (grid.warps * WARP, grid.rows), *values)
    if not chunked:
        return prepare
    sum_places = _SUM_PLACES.bind(device, (chunk_count(num_rows), 1), (ROWS_PER_CHUNK, 1), *values)

    def sum_then_prepare() -> None:
        sum_places()
        prepare()

    return sum_then_prepare


def prepare_v4_decode_metadata(**operands: Any) -> None:
    """Launch the kernel once on the arguments of `bind_prepare_v4_decode_metadata`."""
    bind_prepare_v4_decode_metadata(**operands)()
