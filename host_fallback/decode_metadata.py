"""prepare_v4_decode_metadata in Numba: the bytes that device_kernels/decode_metadata.cu writes, serially on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from host_fallback.metadata import common_arguments, judge_row, pad_scalars, write_row, write_scalars
from host_fallback.ring import NO_ERROR, TICKET_DEFERRED, TICKET_ERROR, TICKET_PADDING, ring_slot, window_begin


@njit(cache=True, inline="always", error_model="numpy")
def _count_up(out, begin, count, first):
    """out[begin … begin+count-1] = first, first+1, …  Unsigned subscripts: a signed one is tested for wrap-around each time."""
    for k in range(count):
        out[np.uint64(begin + k)] = np.int32(first + k)


@njit(cache=True, inline="always", error_model="numpy")
def _fill(out, begin, end, value):
    """out[begin … end-1] = value."""
    for k in range(begin, end):
        out[np.uint64(k)] = value


@njit(cache=True, inline="always", error_model="numpy")
def _write_index(position, place, state_id, valid_start, kv_swa_index, window, ring):
    """Write the ring slots that the query at `position` sees, oldest first, then -1; kv_swa_index is flat."""
    begin = window_begin(position, window, valid_start)
    length = position - begin + 1
    first_slot, slot = state_id * ring, ring_slot(begin, ring)
    at, before_wrap = place * window, min(length, ring - slot)
    _count_up(kv_swa_index, at, before_wrap, first_slot + slot)
    _count_up(kv_swa_index, at + before_wrap, length - before_wrap, first_slot)
    _fill(kv_swa_index, at + length, at + window, -1)


@njit(cache=True, inline="always", error_model="numpy")
def _pad_tokens(begin, end, kv_swa_index, scalars, window):
    """Write PAD at token places begin … end-1."""
    for place in range(begin, end):  # one by one: a fill over several becomes a memset, which is slower here
        _fill(kv_swa_index, place * window, (place + 1) * window, -1)
    pad_scalars(begin, end, scalars)


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
    kv_swa_index,
    tokens_per_step,
    packed,
):
    num_rows = state_ids.shape[0]
    num_places = scalars[2].shape[0]
    prefix = 0  # token places of the rows before this one, deferred rows included
    live_tokens = 0
    for row in range(num_rows):
        state_id = np.int64(state_ids[row])
        first_place = prefix if packed else row * tokens_per_step
        places, error = judge_row(records, state_id, tokens_per_step, counters)
        live, reason = places > 0 and error == NO_ERROR, TICKET_PADDING if error == NO_ERROR else TICKET_ERROR
        if live and packed and first_place + places > num_places:
            live, reason = False, TICKET_DEFERRED
            counters[2] += 1
        length = places if live else 0
        cu_seqlens_q[row] = min(first_place, num_places)
        write_row(row, state_id, length, reason, records, seqlens_q, seqlens_k, tickets)
        if live:
            record = records[state_id]
            q_start, valid_start = np.int64(record[2]), np.int64(record[4])
            for j in range(length):
                _write_index(q_start + j, first_place + j, state_id, valid_start, kv_swa_index, window, ring)
            write_scalars(
                row, state_id, length, first_place, num_rows, record, token_ids, scalars, compressions, window, ring
            )
        taken = places if packed else tokens_per_step
        if length < taken:
            end = min(first_place + taken, num_places)
            _pad_tokens(min(first_place + length, num_places), end, kv_swa_index, scalars, window)
        live_tokens += length
        prefix += places
    if packed:
        _pad_tokens(min(prefix, num_places), num_places, kv_swa_index, scalars, window)
        cu_seqlens_q[num_rows] = min(prefix, num_places)
    else:
        cu_seqlens_q[num_rows] = num_rows * tokens_per_step
    num_tokens[0] = live_tokens


def bind_prepare_v4_decode_metadata(**operands: Any) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result computes a step's metadata."""
    kv_swa_index = operands["kv_swa_index"].numpy().reshape(-1)
    arguments = (*common_arguments(operands), kv_swa_index, operands["tokens_per_step"], operands["packed"])
    return lambda: _prepare(*arguments)


def prepare_v4_decode_metadata(**operands: Any) -> None:
    """Compute once, on the arguments of `bind_prepare_v4_decode_metadata`."""
    bind_prepare_v4_decode_metadata(**operands)()
