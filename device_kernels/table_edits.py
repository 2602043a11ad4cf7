"""Launcher of table_edits.cu: a thread for each record edit, a block for each batch."""

from __future__ import annotations

import torch

from device_kernels.module import Kernel, pointer

THREADS = 128

_APPLY = Kernel("table_edits", "apply_table_edits", "4P2q6i")
KERNELS = (_APPLY,)


def apply_table_edits(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    batches: torch.Tensor,
    edits: torch.Tensor,
    num_edits: int,
    num_batches: int,
    tokens_per_step: int,
    max_prefill_tokens: int,
) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    blocks = -(-num_edits // THREADS) + num_batches
    if blocks == 0:
        return
    _APPLY.bind(
        records.device,
        (blocks, 1),
        (THREADS, 1),
        records.data_ptr(),
        pointer(token_ids),
        batches.data_ptr(),
        edits.data_ptr(),
        edits.numel(),
        batches.shape[1],
        records.shape[0],
        batches.shape[0],
        num_edits,
        num_batches,
        tokens_per_step,
        max_prefill_tokens,
    )()
