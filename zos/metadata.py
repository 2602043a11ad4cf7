"""DecodeMetadata: the persistent output buffers of a metadata slot, their views for one step, and the step's tickets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from device_kernels.decode_metadata import chunk_count
from zos.geometry import CompressionRing, RingGeometry
from zos.ops import bind_prepare_v4_decode_metadata
from zos.table import SequenceTable

VIEWS_KEPT = 512  # (batch, tokens) shapes whose views a slot keeps, those used last


@dataclass(frozen=True, eq=False, repr=False)
class DecodeMetadata:
    """What a decode step's kernels read: views of exactly B rows and T token places over a slot's fixed buffers.

    The buffers are written by `MetadataService.prepare` and keep their addresses, so a captured graph stays valid. PAD stands in
    brackets behind each field. A row is live iff its seqlens_k > 0.
    """

    slot: int  # metadata slot; -1 for the private one of a warm-up
    batch: int  # B
    tokens: int  # T
    state_ids: torch.Tensor  # int32 [B]: state of each row [-1]; what prepare reads
    kv_swa_index_offset_len: torch.Tensor  # int32 [T, 2]: (state_id * R + lo % R, window length) [0, 0]
    kv_swa_index: torch.Tensor  # int32 [T, W]: ring slots of the visible positions, oldest first, then -1 [-1]
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
    tickets: torch.Tensor  # int32 [B, 4]: (state_id, generation, q_start, seqlen_q) [-1, 0, 0, 0]; commit reads these
    origin: SlotOrigin
    operands: Mapping[str, Any]  # arguments of prepare_v4_decode_metadata by name
    launch_prepare: Callable[[], None]  # the operator, bound to them: no check, no packing per step

    def __repr__(self) -> str:
        return f"DecodeMetadata(slot={self.slot}, batch={self.batch}, tokens={self.tokens})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: the operator is bound to these very buffers."""
        raise TypeError("metadata are views of a service's buffers and cannot be copied or pickled")


@dataclass
class SlotOrigin:
    """Where metadata comes from; apart from the buffers, so that no cycle keeps them alive after their service."""

    table: SequenceTable
    prepared_batch: int | None = None  # B of the slot's last eager prepare or replay: whose tickets its buffers hold


class MetadataBuffers:
    """Storage of one metadata slot, sized for max_batch rows.

    Parameters
    ----------
    slot : int
        Number of the slot.
    state_ids : torch.Tensor
        int32 [max_batch]: the slot's batch.
    table : SequenceTable
        The records that the batch names.
    counters : torch.Tensor
        int64 [4]: stale, duplicate, deferred, errors.
    geometry : RingGeometry
        Window, ring and tokens per step.
    compression : tuple of CompressionRing
        Compression rings whose outputs are wanted.
    packed : bool
        The token layout.
    """

    def __init__(
        self,
        slot: int,
        state_ids: torch.Tensor,
        table: SequenceTable,
        counters: torch.Tensor,
        geometry: RingGeometry,
        compression: tuple[CompressionRing, ...],
        packed: bool,
    ) -> None:
        max_batch, device = state_ids.shape[0], state_ids.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.origin = SlotOrigin(table)
        self._slot = slot
        self._table = table
        self._state_ids = state_ids
        self._counters = counters
        self._geometry = geometry
        self._packed = packed
        self._ratios = tuple(ring.ratio for ring in compression)
        self._entries = tuple(ring.entries for ring in compression)
        places = max_batch * geometry.tokens_per_step
        self._tokens = {  # by token place
            "kv_swa_index_offset_len": zeros(places, 2),
            "kv_swa_index": zeros(places, geometry.window),
            "kv_swa_full_index_pivots": zeros(places, 4),
            "swa_len": zeros(places),
            "positions": zeros(places, dtype=torch.int64),
            "swa_write_slot": zeros(places, dtype=torch.int64),
            "token_row": zeros(places),
            "token_state_id": zeros(places),
        }
        self._input_ids = zeros(places, dtype=torch.int64) if table.token_ids is not None else None
        self._rows = {  # by batch row
            "seqlens_q": zeros(max_batch),
            "seqlens_k": zeros(max_batch),
            "tickets": zeros(max_batch, 4),
        }
        self._cu_seqlens_q = zeros(max_batch + 1)
        self._num_tokens = zeros(1)
        # Of an empty batch, for which nothing is launched: 0 whatever the slot's buffers hold.
        self._empty = {"cu_seqlens_q": zeros(1), "num_tokens": zeros(1)}
        self._compression_write_slot = zeros(len(compression), places, dtype=torch.int64)
        self._compression_index = zeros(len(compression), places, dtype=torch.int64)
        self._chunk_places = zeros(chunk_count(max_batch))
        self._views: OrderedDict[tuple[int, int], DecodeMetadata] = OrderedDict()

    def view(self, batch: int, tokens: int) -> DecodeMetadata:
        """Views of `batch` rows and `tokens` token places; the same object for the same shape."""
        key = (batch, tokens)
        if key in self._views:
            self._views.move_to_end(key)
        else:
            self._views[key] = self._make_view(batch, tokens)
            if len(self._views) > VIEWS_KEPT:
                self._views.popitem(last=False)
        return self._views[key]

    def _make_view(self, batch: int, tokens: int) -> DecodeMetadata:
        operands = self._operands(batch, tokens)
        outputs = ("state_ids", *self._tokens, "input_ids", *self._rows, "cu_seqlens_q", "num_tokens")
        return DecodeMetadata(
            slot=self._slot,
            batch=batch,
            tokens=tokens,
            **{name: operands[name] for name in outputs},
            compression_write_slot=dict(zip(self._ratios, operands["compression_write_slot"], strict=True)),
            compression_index=dict(zip(self._ratios, operands["compression_index"], strict=True)),
            origin=self.origin,
            operands=operands,
            launch_prepare=bind_prepare_v4_decode_metadata(**operands),
        )

    def _operands(self, batch: int, tokens: int) -> dict[str, Any]:
        return {
            "records": self._table.records,
            "state_ids": self._state_ids[:batch],
            "token_ids": self._table.token_ids,
            **{name: buffer[:tokens] for name, buffer in self._tokens.items()},
            "input_ids": None if self._input_ids is None else self._input_ids[:tokens],
            **{name: buffer[:batch] for name, buffer in self._rows.items()},
            **(
                {"cu_seqlens_q": self._cu_seqlens_q[: batch + 1], "num_tokens": self._num_tokens}
                if batch
                else self._empty
            ),
            "compression_write_slot": self._compression_write_slot[:, :tokens],
            "compression_index": self._compression_index[:, :tokens],
            "counters": self._counters,
            "chunk_places": self._chunk_places,
            "compression_ratios": self._ratios,
            "compression_entries": self._entries,
            "window": self._geometry.window,
            "ring": self._geometry.ring,
            "tokens_per_step": self._geometry.tokens_per_step,
            "packed": self._packed,
        }
