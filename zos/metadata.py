"""DecodeMetadata and PrefillMetadata: what a step's kernels read, as views over a slot's fixed buffers, and its tickets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zos.block_view import BlockView
from zos.prefill_tail import PrefillTail
from zos.table import SequenceTable


@dataclass
class SlotOrigin:
    """Where metadata comes from; apart from the buffers, so that no cycle keeps them alive after their service."""

    table: SequenceTable
    prepared_batch: int | None = (
        None  # B of the slot's last eager prepare, or loop's replay: whose tickets its buffers hold
    )
    prepared_after: int = 0  # graphs replayed before it: a later one may have prepared any batch size


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StepMetadata:
    """What both kinds of step have: views of exactly B rows and T token places.

    The buffers are written by a prepare and keep their addresses, so a captured graph stays valid. PAD stands in brackets behind
    each field. A row is live iff its seqlens_k > 0.
    """

    slot: int  # metadata slot; -1 for the private one of a warm-up
    batch: int  # B
    tokens: int  # T
    state_ids: torch.Tensor  # int32 [B]: state of each row [-1]; what prepare reads
    kv_swa_index_offset_len: torch.Tensor  # int32 [T, 2]: (state_id * R + lo % R, window length) [0, 0]
    # int32 [T, 4]: (start, length) in section 1 and in section 2 of a buffer of B * W history rows (section 1: the W positions
    # before each row's step), then the step's own tokens (section 2) [0]
    kv_swa_full_index_pivots: torch.Tensor
    swa_len: torch.Tensor  # int32 [T]: window length, FlashMLA's topk_length [0]
    positions: torch.Tensor  # int64 [T]: absolute position [0]
    input_ids: torch.Tensor | None  # int64 [T] with carry_tokens: token_ids[state, j], 0 for a prefilling row [0]
    swa_write_slot: torch.Tensor  # int64 [T]: state_id * R + position % R, where the token's entry goes [-1]
    token_row: torch.Tensor  # int32 [T]: row of the batch [-1]
    token_state_id: torch.Tensor  # int32 [T] [-1]
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]: exclusive prefix sums of the rows' token places
    seqlens_q: torch.Tensor  # int32 [B]: query tokens [0]
    seqlens_k: torch.Tensor  # int32 [B]: q_start + seqlen_q [0]
    num_tokens: torch.Tensor  # int32 [1]: live tokens
    compression_write_slot: Mapping[int, torch.Tensor]  # ratio -> int64 [T]: state_id * C + position % C [-1]
    compression_index: Mapping[int, torch.Tensor]  # ratio -> int64 [T]: entry that the token completes, or -1 [-1]
    # int32 [B, 4]: (state_id, generation, q_start, seqlen_q), what commit reads [-1, 0 padding / 1 error / 2 deferred, state_id, 0]
    tickets: torch.Tensor
    # int32 [B] with snapshot_every, written by commit: the boundary at which the row's state is worth a snapshot [-1]
    marks: torch.Tensor | None
    block_view: BlockView | None  # what `view_block` writes; None where the ring is too short for it
    origin: SlotOrigin
    operands: Mapping[str, Any]  # arguments of the prepare operator by name
    launch_prepare: Callable[[], None]  # the operator, bound to them: no check, no packing per step

    def __repr__(self) -> str:
        return f"{type(self).__name__}(slot={self.slot}, batch={self.batch}, tokens={self.tokens})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: the operator is bound to these very buffers."""
        raise TypeError("metadata are views of a service's buffers and cannot be copied or pickled")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DecodeMetadata(StepMetadata):
    """What a decode step's kernels read."""

    kv_swa_index: torch.Tensor  # int32 [T, W]: ring slots of the visible positions, oldest first, then -1 [-1]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PrefillMetadata(StepMetadata):
    """What a prefill step's kernels read; T is always max_prefill_tokens.

    The pivots and `kv_swa_full_index` point into a buffer of B * W history rows, which `swa_load_plan` fills, followed by the
    step's own tokens.
    """

    swa_load_plan: (
        torch.Tensor
    )  # int32 [B, 3, 4]: (src state_id or -1 for zeros, src ring slot, dst row, rows); a padding row is
    # one zero segment of W rows, unused segments are (-1, 0, 0, 0)
    last_token_index: torch.Tensor  # int64 [B]: token place of the row's last token [-1]
    kv_swa_full_index: torch.Tensor | None  # int32 [T, W]: the pivots expanded, oldest first, then -1 [-1]
    tail: PrefillTail | None = None  # each prompt's last W tokens, where they were asked for
