"""prepare_v4_prefill_metadata in Numba: the bytes that device_kernels/prefill_metadata.cu writes, serially on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from host_fallback.metadata import common_arguments, judge_row, pad_scalars, write_row, write_scalars
from host_fallback.ring import NO_ERROR, TICKET_DEFERRED, TICKET_ERROR, TICKET_PADDING, history_padding, ring_slot

_NO_FULL_INDEX = np.zeros((0, 0), np.int32)


@njit(cache=True, error_model="numpy")
def write_load_plan(row, state_id, q_start, valid_start, swa_load_plan, window, ring):
    """Write how a row's history is filled, all zeros for state_id -1.

    Left-packed: zeros for missing positions, then the ring range, split where it goes round.
    """
    plan = swa_load_plan[row]
    plan[:, 0] = -1
    plan[:, 1:] = 0
    to, used = row * window, 0
    zeros = history_padding(q_start, valid_start, window) if state_id >= 0 else window
    if zeros > 0:
        plan[0, 2], plan[0, 3] = to, zeros
        used = 1
    kept = window - zeros
    if kept > 0:
        slot = ring_slot(q_start - kept, ring)
        before_wrap = min(kept, ring - slot)
        plan[used, 0], plan[used, 1], plan[used, 2], plan[used, 3] = state_id, slot, to + zeros, before_wrap
        if kept > before_wrap:
            used += 1
            plan[used, 0], plan[used, 1] = state_id, 0
            plan[used, 2], plan[used, 3] = to + zeros + before_wrap, kept - before_wrap


@njit(cache=True, error_model="numpy")
def _write_full_index(kv_swa_full_index_pivots, kv_swa_full_index, window):
    """Expand the pivots of every token place: history rows first, then the chunk's own, then -1."""
    for place in range(kv_swa_full_index.shape[0]):
        first, history, second, chunk = kv_swa_full_index_pivots[place]
        index = kv_swa_full_index[place]
        for k in range(history):
            index[k] = first + k
        for k in range(chunk):
            index[history + k] = second + k
        index[history + chunk :] = -1


@njit(cache=True, error_model="numpy")
def _prepare(
    records,
    state_ids,
    token_ids,
    scalars,
    cu_seqlens_q,
    seqlens_q,
    seqlens_k,
    num_tokens,
    tickets,
    counters,
    compressions,
    window,
    ring,
    swa_load_plan,
    last_token_index,
    kv_swa_full_index,
    limit,
):
    num_rows = state_ids.shape[0]
    num_places = scalars[2].shape[0]
    prefix = 0  # token places of the rows before this one, deferred rows included
    live_tokens = 0
    for row in range(num_rows):
        state_id = np.int64(state_ids[row])
        places, error = judge_row(records, state_id, limit, counters)
        live, reason = places > 0 and error == NO_ERROR, TICKET_PADDING if error == NO_ERROR else TICKET_ERROR
        if live and prefix + places > num_places:
            live, reason = False, TICKET_DEFERRED
            counters[2] += 1
        length = places if live else 0
        first_place = min(prefix, num_places)
        cu_seqlens_q[row] = first_place
        write_row(row, state_id, length, reason, records, seqlens_q, seqlens_k, tickets)
        last_token_index[row] = first_place + length - 1 if live else -1
        if live:
            record = records[state_id]
            q_start, valid_start = np.int64(record[2]), np.int64(record[4])
            write_load_plan(row, state_id, q_start, valid_start, swa_load_plan, window, ring)
            write_scalars(
                row, state_id, length, first_place, num_rows, record, token_ids, scalars, compressions, window, ring
            )
        else:
            write_load_plan(row, -1, 0, 0, swa_load_plan, window, ring)
            pad_scalars(first_place, min(prefix + places, num_places), scalars)
        live_tokens += length
        prefix += places
    pad_scalars(min(prefix, num_places), num_places, scalars)
    cu_seqlens_q[num_rows] = min(prefix, num_places)
    num_tokens[0] = live_tokens
    _write_full_index(scalars[1], kv_swa_full_index, window)


def bind_prepare_v4_prefill_metadata(**operands: Any) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result computes a step's metadata."""
    full_index = operands["kv_swa_full_index"]
    arguments = (
        *common_arguments(operands),
        operands["swa_load_plan"].numpy(),
        operands["last_token_index"].numpy(),
        _NO_FULL_INDEX if full_index is None else full_index.numpy(),
        operands["max_prefill_tokens"],
    )
    return lambda: _prepare(*arguments)


def prepare_v4_prefill_metadata(**operands: Any) -> None:
    """Compute once, on the arguments of `bind_prepare_v4_prefill_metadata`."""
    bind_prepare_v4_prefill_metadata(**operands)()
