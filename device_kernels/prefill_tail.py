"""Launcher of prefill_tail.cu: one thread a token place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from device_kernels.module import Kernel, divisor

THREADS = 256  # as in prefill_tail.cu

_TAIL = Kernel("prefill_tail", "prefill_tail", "14P" + "5i" + "iIi", overlaps=True)
KERNELS = (_TAIL,)


def bind_prefill_tail(
    records: torch.Tensor,
    tickets: torch.Tensor,
    batch_cu_seqlens_q: torch.Tensor,
    token_index: torch.Tensor,
    positions: torch.Tensor,
    kv_swa_full_index_pivots: torch.Tensor,
    swa_len: torch.Tensor,
    swa_write_slot: torch.Tensor,
    token_row: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    num_tokens: torch.Tensor,
    swa_load_plan: torch.Tensor,
    swa_valid_start: torch.Tensor,
    last_token_index: torch.Tensor,
    window: int,
    ring: int,
    tokens_per_step: int,
) -> Callable[[], None]:
    """Pack checked arguments (see `zos.ops`) once; calling the result launches the kernel on them."""
    places = positions.shape[0]
    return _TAIL.bind(
        records.device,
        (max(1, -(-places // THREADS)), 1),
        (THREADS, 1),
        records.data_ptr(),
        tickets.data_ptr(),
        batch_cu_seqlens_q.data_ptr(),
        token_index.data_ptr(),
        positions.data_ptr(),
        kv_swa_full_index_pivots.data_ptr(),
        swa_len.data_ptr(),
        swa_write_slot.data_ptr(),
        token_row.data_ptr(),
        cu_seqlens_q.data_ptr(),
        num_tokens.data_ptr(),
        swa_load_plan.data_ptr(),
        swa_valid_start.data_ptr(),
        last_token_index.data_ptr(),
        records.shape[0],
        tickets.shape[0],
        places,
        window,
        tokens_per_step,
        *divisor(ring),
    )


def prefill_tail(**operands: Any) -> None:
    """Launch the kernel once, on the arguments of `bind_prefill_tail`."""
    bind_prefill_tail(**operands)()
