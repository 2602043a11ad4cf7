"""Launcher of prefill_metadata.cu: one block judges and sums the rows, then the tokens are written by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from device_kernels.metadata import LAYOUT, WARP, pack_parameters
from device_kernels.module import Kernel

ROW_THREADS = 1024  # at most: of the one block that scans the rows
TOKEN_THREADS = 128

_ROWS = Kernel("prefill_metadata", "prepare_prefill_rows", LAYOUT)
_TOKENS = Kernel("prefill_metadata", "prepare_v4_prefill_metadata", LAYOUT)
KERNELS = (_ROWS, _TOKENS)


def bind_prepare_v4_prefill_metadata(max_prefill_tokens: int, **operands: Any) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernels on them."""
    device, num_rows, places = (
        operands["records"].device,
        operands["state_ids"].shape[0],
        operands["positions"].shape[0],
    )
    values = pack_parameters(**operands, limit=max_prefill_tokens)
    row_threads = min(ROW_THREADS, max(1, -(-num_rows // WARP)) * WARP)
    rows = _ROWS.bind(device, 1, (row_threads, 1), *values)
    tokens = _TOKENS.bind(device, -(-places // TOKEN_THREADS), (TOKEN_THREADS, 1), *values)

    def prepare() -> None:
        rows()
        tokens()

    return prepare


def prepare_v4_prefill_metadata(**operands: Any) -> None:
    """Launch the kernels once on the arguments of `bind_prepare_v4_prefill_metadata`."""
    bind_prepare_v4_prefill_metadata(**operands)()
