"""What an engine would use in place of prepare, for benchmarks: the same metadata by torch ops."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zos.table import COLUMNS, Phase


class TorchMetadata(NamedTuple):
    """Outputs of `prepare_v4_decode_metadata`, by its names, with one compression ring."""

    kv_swa_index_offset_len: torch.Tensor
    kv_swa_index: torch.Tensor
    kv_swa_full_index_pivots: torch.Tensor
    swa_len: torch.Tensor
    positions: torch.Tensor
    swa_write_slot: torch.Tensor
    token_row: torch.Tensor
    token_state_id: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    num_tokens: torch.Tensor
    compression_write_slot: torch.Tensor
    compression_index: torch.Tensor
    tickets: torch.Tensor


def torch_metadata(
    records: torch.Tensor,
    state_ids: torch.Tensor,
    window: int,
    ring: int,
    tokens_per_step: int,
    ratio: int,
    entries: int,
    packed: bool,
) -> TorchMetadata:
    """Decode metadata of sound rows by torch ops alone; fixed shapes, no wait, so it may be captured and compiled.

    Parameters
    ----------
    records : torch.Tensor
        int32 [S, 16], the table.
    state_ids : torch.Tensor
        int32 [B], -1 for padding.
    window, ring, tokens_per_step : int
        W, R, Q.
    ratio, entries : int
        Of the compression ring.
    packed : bool
        Token layout; without a token budget.
    """
    rows, device = state_ids.shape[0], state_ids.device
    named = state_ids >= 0
    record = records[state_ids.clamp(min=0)]
    phase, seqlen_q, q_start, valid_start, cached_end, generation = (
        record[:, COLUMNS[name]].long()
        for name in ("phase", "seqlen_q", "q_start", "swa_valid_start", "kv_cached_end", "generation")
    )
    length = torch.where(named & (phase == Phase.LIVE), seqlen_q, 0)
    ends = length.cumsum(0)
    place = torch.arange(rows * tokens_per_step, device=device)
    if packed:
        row = torch.searchsorted(ends, place, right=True).clamp(max=rows - 1)
        j = place - (ends - length)[row]
        live = place < ends[-1]
        cu = torch.cat([ends.new_zeros(1), ends])
    else:
        row, j = place // tokens_per_step, place % tokens_per_step
        live = j < length[row]
        cu = torch.arange(rows + 1, device=device) * tokens_per_step
    state = state_ids.long()[row]
    position = q_start[row] + j
    begin = torch.maximum(position - window + 1, valid_start[row]).clamp(min=0)
    seen = position - begin + 1
    column = torch.arange(window, device=device)
    slots = (state * ring)[:, None] + (begin[:, None] + column) % ring
    history = torch.minimum(begin, q_start[row]) - (q_start[row] - window)
    chunk = (begin - q_start[row]).clamp(min=0)
    pivots = torch.stack(
        [row * window + history, window - history, rows * window + cu[row] + chunk, j - chunk + 1], dim=1
    )
    completes = ((position + 1) % ratio == 0) & (position >= cached_end[row]) & live
    ticket = torch.stack([state_ids.long(), generation, q_start, length], dim=1)
    none = torch.stack(
        [torch.full_like(length, -1), torch.zeros_like(length), state_ids.long(), torch.zeros_like(length)], dim=1
    )
    return TorchMetadata(
        torch.where(live[:, None], torch.stack([state * ring + begin % ring, seen], dim=1), 0).int(),
        torch.where(live[:, None] & (column < seen[:, None]), slots, -1).int(),
        torch.where(live[:, None], pivots, 0).int(),
        torch.where(live, seen, 0).int(),
        torch.where(live, position, 0),
        torch.where(live, state * ring + position % ring, -1),
        torch.where(live, row, -1).int(),
        torch.where(live, state, -1).int(),
        cu.int(),
        length.int(),
        torch.where(length > 0, q_start + length, 0).int(),
        length.sum().int().reshape(1),
        torch.where(live, state * entries + position % entries, -1),
        torch.where(completes, position // ratio, -1),
        torch.where((length > 0)[:, None], ticket, none).int(),
    )
