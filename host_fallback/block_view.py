"""view_block in Numba: the bytes that device_kernels/block_view.cu writes, serially on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from host_fallback.ring import INT32_LARGEST, LIVE, PAUSED, ring_slot, window_begin

_NO_NUM_KEPT = np.zeros(0, np.int32)


@njit(cache=True, error_model="numpy")
def _block_of_row(records, ticket, has_num_kept, num_kept, window, tokens_per_step):
    """(state_id or -1, position of the block's first token, first position that it sees) of a row."""
    state_id, q_start, q = np.int64(ticket[0]), np.int64(ticket[2]), np.int64(ticket[3])
    if q <= 0 or not 0 <= state_id < records.shape[0]:
        return -1, 0, 0
    record = records[state_id]
    if record[6] != ticket[1] or (record[0] != LIVE and record[0] != PAUSED):
        return -1, 0, 0
    kept = np.int64(0)
    if has_num_kept:
        kept = q if q_start < record[3] else np.int64(num_kept)  # commit keeps all of a chunk
    start, valid_start = q_start + kept, np.int64(record[4])
    if kept < 0 or kept > q or q_start < 0 or start + tokens_per_step > INT32_LARGEST or valid_start > start:
        return -1, 0, 0
    return state_id, start, window_begin(start - 1, window, valid_start)


@njit(cache=True, error_model="numpy")
def _view(
    records,
    tickets,
    num_kept,
    kv_swa_index_offset_len,
    kv_swa_index,
    swa_len,
    positions,
    swa_write_slot,
    token_row,
    token_state_id,
    window,
    ring,
    tokens_per_step,
):
    has_num_kept = num_kept.shape[0] > 0
    for row in range(tickets.shape[0]):
        kept = num_kept[row] if has_num_kept else 0
        state_id, start, begin = _block_of_row(records, tickets[row], has_num_kept, kept, window, tokens_per_step)
        live = state_id >= 0
        first_slot, slot = (state_id * ring, ring_slot(begin, ring)) if live else (0, 0)
        length = start + tokens_per_step - begin if live else 0
        for j in range(tokens_per_step):
            place = row * tokens_per_step + j
            kv_swa_index_offset_len[place, 0] = first_slot + slot
            kv_swa_index_offset_len[place, 1] = swa_len[place] = length
            positions[place] = start + j if live else 0
            swa_write_slot[place] = first_slot + ring_slot(start + j, ring) if live else -1
            token_row[place] = row if live else -1
            token_state_id[place] = state_id
            index, before_wrap = kv_swa_index[place], min(length, ring - slot)
            for k in range(before_wrap):
                index[k] = first_slot + slot + k
            for k in range(before_wrap, length):
                index[k] = first_slot + k - before_wrap
            index[length:] = -1


def view_block(
    records: torch.Tensor,
    tickets: torch.Tensor,
    num_kept: torch.Tensor | None,
    kv_swa_index_offset_len: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    positions: torch.Tensor,
    swa_write_slot: torch.Tensor,
    token_row: torch.Tensor,
    token_state_id: torch.Tensor,
    window: int,
    ring: int,
    tokens_per_step: int,
) -> None:
    """Compute on checked CPU arguments (see `zos.ops`)."""
    _view(
        records.numpy(),
        tickets.numpy(),
        _NO_NUM_KEPT if num_kept is None else num_kept.numpy(),
        kv_swa_index_offset_len.numpy(),
        kv_swa_index.numpy(),
        swa_len.numpy(),
        positions.numpy(),
        swa_write_slot.numpy(),
        token_row.numpy(),
        token_state_id.numpy(),
        window,
        ring,
        tokens_per_step,
    )
