"""prepare_v4_decode_metadata in Numba: the bytes that device_kernels/decode_metadata.cu writes, on the CPU.

Serially, unless ZOS_CPU_THREADS asks for more: threads that wait for one another lose milliseconds where others use the cores.
Numba's threading layer must then be one that several callers may enter (omp or tbb, not workqueue).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange

from host_fallback.metadata import common_arguments, judge_row, pad_scalars, write_row, write_scalars
from host_fallback.ring import NO_ERROR, TICKET_DEFERRED, TICKET_ERROR, TICKET_PADDING, ring_slot, window_begin

THREADS = int(os.environ.get("ZOS_CPU_THREADS", "1"))
PARALLEL_ROWS = 1024  # from which on threads pay


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
def _judge_rows(rows, state_ids, num_places, tokens_per_step, packed):
    """Write what belongs to rows: where a row's token places begin, and how many are live, is then in cu_seqlens_q, seqlens_q."""
    records, cu_seqlens_q, seqlens_q, seqlens_k, num_tokens, tickets, counters = rows
    num_rows = state_ids.shape[0]
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
        live_tokens += length
        prefix += places
    cu_seqlens_q[num_rows] = min(prefix, num_places) if packed else num_rows * tokens_per_step
    num_tokens[0] = live_tokens


@njit(cache=True, nogil=True, error_model="numpy")
def _write_rows(
    begin,
    end,
    records,
    cu_seqlens_q,
    seqlens_q,
    state_ids,
    token_ids,
    scalars,
    compressions,
    window,
    ring,
    kv_swa_index,
):
    """Write every token place of rows begin … end-1, as _judge_rows has laid them out."""
    for row in range(begin, end):
        first_place, length = np.int64(cu_seqlens_q[row]), np.int64(seqlens_q[row])
        if length > 0:
            state_id = np.int64(state_ids[row])
            record = records[state_id]
            q_start, valid_start = np.int64(record[2]), np.int64(record[4])
            for j in range(length):
                _write_index(q_start + j, first_place + j, state_id, valid_start, kv_swa_index, window, ring)
            write_scalars(
                row, state_id, length, first_place, state_ids.shape[0], record, token_ids, scalars, compressions, window, ring
            )  # fmt: skip
        last_place = np.int64(cu_seqlens_q[row + 1])
        if first_place + length < last_place:
            _pad_tokens(first_place + length, last_place, kv_swa_index, scalars, window)


@njit(cache=True, error_model="numpy")
def _prepare(rows, state_ids, token_ids, scalars, compressions, window, ring, kv_swa_index, tokens_per_step, packed):
    num_rows, num_places = state_ids.shape[0], scalars[2].shape[0]
    _judge_rows(rows, state_ids, num_places, tokens_per_step, packed)
    records, cu_seqlens_q, seqlens_q = rows[0], rows[1], rows[2]
    _write_rows(
        0, num_rows, records, cu_seqlens_q, seqlens_q, state_ids, token_ids, scalars, compressions, window, ring, kv_swa_index
    )  # fmt: skip
    _pad_tokens(np.int64(cu_seqlens_q[num_rows]), num_places, kv_swa_index, scalars, window)


@njit(cache=True, error_model="numpy", parallel=True)
def _prepare_in_parallel(
    rows, state_ids, token_ids, scalars, compressions, window, ring, kv_swa_index, tokens_per_step, packed, threads
):
    """As _prepare; what belongs to tokens, nearly all of it, is written by threads, each for a run of neighbouring rows."""
    num_rows, num_places = state_ids.shape[0], scalars[2].shape[0]
    _judge_rows(rows, state_ids, num_places, tokens_per_step, packed)
    records, cu_seqlens_q, seqlens_q = rows[0], rows[1], rows[2]
    # A parallel loop takes arrays from around it, but no tuple of them.
    offset_len, pivots, swa_len, positions, input_ids, write_slot, token_row, token_state, slots, index = scalars
    for thread in prange(threads):
        outputs = (offset_len, pivots, swa_len, positions, input_ids, write_slot, token_row, token_state, slots, index)
        begin, end = thread * num_rows // threads, (thread + 1) * num_rows // threads
        _write_rows(
            begin, end, records, cu_seqlens_q, seqlens_q, state_ids, token_ids, outputs, compressions, window, ring, kv_swa_index
        )  # fmt: skip
    _pad_tokens(np.int64(cu_seqlens_q[num_rows]), num_places, kv_swa_index, scalars, window)


def bind_prepare_v4_decode_metadata(threads: int | None = None, **operands: Any) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result computes a step's metadata.

    `threads`: of long batches; default: what ZOS_CPU_THREADS says, else one.
    """
    records, state_ids, token_ids, scalars, *sums, compressions, window, ring = common_arguments(operands)
    rows = (records, *sums)
    index, step = operands["kv_swa_index"].numpy().reshape(-1), operands["tokens_per_step"]
    arguments = (rows, state_ids, token_ids, scalars, compressions, window, ring, index, step, operands["packed"])
    count = THREADS if threads is None else threads
    if count > 1 and len(state_ids) >= PARALLEL_ROWS:
        return lambda: _prepare_in_parallel(*arguments, count)
    return lambda: _prepare(*arguments)


def prepare_v4_decode_metadata(**operands: Any) -> None:
    """Compute once, on the arguments of `bind_prepare_v4_decode_metadata`."""
    bind_prepare_v4_decode_metadata(**operands)()
