"""Launcher of commit.cu: one thread a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from device_kernels.module import Kernel, pointer

THREADS = 64  # small blocks: a batch of 256 rows spreads over four multiprocessors
MOST_THREADS = 1024  # of the one block that a step with a record or a refill gets, unless it has more rows
WARP = 32

_COMMIT = Kernel("commit", "commit", "14P" + "q" + "11i", overlaps=True)
KERNELS = (_COMMIT,)


def bind_commit(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    tickets: torch.Tensor,
    counters: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
    batch: torch.Tensor | None = None,
    batch_state: torch.Tensor | None = None,
    ready: torch.Tensor | None = None,
    results: torch.Tensor | None = None,
    results_state: torch.Tensor | None = None,
    prefill: bool = False,
    marks: torch.Tensor | None = None,
    snapshot_every: int = 0,
    window: int = 0,
    ring: int = 0,
) -> Callable[..., None]:
    """Take the addresses of checked arguments (see `zos.ops`) once.

    Calling the result with (num_kept, finished, next_tokens, kept_tokens), checked as well, launches the kernel.
    """
    num_rows = tickets.shape[0]
    threads = THREADS
    if results is not None or ready is not None:  # whoever ends last goes over all rows: best the only block
        threads = min(MOST_THREADS, max(1, -(-num_rows // WARP)) * WARP)
    elif num_rows == 0:
        return lambda *_: None
    device, blocks = records.device, max(1, -(-num_rows // threads))
    table = (records.data_ptr(), pointer(token_ids), tickets.data_ptr())
    memory = tuple(pointer(tensor) for tensor in (batch, batch_state, ready, results, results_state))
    sizes = (
        0 if results is None else results.shape[1],
        records.shape[0],
        num_rows,
        0 if batch is None else batch.shape[0],
        tokens_per_step,
        max_prefill_tokens,
        0 if ready is None else ready.shape[0],
        0 if results is None else results.shape[0],
        prefill,
        snapshot_every,
        window,
        ring,
    )

    def commit_result(
        num_kept: torch.Tensor,
        finished: torch.Tensor | None,
        next_tokens: torch.Tensor | None,
        kept_tokens: torch.Tensor | None,
    ) -> None:
        result = (num_kept.data_ptr(), pointer(finished), pointer(next_tokens), counters.data_ptr())
        values = (*table, *result, *memory, pointer(kept_tokens), pointer(marks), *sizes)
        _COMMIT.bind(device, (blocks, 1), (threads, 1), *values)()

    return commit_result


def commit(
    num_kept: torch.Tensor,
    finished: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    kept_tokens: torch.Tensor | None = None,
    **operands: Any,
) -> None:
    """Launch the kernel once, on the arguments of `bind_commit` and what it returns."""
    bind_commit(**operands)(num_kept, finished, next_tokens, kept_tokens)
