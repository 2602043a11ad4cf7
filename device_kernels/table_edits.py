"""Launcher of table_edits.cu: one block for a flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from device_kernels.module import Kernel, pointer

THREADS = 128

_APPLY = Kernel("table_edits", "apply_table_edits", "8P2q7i", overlaps=True)
KERNELS = (_APPLY,)


def bind_apply_table_edits(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    batches: torch.Tensor,
    edits: torch.Tensor,
    batch_states: torch.Tensor,
    ready: torch.Tensor | None,
    applied: torch.Tensor,
    applied_on_host: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
    snapshot_every: int = 0,
) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernel on them."""
    return _APPLY.bind(
        records.device,
        (1, 1),
        (THREADS, 1),
        records.data_ptr(),
        pointer(token_ids),
        batches.data_ptr(),
        edits.data_ptr(),
        batch_states.data_ptr(),
        pointer(ready),
        applied.data_ptr(),
        applied_on_host.data_ptr(),
        edits.shape[1],
        batches.shape[1],
        records.shape[0],
        batches.shape[0],
        edits.shape[0],
        0 if ready is None else ready.shape[1],
        tokens_per_step,
        max_prefill_tokens,
        snapshot_every,
    )


def apply_table_edits(**operands: Any) -> None:
    """Launch the kernel once, on the arguments of `bind_apply_table_edits`."""
    bind_apply_table_edits(**operands)()
