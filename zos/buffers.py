"""DecodeBuffers and PrefillBuffers: the persistent outputs of a metadata slot, handed out as views of a step's shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from device_kernels.decode_metadata import chunk_count
from device_kernels.metadata import MAX_COMPRESSIONS
from zos.block_view import new_block_view
from zos.geometry import CompressionRing, RingGeometry
from zos.metadata import DecodeMetadata, PrefillMetadata, SlotOrigin, StepMetadata
from zos.ops import bind_prepare_v4_decode_metadata, bind_prepare_v4_prefill_metadata
from zos.prefill_tail import TailBuffers
from zos.table import SequenceTable

VIEWS_KEPT = 512  # shapes whose views a slot keeps, those used last

Metadata = TypeVar("Metadata", bound=StepMetadata)


class _StepBuffers(Generic[Metadata]):
    """Storage that both kinds of step have.

    Parameters
    ----------
    slot : int
        Number of the slot.
    state_ids : torch.Tensor
        int32 [max_batch]: the slot's batch.
    places : int
        Most token places of a step.
    table : SequenceTable
        The records that the batch names.
    counters : torch.Tensor
        int64 [4]: stale, duplicate, deferred, errors.
    geometry : RingGeometry
        Window, ring and tokens per step.
    compression : tuple of CompressionRing
        Compression rings whose outputs are wanted.
    marked : bool
        Whether commit marks rows that are worth a snapshot.
    """

    _make: type[Metadata]
    _bind: Callable[..., Callable[[], None]]

    def __init__(
        self,
        slot: int,
        state_ids: torch.Tensor,
        places: int,
        table: SequenceTable,
        counters: torch.Tensor,
        geometry: RingGeometry,
        compression: tuple[CompressionRing, ...],
        marked: bool,
    ) -> None:
        max_batch = state_ids.shape[0]
        self.origin = SlotOrigin(table)
        self._slot = slot
        self._state_ids = state_ids
        self._tokens = {  # by token place
            "kv_swa_index_offset_len": self._zeros(places, 2),
            "kv_swa_full_index_pivots": self._zeros(places, 4),
            "swa_len": self._zeros(places),
            "positions": self._zeros(places, dtype=torch.int64),
            "swa_write_slot": self._zeros(places, dtype=torch.int64),
            "token_row": self._zeros(places),
            "token_state_id": self._zeros(places),
        }
        if table.token_ids is not None:
            self._tokens["input_ids"] = self._zeros(places, dtype=torch.int64)
        self._rows = {  # by batch row
            "seqlens_q": self._zeros(max_batch),
            "seqlens_k": self._zeros(max_batch),
            "tickets": self._zeros(max_batch, 4),
        }
        self._marks = self._zeros(max_batch).fill_(-1) if marked else None  # written by commit, not by prepare
        self._sums = {"cu_seqlens_q": self._zeros(max_batch + 1), "num_tokens": self._zeros(1)}
        self._compressions = {  # by compression ring and token place
            "compression_write_slot": self._zeros(len(compression), places, dtype=torch.int64),
            "compression_index": self._zeros(len(compression), places, dtype=torch.int64),
        }
        step = geometry.tokens_per_step
        # Made here, not when first asked for: that may be within a capture.
        self._block_view = new_block_view(max_batch, geometry.window, geometry.ring, step, state_ids.device)
        self._constants: dict[str, Any] = {
            "records": table.records,
            "token_ids": table.token_ids,
            "counters": counters,
            "compression_ratios": tuple(ring.ratio for ring in compression),
            "compression_entries": tuple(ring.entries for ring in compression),
            "window": geometry.window,
            "ring": geometry.ring,
            "tokens_per_step": step,
        }
        self._views: OrderedDict[Hashable, Metadata] = OrderedDict()

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._state_ids.device)

    def _view(self, key: Hashable, make: Callable[[], Metadata]) -> Metadata:
        """Views as `make` makes them; the same object for the same key."""
        if key in self._views:
            self._views.move_to_end(key)
        else:
            self._views[key] = make()
            if len(self._views) > VIEWS_KEPT:
                self._views.popitem(last=False)
        return self._views[key]

    def _make_view(self, batch: int, tokens: int, extra: dict[str, Any]) -> Metadata:
        outputs = {
            "state_ids": self._state_ids[:batch],
            "input_ids": None,
            **{name: buffer[:tokens] for name, buffer in self._tokens.items()},
            **{name: buffer[:batch] for name, buffer in self._rows.items()},
            "cu_seqlens_q": self._sums["cu_seqlens_q"][: batch + 1],
            "num_tokens": self._sums["num_tokens"],
        }
        by_ring = {name: buffer[:, :tokens] for name, buffer in self._compressions.items()}
        operands = {**self._constants, **outputs, **by_ring, **extra}
        ratios = self._constants["compression_ratios"]
        fields: dict[str, Any] = {name: operands[name] for name in operands if name in self._make.__dataclass_fields__}
        fields |= {name: dict(zip(ratios, rings, strict=True)) for name, rings in by_ring.items()}
        return self._make(
            slot=self._slot,
            batch=batch,
            tokens=tokens,
            **fields,
            marks=None if self._marks is None else self._marks[:batch],
            block_view=None if self._block_view is None else self._block_view.rows(batch, operands["tokens_per_step"]),
            origin=self.origin,
            operands=operands,
            launch_prepare=type(self)._bind(**operands),
        )


class DecodeBuffers(_StepBuffers[DecodeMetadata]):
    """Storage of a slot's decode steps, sized for max_batch rows; parameters as above, and whether the layout is packed."""

    _make = DecodeMetadata
    _bind = staticmethod(bind_prepare_v4_decode_metadata)

    def __init__(
        self,
        slot: int,
        state_ids: torch.Tensor,
        table: SequenceTable,
        counters: torch.Tensor,
        geometry: RingGeometry,
        compression: tuple[CompressionRing, ...],
        marked: bool,
        packed: bool,
    ) -> None:
        max_batch = state_ids.shape[0]
        places = max_batch * geometry.tokens_per_step
        super().__init__(slot, state_ids, places, table, counters, geometry, compression, marked)
        self._tokens["kv_swa_index"] = self._zeros(places, geometry.window)
        self._constants |= {"chunk_places": self._zeros(chunk_count(max_batch)), "packed": packed}
        # Of an empty batch, for which nothing is launched: 0 whatever the slot's buffers hold.
        self._empty = {"cu_seqlens_q": self._zeros(1), "num_tokens": self._zeros(1)}

    def view(self, batch: int, tokens: int) -> DecodeMetadata:
        """Views of `batch` rows and `tokens` token places; the same object for the same shape."""
        return self._view((batch, tokens), lambda: self._make_view(batch, tokens, {} if batch else self._empty))


class PrefillBuffers(_StepBuffers[PrefillMetadata]):
    """Storage of a slot's prefill steps, sized for max_batch rows and max_prefill_tokens token places."""

    _make = PrefillMetadata
    _bind = staticmethod(bind_prepare_v4_prefill_metadata)

    def __init__(
        self,
        slot: int,
        state_ids: torch.Tensor,
        table: SequenceTable,
        counters: torch.Tensor,
        geometry: RingGeometry,
        compression: tuple[CompressionRing, ...],
        marked: bool,
        max_prefill_tokens: int,
    ) -> None:
        super().__init__(slot, state_ids, max_prefill_tokens, table, counters, geometry, compression, marked)
        max_batch = state_ids.shape[0]
        self._places = max_prefill_tokens
        self._rows["swa_load_plan"] = self._zeros(max_batch, 3, 4)
        self._rows["last_token_index"] = self._zeros(max_batch, dtype=torch.int64)
        self._constants["max_prefill_tokens"] = max_prefill_tokens
        self._full_index: torch.Tensor | None = None  # T * W: made when first asked for
        self._tail: TailBuffers | None = None  # so is this

    def view(self, batch: int, full_index: bool, tail: bool = False) -> PrefillMetadata:
        """Views of `batch` rows; the same object for the same arguments."""
        window, step = self._constants["window"], self._constants["tokens_per_step"]
        if full_index and self._full_index is None:
            self._full_index = self._zeros(self._places, window)
        if tail and self._tail is None:
            self._tail = TailBuffers(len(self._state_ids), self._places, window, step, self._state_ids.device)
        extra = {"kv_swa_full_index": self._full_index if full_index else None}

        def make() -> PrefillMetadata:
            metadata = self._make_view(batch, self._places, extra)
            return metadata if self._tail is None or not tail else _with_tail(metadata, self._tail)

        return self._view((batch, full_index, tail), make)


def _with_tail(metadata: PrefillMetadata, buffers: TailBuffers) -> PrefillMetadata:
    """The same metadata with its tail, which a launch after prepare's writes."""
    prepare = metadata.launch_prepare
    tail, launch_tail = buffers.view(dict(metadata.operands))

    def launch() -> None:
        prepare()
        launch_tail()

    return replace(metadata, tail=tail, launch_prepare=launch)


def compression_rings(ratios: Sequence[int | CompressionRing], tokens_per_step: int) -> tuple[CompressionRing, ...]:
    """Rings for what a caller asked for, an int being a ring without overlap; ValueError for a ratio twice or too many."""
    if not isinstance(ratios, Iterable):
        raise ValueError(f"compression_ratios={ratios!r} is not a sequence")
    rings = tuple(
        ratio if isinstance(ratio, CompressionRing) else CompressionRing(ratio, tokens_per_step) for ratio in ratios
    )
    if len({ring.ratio for ring in rings}) != len(rings):
        raise ValueError(f"compression_ratios names a ratio twice: {[ring.ratio for ring in rings]}")
    if len(rings) > MAX_COMPRESSIONS:
        raise ValueError(f"compression_ratios names {len(rings)} rings, more than {MAX_COMPRESSIONS}")
    for ring in rings:
        if ring.tokens_per_step < tokens_per_step:
            raise ValueError(
                f"compression ring of ratio {ring.ratio} is for {ring.tokens_per_step} tokens per step, not {tokens_per_step}"
            )
    return rings
