"""Launcher of prefill_metadata.cu: one launch, in which every warp walks the batch, or two where it is too long for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from device_kernels.metadata import LAYOUT, WARP, pack_parameters
from device_kernels.module import Kernel

ROWS_WALKED = 128  # at most by every warp
ROW_THREADS = 1024  # at most: of the one block that scans the rows of a longer batch
PARTS, INDEX_PARTS = 2, 8  # warps that share 32 places, without and with the full index, as in prefill_metadata.cu
WARPS, INDEX_WARPS = 4, INDEX_PARTS  # of a block

_PREPARE = Kernel("prefill_metadata", "prepare_v4_prefill_metadata", LAYOUT, overlaps=True)
_ROWS = Kernel("prefill_metadata", "prepare_prefill_rows", LAYOUT, overlaps=True)
_TOKENS = Kernel("prefill_metadata", "prepare_prefill_tokens", LAYOUT, overlaps=True)
KERNELS = (_PREPARE, _ROWS, _TOKENS)


def bind_prepare_v4_prefill_metadata(
    kernel: Kernel = _PREPARE, parts: int = PARTS, **operands: Any
) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernels on them.

    `kernel` and the warps that share 32 places without the full index are for benchmarks, which launch a floor so.
    """
    device, num_rows = operands["records"].device, operands["state_ids"].shape[0]
    places = operands["positions"].shape[0]
    values = pack_parameters(limit=operands.pop("max_prefill_tokens"), **operands)
    warps, parts = (WARPS, parts) if operands["kv_swa_full_index"] is None else (INDEX_WARPS, INDEX_PARTS)
    token_blocks = -(-(-(-places // WARP) * parts) // warps)
    row_warps = max(1, -(-num_rows // WARP))
    if num_rows <= ROWS_WALKED:
        return kernel.bind(device, (-(-row_warps // warps) + token_blocks, 1), (warps * WARP, 1), *values)
    rows = _ROWS.bind(device, (1, 1), (min(ROW_THREADS, row_warps * WARP), 1), *values)
    tokens = _TOKENS.bind(device, (token_blocks, 1), (warps * WARP, 1), *values)

    def prepare() -> None:
        rows()
        tokens()

    return prepare


def prepare_v4_prefill_metadata(**operands: Any) -> None:
    """Launch the kernels once on the arguments of `bind_prepare_v4_prefill_metadata`."""
    bind_prepare_v4_prefill_metadata(**operands)()
