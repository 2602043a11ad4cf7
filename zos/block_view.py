"""BlockView: where the tokens of a block drafter's non-causal block read and write, and the fixed buffers behind it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

import zos.ops
from zos.geometry import RingGeometry

COLUMNS_OF_A_TILE = 64  # index rows are padded to a multiple of it, the tile of keys of a sparse decode kernel


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockView:
    """Metadata of one block of Q tokens a row: views over fixed buffers, valid until the slot's next `view_block`.

    Row i owns token places i * Q … i * Q + Q - 1, whatever its seqlen_q; PAD stands in brackets. The Q tokens of a row see the
    same keys: positions max(start - W, swa_valid_start, 0) … start + Q - 1 of a block that begins at `start`.
    """

    # int32 [B * Q, 2]: (state_id * R + first key % R, number of keys) [0, 0]
    kv_swa_index_offset_len: torch.Tensor
    # int32 [B * Q, W + Q rounded up to 64]: ring slots of the keys, oldest first, then -1 [-1]
    kv_swa_index: torch.Tensor
    swa_len: torch.Tensor  # int32 [B * Q]: number of keys [0]
    positions: torch.Tensor  # int64 [B * Q]: start + j [0]
    swa_write_slot: torch.Tensor  # int64 [B * Q]: state_id * R + position % R [-1]
    token_row: torch.Tensor  # int32 [B * Q]: row of the batch [-1]
    token_state_id: torch.Tensor  # int32 [B * Q] [-1]

    def rows(self, batch: int, tokens_per_step: int) -> BlockView:
        """View of the first `batch` rows."""
        places = batch * tokens_per_step
        return BlockView(**{field.name: getattr(self, field.name)[:places] for field in fields(self)})


OUTPUTS = tuple(field.name for field in fields(BlockView))  # in the operator's order


def block_columns(window: int, tokens_per_step: int) -> int:
    """Columns of a block's index rows: W + Q, rounded up to whole tiles."""
    return -(-(window + tokens_per_step) // COLUMNS_OF_A_TILE) * COLUMNS_OF_A_TILE


def new_block_view(
    max_batch: int, window: int, ring: int, tokens_per_step: int, device: torch.device
) -> BlockView | None:
    """Buffers for `max_batch` rows; None where the ring is too short for a block."""
    if ring < window + tokens_per_step:
        return None
    places = max_batch * tokens_per_step

    def zeros(*columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros((places, *columns), dtype=dtype, device=device)

    return BlockView(
        kv_swa_index_offset_len=zeros(2),
        kv_swa_index=zeros(block_columns(window, tokens_per_step)),
        swa_len=zeros(),
        positions=zeros(dtype=torch.int64),
        swa_write_slot=zeros(dtype=torch.int64),
        token_row=zeros(),
        token_state_id=zeros(),
    )


def launch_block_view(
    view: BlockView | None,
    records: torch.Tensor,
    tickets: torch.Tensor,
    num_kept: torch.Tensor | None,
    geometry: RingGeometry,
) -> BlockView:
    """Write the view of the rows that `tickets` name, in one launch; ValueError where the ring is too short for a block."""
    window, step = geometry.window, geometry.tokens_per_step
    if view is None:
        raise ValueError(
            f"ring={geometry.ring} is too short for a non-causal block: window={window} and tokens_per_step={step} "
            f"need {window + step} slots"
        )
    zos.ops.call(
        "view_block",
        records,
        tickets,
        num_kept,
        *(getattr(view, name) for name in OUTPUTS),
        window,
        geometry.ring,
        step,
    )
    return view
