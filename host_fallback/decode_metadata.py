"""prepare_v4_decode_metadata in Numba: the bytes that device_kernels/decode_metadata.cu writes, serially on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit

from host_fallback.ring import (
    NO_ERROR,
    chunk_start,
    compressed_index,
    history_start,
    ring_slot,
    row_error,
    row_error_value,
    row_places,
    window_begin,
)

_NO_TOKEN_IDS = np.zeros((0, 0), np.int64)
_NO_INPUT_IDS = np.zeros(0, np.int64)


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
def _write_row(
    row, state_id, places, first_place, num_rows, record, token_ids, token_outputs, compressions, window, ring
):
    """Write the outputs of a live row's tokens at its token places."""
    (
        kv_swa_index_offset_len,
        kv_swa_index,
        kv_swa_full_index_pivots,
        swa_len,
        positions,
        input_ids,
        swa_write_slot,
        token_row,
        token_state_id,
        compression_write_slot,
        compression_index,
    ) = token_outputs
    q_start, prompt_end = np.int64(record[2]), np.int64(record[3])
    valid_start, kv_cached_end = np.int64(record[4]), np.int64(record[5])
    first_slot = state_id * ring
    for j in range(places):
        position = q_start + j
        begin = window_begin(position, window, valid_start)
        length = position - begin + 1
        slot = ring_slot(begin, ring)
        history, chunk = history_start(begin, q_start, window), chunk_start(begin, q_start)
        place = np.uint64(first_place + j)

        at, before_wrap = (first_place + j) * window, min(length, ring - slot)
        _count_up(kv_swa_index, at, before_wrap, first_slot + slot)
        _count_up(kv_swa_index, at + before_wrap, length - before_wrap, first_slot)
        _fill(kv_swa_index, at + length, at + window, -1)

        kv_swa_index_offset_len[place, 0] = first_slot + slot
        kv_swa_index_offset_len[place, 1] = length
        kv_swa_full_index_pivots[place, 0] = row * window + history
        kv_swa_full_index_pivots[place, 1] = window - history
        kv_swa_full_index_pivots[place, 2] = num_rows * window + first_place + chunk
        kv_swa_full_index_pivots[place, 3] = j - chunk + 1
        swa_len[place] = length
        positions[place] = position
        if input_ids.size > 0:
            input_ids[place] = token_ids[state_id, j] if q_start >= prompt_end else 0
        swa_write_slot[place] = first_slot + ring_slot(position, ring)
        token_row[place] = row
        token_state_id[place] = state_id
        for c in range(compressions.shape[1]):
            ratio, entries = compressions[0, c], compressions[1, c]
            compression_write_slot[c, place] = state_id * entries + ring_slot(position, entries)
            compression_index[c, place] = compressed_index(position, ratio, kv_cached_end)


@njit(cache=True, inline="always", error_model="numpy")
def _pad_tokens(begin, end, token_outputs, window):
    """Write PAD at token places begin … end-1."""
    (
        kv_swa_index_offset_len,
        kv_swa_index,
        kv_swa_full_index_pivots,
        swa_len,
        positions,
        input_ids,
        swa_write_slot,
        token_row,
        token_state_id,
        compression_write_slot,
        compression_index,
    ) = token_outputs
    for place in range(np.uint64(begin), np.uint64(max(begin, end))):
        at = np.int64(place) * window
        _fill(kv_swa_index, at, at + window, -1)
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


@njit(cache=True, error_model="numpy")
def _prepare(
    records,
    state_ids,
    token_ids,
    token_outputs,
    cu_seqlens_q,
    seqlens_q,
    seqlens_k,
    num_tokens,
    tickets,
    counters,
    compressions,
    window,
    ring,
    tokens_per_step,
    packed,
):
    num_rows = state_ids.shape[0]
    num_places = token_outputs[4].shape[0]
    prefix = 0  # token places of the rows before this one, deferred rows included
    live_tokens = 0
    for row in range(num_rows):
        state_id = state_ids[row]
        first_place = prefix if packed else row * tokens_per_step
        places, live, error = 0, False, NO_ERROR
        if 0 <= state_id < records.shape[0]:
            record = records[state_id]
            phase, seqlen_q, q_start, prompt_end, valid_start = record[0], record[1], record[2], record[3], record[4]
            places = row_places(phase, seqlen_q, tokens_per_step)
            error = row_error(phase, seqlen_q, q_start, prompt_end, valid_start, tokens_per_step)
            if error != NO_ERROR and record[7] == NO_ERROR:  # the first error of a state stays
                record[7] = error
                record[12] = row_error_value(error, seqlen_q, q_start, valid_start)
                counters[3] += 1
            live = places > 0 and error == NO_ERROR
        if live and packed and first_place + places > num_places:
            live = False
            counters[2] += 1
        cu_seqlens_q[row] = min(first_place, num_places)
        length = places if live else 0
        seqlens_q[row] = length
        if live:
            seqlens_k[row] = record[2] + length
            tickets[row, 0], tickets[row, 1], tickets[row, 2], tickets[row, 3] = state_id, record[6], record[2], length
            _write_row(
                row, np.int64(state_id), length, first_place, num_rows, record, token_ids, token_outputs, compressions, window,
                ring,
            )  # fmt: skip
        else:
            seqlens_k[row] = 0
            tickets[row, 0], tickets[row, 1], tickets[row, 2], tickets[row, 3] = -1, 0, 0, 0
        taken = places if packed else tokens_per_step
        if length < taken:
            end = min(first_place + taken, num_places)
            _pad_tokens(min(first_place + length, num_places), end, token_outputs, window)
        live_tokens += length
        prefix += places
    if packed:
        _pad_tokens(min(prefix, num_places), num_places, token_outputs, window)
        cu_seqlens_q[num_rows] = min(prefix, num_places)
    else:
        cu_seqlens_q[num_rows] = num_rows * tokens_per_step
    num_tokens[0] = live_tokens


def bind_prepare_v4_decode_metadata(
    records: torch.Tensor,
    state_ids: torch.Tensor,
    token_ids: torch.Tensor | None,
    kv_swa_index_offset_len: torch.Tensor,
    kv_swa_index: torch.Tensor,
    kv_swa_full_index_pivots: torch.Tensor,
    swa_len: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor | None,
    swa_write_slot: torch.Tensor,
    token_row: torch.Tensor,
    token_state_id: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    num_tokens: torch.Tensor,
    compression_write_slot: torch.Tensor,
    compression_index: torch.Tensor,
    tickets: torch.Tensor,
    counters: torch.Tensor,
    chunk_places: torch.Tensor,
    compression_ratios: Sequence[int],
    compression_entries: Sequence[int],
    window: int,
    ring: int,
    tokens_per_step: int,
    packed: bool,
) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result computes a step's metadata."""
    token_outputs = (
        kv_swa_index_offset_len.numpy(),
        kv_swa_index.numpy().reshape(-1),
        kv_swa_full_index_pivots.numpy(),
        swa_len.numpy(),
        positions.numpy(),
        _NO_INPUT_IDS if input_ids is None else input_ids.numpy(),
        swa_write_slot.numpy(),
        token_row.numpy(),
        token_state_id.numpy(),
        compression_write_slot.numpy(),
        compression_index.numpy(),
    )
    arguments = (
        records.numpy(),
        state_ids.numpy(),
        _NO_TOKEN_IDS if token_ids is None else token_ids.numpy(),
        token_outputs,
        cu_seqlens_q.numpy(),
        seqlens_q.numpy(),
        seqlens_k.numpy(),
        num_tokens.numpy(),
        tickets.numpy(),
        counters.numpy(),
        np.array([compression_ratios, compression_entries], np.int64).reshape(2, -1),
        window,
        ring,
        tokens_per_step,
        packed,
    )
    return lambda: _prepare(*arguments)


def prepare_v4_decode_metadata(*operands: Any) -> None:
    """Compute once, on the arguments of `bind_prepare_v4_decode_metadata`."""
    bind_prepare_v4_decode_metadata(*operands)()
