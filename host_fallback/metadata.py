"""What both prepares share, as device_kernels/metadata.cuh does: judging a row, writing and padding a token's scalars."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from host_fallback.ring import (
    NO_ERROR,
    chunk_start,
    compressed_index,
    history_start,
    overwritten,
    ring_slot,
    row_error,
    row_error_value,
    row_places,
    window_begin,
)

_NO_TOKEN_IDS = np.zeros((0, 0), np.int64)
_NO_INPUT_IDS = np.zeros(0, np.int64)
_SCALARS = (  # outputs by token, but for the index rows, in the order that the functions below unpack
    "kv_swa_index_offset_len",
    "kv_swa_full_index_pivots",
    "swa_len",
    "positions",
    "input_ids",
    "swa_write_slot",
    "token_row",
    "token_state_id",
    "compression_write_slot",
    "compression_index",
)
_SUMS = ("cu_seqlens_q", "seqlens_q", "seqlens_k", "num_tokens", "tickets", "counters")


def common_arguments(operands: dict[str, Any]) -> tuple[Any, ...]:
    """What both prepares take, as arrays: records, state_ids, token_ids, scalars (a tuple), sums, compressions, window, ring."""
    arrays = {name: value.numpy() for name, value in operands.items() if isinstance(value, torch.Tensor)}
    scalars = tuple(arrays.get(name, _NO_INPUT_IDS) for name in _SCALARS)  # input_ids alone may be missing
    compressions = np.array([operands["compression_ratios"], operands["compression_entries"]], np.int64).reshape(2, -1)
    return (
        arrays["records"],
        arrays["state_ids"],
        arrays.get("token_ids", _NO_TOKEN_IDS),
        scalars,
        *(arrays[name] for name in _SUMS),
        compressions,
        operands["window"],
        operands["ring"],
    )


@njit(cache=True, inline="always", error_model="numpy")
def judge_row(records, state_id, limit, counters):
    """(token places, error) of a row; records the first error of its state."""
    if not 0 <= state_id < records.shape[0]:
        return 0, NO_ERROR
    record = records[state_id]
    phase, seqlen_q, q_start, prompt_end, valid_start = record[0], record[1], record[2], record[3], record[4]
    places = np.int64(row_places(phase, seqlen_q, limit))
    error = row_error(phase, seqlen_q, q_start, prompt_end, valid_start, limit)
    if error != NO_ERROR and record[7] == NO_ERROR:  # the first error of a state stays
        record[7] = error
        record[12] = row_error_value(error, seqlen_q, q_start, valid_start)
        counters[3] += 1
    return places, error


@njit(cache=True, inline="always", error_model="numpy")
def write_row(row, state_id, length, reason, records, seqlens_q, seqlens_k, tickets):
    """Write the outputs by row; length 0 is PAD, `reason` then says why in the ticket."""
    seqlens_q[row] = length
    if length > 0:
        record = records[state_id]
        seqlens_k[row] = record[2] + length
        tickets[row, 0], tickets[row, 1], tickets[row, 2], tickets[row, 3] = state_id, record[6], record[2], length
    else:
        seqlens_k[row] = 0
        named = state_id if 0 <= state_id < records.shape[0] else -1
        tickets[row, 0], tickets[row, 1], tickets[row, 2], tickets[row, 3] = -1, reason, named, 0


@njit(cache=True, inline="always", error_model="numpy")
def write_scalars(row, state_id, places, first_place, num_rows, record, token_ids, scalars, compressions, window, ring):
    """Write the scalars of a live row's tokens. By row: the tuple's arrays are counted in and out once a call."""
    (
        kv_swa_index_offset_len,
        kv_swa_full_index_pivots,
        swa_len,
        positions,
        input_ids,
        swa_write_slot,
        token_row,
        token_state_id,
        compression_write_slot,
        compression_index,
    ) = scalars
    q_start, first_slot = np.int64(record[2]), state_id * ring
    valid_start, kv_cached_end = np.int64(record[4]), np.int64(record[5])
    has_ids = q_start >= record[3] and places <= token_ids.shape[1]
    for j in range(places):
        position = q_start + j
        begin = window_begin(position, window, valid_start)
        history, chunk = history_start(begin, q_start, window), chunk_start(begin, q_start)
        place = np.uint64(first_place + j)  # unsigned: a signed subscript is tested for wrap-around each time
        kv_swa_index_offset_len[place, 0] = first_slot + ring_slot(begin, ring)
        kv_swa_index_offset_len[place, 1] = position - begin + 1
        kv_swa_full_index_pivots[place, 0] = row * window + history
        kv_swa_full_index_pivots[place, 1] = window - history
        kv_swa_full_index_pivots[place, 2] = num_rows * window + first_place + chunk
        kv_swa_full_index_pivots[place, 3] = j - chunk + 1
        swa_len[place] = position - begin + 1
        positions[place] = position
        if input_ids.size > 0:
            input_ids[place] = token_ids[state_id, j] if has_ids else 0
        swa_write_slot[place] = -1 if overwritten(j, places, ring) else first_slot + ring_slot(position, ring)
        token_row[place] = row
        token_state_id[place] = state_id
        for c in range(compressions.shape[1]):
            ratio, entries = compressions[0, c], compressions[1, c]
            slot = state_id * entries + ring_slot(position, entries)
            compression_write_slot[c, place] = -1 if overwritten(j, places, entries) else slot
            compression_index[c, place] = compressed_index(position, ratio, kv_cached_end)


@njit(cache=True, inline="always", error_model="numpy")
def pad_scalars(begin, end, scalars):
    """Write PAD at token places begin … end-1."""
    (
        kv_swa_index_offset_len,
        kv_swa_full_index_pivots,
        swa_len,
        positions,
        input_ids,
        swa_write_slot,
        token_row,
        token_state_id,
        compression_write_slot,
        compression_index,
    ) = scalars
    for place in range(np.uint64(begin), np.uint64(max(begin, end))):
        kv_swa_index_offset_len[place, 0] = kv_swa_index_offset_len[place, 1] = 0
        kv_swa_full_index_pivots[place, 0] = kv_swa_full_index_pivots[place, 1] = 0
        kv_swa_full_index_pivots[place, 2] = kv_swa_full_index_pivots[place, 3] = 0
        swa_len[place] = 0
        positions[place] = 0
        if input_ids.size > 0:
            input_ids[place] = 0
        swa_write_slot[place] = token_row[place] = token_state_id[place] = -1
        for c in range(compression_index.shape[0]):
            compression_write_slot[c, place] = compression_index[c, place] = -1
