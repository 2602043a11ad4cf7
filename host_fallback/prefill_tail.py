"""prefill_tail in Numba: the bytes that device_kernels/prefill_tail.cu writes, serially on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from host_fallback.prefill_metadata import write_load_plan
from host_fallback.ring import chunk_start, history_start, ring_slot, tail_begin, tail_valid_start, window_begin


@njit(cache=True, error_model="numpy")
def _tail(
    records,
    tickets,
    batch_cu_seqlens_q,
    token_index,
    positions,
    kv_swa_full_index_pivots,
    swa_len,
    swa_write_slot,
    token_row,
    cu_seqlens_q,
    num_tokens,
    swa_load_plan,
    swa_valid_start,
    last_token_index,
    window,
    ring,
    tokens_per_step,
):
    num_rows, num_places = tickets.shape[0], positions.shape[0]
    first_place = np.int64(0)
    for row in range(num_rows):
        state_id, q_start, q = np.int64(tickets[row, 0]), np.int64(tickets[row, 2]), np.int64(tickets[row, 3])
        begin, valid_start, places, prompt_end = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        if q > 0 and 0 <= state_id < records.shape[0]:
            prompt_end = np.int64(records[state_id, 3])
            begin = tail_begin(q_start, q, prompt_end, window, tokens_per_step)
            places = max(q_start + q - begin, np.int64(0))
        if places > 0:
            valid_start = tail_valid_start(
                np.int64(records[state_id, 4]), q_start, q, prompt_end, window, tokens_per_step
            )
        cu_seqlens_q[row] = first_place
        swa_valid_start[row] = valid_start
        last_token_index[row] = first_place + places - 1 if places > 0 else -1
        write_load_plan(row, state_id if places > 0 else -1, begin, valid_start, swa_load_plan, window, ring)
        for j in range(min(places, num_places - first_place)):
            position, place = begin + j, first_place + j
            lo = window_begin(position, window, valid_start)
            history, chunk = history_start(lo, begin, window), chunk_start(lo, begin)
            token_index[place] = batch_cu_seqlens_q[row] + position - q_start
            positions[place] = position
            kv_swa_full_index_pivots[place, 0] = row * window + history
            kv_swa_full_index_pivots[place, 1] = window - history
            kv_swa_full_index_pivots[place, 2] = num_rows * window + first_place + chunk
            kv_swa_full_index_pivots[place, 3] = j - chunk + 1
            swa_len[place] = position - lo + 1
            swa_write_slot[place] = state_id * ring + ring_slot(position, ring)
            token_row[place] = row
        first_place += places
    cu_seqlens_q[num_rows] = num_tokens[0] = first_place
    token_index[first_place:] = -1
    positions[first_place:] = 0
    kv_swa_full_index_pivots[first_place:] = 0
    swa_len[first_place:] = 0
    swa_write_slot[first_place:] = -1
    token_row[first_place:] = -1


def bind_prefill_tail(**operands: Any) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result computes a step's tail."""
    arguments = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in operands.items()}
    return lambda: _tail(**arguments)


def prefill_tail(**operands: Any) -> None:
    """Compute once, on the arguments of `bind_prefill_tail`."""
    bind_prefill_tail(**operands)()
