"""Launcher of commit.cu: one thread a row."""

from __future__ import annotations

import torch

from device_kernels.module import Kernel, pointer

THREADS = 64  # small blocks: a batch of 256 rows spreads over four multiprocessors

_COMMIT = Kernel("commit", "commit", "7P" + "4i")
KERNELS = (_COMMIT,)


def commit(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    tickets: torch.Tensor,
    num_kept: torch.Tensor,
    finished: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    counters: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
) -> None:
    """Launch the kernel on checked arguments; shapes and meaning are documented at `zos.ops`."""
    num_rows = tickets.shape[0]
    if num_rows == 0:
        return
    _COMMIT.bind(
        records.device,
        (-(-num_rows // THREADS), 1),
        (THREADS, 1),
        records.data_ptr(),
        pointer(token_ids),
        tickets.data_ptr(),
        num_kept.data_ptr(),
        pointer(finished),
        pointer(next_tokens),
        counters.data_ptr(),
        records.shape[0],
        num_rows,
        tokens_per_step,
        max_prefill_tokens,
    )()
