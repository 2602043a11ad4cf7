"""DecodeStep and PrefillStep: how a step's tokens reach their keys, given its metadata; all of it may be captured."""

from __future__ import annotations

from typing import Protocol

import torch

from zos.attention import attend, swa_decode_attention, swa_prefill_attention
from zos.block_view import BlockView
from zos.metadata import DecodeMetadata, PrefillMetadata, StepMetadata
from zos.prefill_tail import PrefillTail
from zos.v4.config import LATENT, V4Config
from zos.v4.state import V4State

QUERY_BLOCK = 256  # prefill queries that meet all compressed entries at once: bounds the memory of their scores


class Pooling(Protocol):
    """What makes an entry of `ratio` tokens."""

    ratio: int

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Entries [n, 512] of tokens [n, ratio, width] whose last has position int64 [n]."""
        ...


class WindowMetadata(Protocol):
    """Where tokens of a prefill step find their windows: fields of PrefillMetadata, of B rows and T token places."""

    @property
    def swa_load_plan(self) -> torch.Tensor:
        """int32 [B, 3, 4]."""

    @property
    def kv_swa_full_index_pivots(self) -> torch.Tensor:
        """int32 [T, 4]."""

    @property
    def swa_write_slot(self) -> torch.Tensor:
        """int64 [T]."""

    @property
    def last_token_index(self) -> torch.Tensor:
        """int64 [B]."""


class Step:
    """What decode and prefill steps share.

    Parameters
    ----------
    config : V4Config
        Sizes.
    state : V4State
        What the sequences have.
    metadata : DecodeMetadata or PrefillMetadata
        The step's.

    Attributes
    ----------
    positions : torch.Tensor
        int64 [T].
    """

    def __init__(self, config: V4Config, state: V4State, metadata: StepMetadata) -> None:
        self.config, self.state, self.metadata = config, state, metadata
        self.positions = metadata.positions
        self._live = metadata.token_row >= 0
        self._row = metadata.token_row.long().clamp(min=0)
        self._state_id = torch.where(self._live, metadata.token_state_id.long(), state.scratch)
        self._q_start = (metadata.seqlens_k - metadata.seqlens_q).long()[self._row]

    def attend_window(
        self, layer: int, q: torch.Tensor, kv_swa: torch.Tensor, scale: float, sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens' vectors [T, 512] to the layer's ring, and attend with q [T, H, 512] over their windows: out, lse."""
        raise NotImplementedError

    def attend_compressed(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend over a producer layer's entries whose last token is no later than the query: out [T, H, 512], lse [T, H]."""
        raise NotImplementedError

    @property
    def consumers(self) -> Step:
        """The step as consumer layers take it."""
        return self

    def selected(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x [tokens of the producers, …] that are this step's tokens."""
        return x

    def compress(self, layer: int, tokens: torch.Tensor, pooling: Pooling) -> None:
        """Write the entries that the tokens [T, width] complete, and keep those tokens that later ones need."""
        ratio, unpooled = pooling.ratio, self.state.unpooled[layer]
        slots, place = unpooled.shape[1], torch.arange(len(tokens), device=tokens.device)
        members = []
        for back in range(ratio - 1, -1, -1):
            position = self.positions - back
            own = tokens[(place - back).clamp(min=0)]
            earlier = unpooled[self._state_id, position % slots]  # read before the step's tokens take slots
            members.append(torch.where((position >= self._q_start)[:, None], own, earlier))
        entries = pooling(torch.stack(members, 1), self.positions)
        index, compressed = self.metadata.compression_index[ratio], self.state.compressed[layer]
        state_id = torch.where(index >= 0, self._state_id, self.state.scratch)
        compressed[state_id, index.clamp(min=0)] = entries.to(compressed.dtype)
        slot = self.metadata.compression_write_slot[ratio]
        unpooled[torch.where(slot >= 0, self._state_id, self.state.scratch), slot.clamp(min=0) % slots] = tokens

    def _visible(self, layer: int) -> torch.Tensor:
        """Entries of a compressing layer that each token sees, those from 0 on: int64 [T]."""
        return torch.where(self._live, (self.positions + 1) // self.config.ratios[layer], 0)


class RingStep(Step):
    """A step that writes its vectors first, then reads rings alone."""

    _rings: DecodeMetadata | BlockView  # what says where the tokens' windows are

    def attend_window(
        self, layer: int, q: torch.Tensor, kv_swa: torch.Tensor, scale: float, sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Step.attend_window."""
        md, ring = self._rings, self.state.rings[layer]
        torch.ops.zos.swa_ring_store(kv_swa.to(self.config.ring_dtype), md.swa_write_slot, ring)
        each = self.config.geometry.tokens_per_step
        return swa_decode_attention(q, ring, md.kv_swa_index, md.swa_len, scale, sink, each)


class DecodeStep(RingStep):
    """A decode step."""

    def __init__(self, config: V4Config, state: V4State, metadata: DecodeMetadata) -> None:
        super().__init__(config, state, metadata)
        self._rings = metadata
        width = config.geometry.tokens_per_step
        self.places, self.asked = row_places(metadata, width)
        self._place_in_rows = self._row * width + (self.positions - self._q_start).clamp(0, width - 1)

    def attend_compressed(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As Step.attend_compressed; the tokens of a row share one copy of its entries."""
        row_state = self.metadata.state_ids.long()
        entries = self.state.compressed[layer][torch.where(row_state >= 0, row_state, self.state.scratch)]
        visible = torch.where(self.asked, self._visible(layer)[self.places], 0)
        out, lse = attend_entries(q[self.places], entries, visible, scale)
        return out.flatten(0, 1)[self._place_in_rows].to(q.dtype), lse.flatten(0, 1)[self._place_in_rows]


class PrefillStep(Step):
    """A prefill step: its queries read the history loaded before its own vectors take slots, and those vectors cast back."""

    metadata: PrefillMetadata

    def __init__(
        self,
        config: V4Config,
        state: V4State,
        metadata: PrefillMetadata,
        restored_end: torch.Tensor | None = None,
    ) -> None:
        """`restored_end`: int32 [capacity]; producers' rings have the entries of positions below it, restored: they are kept."""
        super().__init__(config, state, metadata)
        self._windows: WindowMetadata = metadata  # what says where these tokens' windows are
        self._kept = None if restored_end is None else self.positions < restored_end[metadata.token_state_id.long()]
        self._consumers: PrefillStep = self if metadata.tail is None else TailStep(self, metadata.tail)

    @property
    def consumers(self) -> PrefillStep:
        """The step as consumer layers take it: with a tail each prompt's last tokens only."""
        return self._consumers

    @property
    def write_slot(self) -> torch.Tensor:
        """Where the tokens' entries go: int64 [T]."""
        return self._windows.swa_write_slot

    @property
    def last_token_index(self) -> torch.Tensor:
        """Place of each row's last token among this step's: int64 [B], 0 where it has none."""
        return self._windows.last_token_index.clamp(min=0)

    def attend_window(
        self, layer: int, q: torch.Tensor, kv_swa: torch.Tensor, scale: float, sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Step.attend_window."""
        windows, ring, window = self._windows, self.state.rings[layer], self.config.geometry.window
        vectors = kv_swa.to(self.config.ring_dtype)
        history = vectors.new_empty(self.metadata.batch * window, LATENT)
        torch.ops.zos.swa_ring_load(ring, windows.swa_load_plan, history, window)
        cast_back, write_slot = torch.empty_like(vectors), windows.swa_write_slot
        if self._kept is not None and layer < self.config.producers:
            write_slot = write_slot.masked_fill(self._kept, -1)
        torch.ops.zos.swa_ring_store(vectors, write_slot, ring, cast_back)
        return swa_prefill_attention(q, history, cast_back, windows.kv_swa_full_index_pivots, window, scale, sink)

    def attend_compressed(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As Step.attend_compressed, row after row, each over all tokens: where a row's stand only the device knows."""
        md, visible = self.metadata, self._visible(layer)
        row_state = torch.where(md.state_ids >= 0, md.state_ids, self.state.scratch).long()
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=self.config.state_dtype)
        for row in range(md.batch):
            entries = self.state.compressed[layer][row_state[row]]
            mine = self._live & (self._row == row)
            for begin in range(0, len(q), QUERY_BLOCK):
                block = slice(begin, begin + QUERY_BLOCK)
                seen = torch.where(mine, visible, 0)[block]
                row_out, row_lse = attend_entries(q[block], entries, seen, scale)
                out[block] += row_out.to(q.dtype)  # zeros where the token is another row's
                lse[block] = torch.maximum(lse[block], row_lse)  # -inf there
        return out, lse


class TailStep(PrefillStep):
    """The part of a prefill step that consumer layers run on: the tokens of each prompt's last window."""

    def __init__(self, whole: PrefillStep, tail: PrefillTail) -> None:
        self.config, self.state, self.metadata = whole.config, whole.state, whole.metadata
        self.positions, self._windows, self._consumers, self._kept = tail.positions, tail, self, None
        self._live, self._place = tail.token_index >= 0, tail.token_index.long().clamp(min=0)
        self._row = whole._row[self._place]

    def selected(self, x: torch.Tensor) -> torch.Tensor:
        """As Step.selected."""
        return x[self._place]


class BlockStep(RingStep):
    """A draft block: every query sees its row's context and the whole block, as the view's index says."""

    def __init__(self, config: V4Config, state: V4State, view: BlockView) -> None:
        self.config, self.state, self.positions, self._rings = config, state, view.positions, view


def attend_entries(
    q: torch.Tensor, entries: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [..., n, H, D] over the first `visible` (int64 [..., n]) of entries [..., E, D]: out, lse [..., n, H]."""
    heads, number = q.shape[-2], torch.arange(entries.shape[-2], device=q.device)
    unseen = number >= visible.amax(-1, keepdim=True)
    entries = entries.masked_fill(unseen[..., None], 0)  # what an earlier sequence left may be NaN
    seen = number < visible.repeat_interleave(heads, -1)[..., None]
    out, lse = attend(q.flatten(-3, -2), entries, seen, scale)
    return out.unflatten(-2, q.shape[-3:-1]), lse.unflatten(-1, q.shape[-3:-1])


def row_places(metadata: StepMetadata, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token places of each row's first `width` tokens: int64 [B, width], and bool [B, width], whether it has that many."""
    column = torch.arange(width, device=metadata.positions.device)
    places = (metadata.cu_seqlens_q[:-1, None] + column).clamp(max=metadata.tokens - 1)
    return places.long(), column < metadata.seqlens_q[:, None]
