"""The block view in torch: where the queries of a draft block that is not causal find their keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zos.entry import round_up
from zos.metadata import DecodeMetadata
from zos.service import MetadataService

TOPK_MULTIPLE = 64  # of index columns, as FlashMLA wants them


class BlockView(NamedTuple):
    """Row i owns tokens i * Q …, Q of them if it is live, else padding."""

    kv_swa_index: (
        torch.Tensor
    )  # int32 [B * Q, W + Q rounded up to 64]: ring slots of context and block, oldest first, then -1
    swa_len: torch.Tensor  # int32 [B * Q] [0]
    positions: torch.Tensor  # int64 [B * Q] [0]
    swa_write_slot: torch.Tensor  # int64 [B * Q] [-1]


def block_view(service: MetadataService, metadata: DecodeMetadata, num_kept: torch.Tensor) -> BlockView:
    """Q positions of each live row from q_start + num_kept (int32 [B]) on, each seeing W before the block and all of it.

    May be captured; moves no sequence.
    """
    geometry = service.geometry
    width, ring = geometry.tokens_per_step, geometry.ring
    live = (metadata.seqlens_q > 0)[:, None]
    state_id = metadata.tickets[:, :1].long()
    begin = (metadata.seqlens_k - metadata.seqlens_q + num_kept).long()[:, None]
    valid_start = service.table.swa_valid_start[state_id.clamp(min=0)].long()
    oldest = torch.maximum((begin - geometry.window).clamp(min=0), valid_start)
    length = torch.where(live, begin + width - oldest, 0)
    column = torch.arange(round_up(geometry.window + width, TOPK_MULTIPLE), device=begin.device)
    index = torch.where(column < length, state_id * ring + (oldest + column) % ring, -1)
    positions = torch.where(live, begin + torch.arange(width, device=begin.device), 0)
    write_slot = torch.where(live, state_id * ring + positions % ring, -1)
    return BlockView(
        index.int().repeat_interleave(width, 0),
        length.int().flatten().repeat_interleave(width),
        positions.flatten(),
        write_slot.flatten(),
    )
