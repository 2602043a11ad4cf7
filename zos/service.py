"""MetadataService: admits sequences, prepares a step's metadata, commits its result, and knows when each edit takes effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

import zos.ops
from zos.arguments import whole_number
from zos.buffers import DecodeBuffers, PrefillBuffers, compression_rings
from zos.devices import resolve_device
from zos.edits import StagedEdits
from zos.errors import DeviceStateError, EditsDuringCaptureError, MetadataReplacedError
from zos.geometry import CompressionRing, RingGeometry
from zos.mapped import shared_zeros
from zos.metadata import DecodeMetadata, PrefillMetadata, StepMetadata
from zos.sequences import SequenceEdits
from zos.streams import StreamOrder
from zos.table import SequenceTable

TOKEN_LAYOUTS = ("packed", "strided")
COUNTERS = ("stale", "duplicate", "deferred", "errors")


@dataclass
class _Slot:
    """One metadata slot: its buffers, and the shapes of the batches last set."""

    buffers: DecodeBuffers
    batch: int | None = None  # B
    tokens: int = 0  # T
    prefill_buffers: PrefillBuffers | None = None  # made with the first prefill batch
    prefill_batch: int = 0  # B
    batches_set: int = 0  # how often a batch was set: tells a loop whether the batch is still its own


class MetadataService(SequenceEdits):
    """Sequence metadata that lives on the device: records in, attention metadata out, with no host round trip.

    Host calls only stage edits; `prepare` and `flush` apply them in one launch on the current stream, in call order. Everything
    happens in stream order, also across streams: a call on another stream than the last one waits for it on the device.

    Parameters
    ----------
    capacity : int
        Number of states. capacity * ring must be below 2^31, so that ring slots fit int32.
    max_batch : int
        Most rows of a batch.
    geometry : RingGeometry, optional
        Window, draft tokens and ring. Default: RingGeometry().
    device : str or torch.device
        A CUDA device, or "cpu" for the identical calls on Numba.
    max_prefill_tokens : int
        Tokens of a prefill step, and the chunk length that chunk_q = 0 stands for.
    token_layout : {"packed", "strided"}
        Where a row's tokens stand (docs/design.md, "Token places"). "strided" needs no scan over the batch and is the fastest.
    compression_ratios : sequence of int or CompressionRing
        Compression rings whose outputs are wanted; an int is a ring without overlap.
    carry_tokens : bool
        Whether the table holds the next step's input ids.
    metadata_slots : int
        Batches that can be in flight at once, each with its own buffers.

    Raises
    ------
    ValueError
        A size is out of range; the message names argument, rule and value.

    Examples
    --------
    >>> svc = MetadataService(capacity=16, max_batch=4, device="cpu")
    >>> svc.admit(state_id=3, q_start=1000, seqlen_q=6)
    >>> svc.set_batch([3], batch=1)
    >>> svc.prepare().kv_swa_index_offset_len[0].tolist()
    [471, 128]
    """

    def __init__(
        self,
        capacity: int = 4096,
        max_batch: int = 256,
        geometry: RingGeometry | None = None,
        device: str | torch.device = "cuda",
        max_prefill_tokens: int = 8192,
        token_layout: str = "packed",
        compression_ratios: Sequence[int | CompressionRing] = (2,),
        carry_tokens: bool = False,
        metadata_slots: int = 1,
    ) -> None:
        geometry = geometry or RingGeometry()
        step = geometry.tokens_per_step
        self.capacity = whole_number("capacity", capacity, 1)
        self.max_batch = whole_number("max_batch", max_batch, 1)
        self.metadata_slots = whole_number("metadata_slots", metadata_slots, 1)
        max_prefill_tokens = whole_number("max_prefill_tokens", max_prefill_tokens, 1)
        whole_number("capacity * ring", self.capacity * geometry.ring, 1)
        whole_number("max_batch * (window + tokens_per_step)", self.max_batch * (geometry.window + step), 1)
        if token_layout not in TOKEN_LAYOUTS:
            raise ValueError(f"token_layout={token_layout!r} is none of {', '.join(TOKEN_LAYOUTS)}")
        self.token_layout = token_layout
        compression = compression_rings(compression_ratios, step)
        self.device = resolve_device(device)
        self.steps_launched = 0  # prepared here, or reported through `launched`

        table = SequenceTable(self.capacity, step, carry_tokens, self.device)
        # int32 [2 * slots + 1, max_batch]: state ids by row, of each slot's decode batch, then of each slot's prefill batch; the
        # last is all padding, for warm-ups
        shape = (2 * self.metadata_slots + 1, self.max_batch)
        self._batches = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        edits = StagedEdits(table, self._batches, step, max_prefill_tokens)
        super().__init__(table, edits, geometry, max_prefill_tokens, compression)
        self._counters_host, self.operator_counters = shared_zeros(len(COUNTERS), torch.int64, self.device)
        self._slots = [_Slot(self._new_buffers(slot, self.max_batch)) for slot in range(self.metadata_slots)]
        self._order = StreamOrder(self.device)
        self._order.keep_until_launched(self, self._edits, self._counters_host)

    # ---- batches and steps ------------------------------------------------------------------------------------------------

    def set_batch(
        self, state_ids: Iterable[int], batch: int | None = None, max_tokens: int | None = None, slot: int = 0
    ) -> None:
        """Set the rows of a slot's decode batch.

        Parameters
        ----------
        state_ids : iterable of int
            The state of each row, -1 for a padding row; no state twice.
        batch : int, optional
            B: rows that the batch is padded to with -1. Default: max_batch.
        max_tokens : int, optional
            Token budget T of a packed batch, tokens per step … B * tokens per step; rows that do not fit whole wait. Default: all.
        slot : int
            Metadata slot.

        Raises
        ------
        ValueError, IndexError
            Too many rows, a duplicate, an id or the budget out of range; nothing is staged.
        """
        state = self._slot(slot)
        rows = self.max_batch if batch is None else whole_number("batch", batch, 0, self.max_batch)
        step = self.geometry.tokens_per_step
        tokens = rows * step
        if max_tokens is not None:
            if self.token_layout == "strided":
                raise ValueError(f"max_tokens={max_tokens} given, but token_layout='strided' has no token budget")
            tokens = whole_number("max_tokens", max_tokens, min(step, tokens), tokens)
        self._edits.stage_batch(slot, _padded(self._checked_ids(state_ids), rows))
        state.batch, state.tokens = rows, tokens
        state.batches_set += 1

    def set_prefill_batch(self, state_ids: Iterable[int], batch: int | None = None, slot: int = 0) -> None:
        """Set the rows of a slot's prefill batch, in which a row may have up to max_prefill_tokens tokens.

        Parameters
        ----------
        state_ids : iterable of int
            The state of each row, -1 for a padding row; no state twice. Decode rows may stand among them.
        batch : int, optional
            B: rows that the batch is padded to with -1. Default: as many as state_ids has.
        slot : int
            Metadata slot.

        Raises
        ------
        ValueError, IndexError
            As set_batch.
        """
        state, ids = self._slot(slot), self._checked_ids(state_ids)
        rows = whole_number("batch", len(ids) if batch is None else batch, 0, self.max_batch)
        padded = _padded(ids, rows)
        if state.prefill_buffers is None:
            state.prefill_buffers = self._new_prefill_buffers(slot, self.metadata_slots + slot)
        self._edits.stage_batch(self.metadata_slots + slot, padded)
        state.prefill_batch = rows

    @torch.compiler.disable
    def prepare(self, slot: int = 0) -> DecodeMetadata:
        """Flush staged edits, then turn the slot's batch into metadata in one launch; moves no sequence.

        May be captured when no edits are staged; a captured prepare keeps its B and T.

        Returns
        -------
        DecodeMetadata
            Views over the slot's fixed buffers, valid until its next prepare.

        Raises
        ------
        ValueError
            No batch was set for the slot.
        EditsDuringCaptureError
            Edits are staged while a CUDA graph is captured.
        KernelNotReadyError
            First launch on this device, while capturing: call `warmup` before.
        """
        state = self._slot(slot)
        if state.batch is None:
            raise ValueError(f"slot={slot} has no batch: call set_batch first")
        self.flush()
        metadata = state.buffers.view(state.batch, state.tokens)
        self.launch_prepare(metadata)
        if not self._order.capturing():
            metadata.origin.prepared_batch = state.batch
            self._count_step()
        return metadata

    @torch.compiler.disable
    def prepare_prefill(self, slot: int = 0, full_index: bool = False) -> PrefillMetadata:
        """Flush staged edits, then turn the slot's prefill batch into metadata; moves no sequence.

        One launch, two for a batch of more than 128 rows. A chunk longer than ring - window overwrites history that it was given:
        once its entries are stored, commit it before preparing the row again.

        Parameters
        ----------
        slot : int
            Metadata slot.
        full_index : bool
            Whether `kv_swa_full_index` is wanted. Its first use allocates T * W int32, so it must come before a capture.

        Returns
        -------
        PrefillMetadata
            Views over the slot's fixed buffers, valid until its next prepare_prefill.

        Raises
        ------
        ValueError, EditsDuringCaptureError, KernelNotReadyError
            As prepare.
        """
        state, buffers = self._slot(slot), self._prefill_buffers(slot)
        self.flush()
        metadata = buffers.view(state.prefill_batch, full_index)
        self.launch_prepare(metadata)
        if not self._order.capturing():
            metadata.origin.prepared_batch = state.prefill_batch
            self._count_step()
        return metadata

    @torch.compiler.disable
    def commit(
        self,
        metadata: StepMetadata,
        num_kept: torch.Tensor,
        finished: torch.Tensor | None = None,
        next_tokens: torch.Tensor | None = None,
    ) -> None:
        """Move the prepared sequences on by the tokens that were kept; the only thing that moves a sequence, one launch.

        Rows are taken from the metadata's tickets, so a result counts once, however often and in whatever order it arrives. May
        be captured.

        Parameters
        ----------
        metadata : DecodeMetadata or PrefillMetadata
            What `prepare` or `prepare_prefill` returned.
        num_kept : torch.Tensor
            int32 [B] on the device: tokens kept of each row's seqlen_q, the bonus token included; 0 for no result. Not read for
            padding and prefilling rows.
        finished : torch.Tensor, optional
            bool [B]: sequences that end here.
        next_tokens : torch.Tensor, optional
            int64 [B, tokens per step]: input ids of each row's next step, with carry_tokens.

        Raises
        ------
        ValueError
            Wrong dtype, shape, device or stride, or metadata of another service.
        MetadataReplacedError
            The slot was since prepared with another batch size.
        """
        if not isinstance(metadata, StepMetadata):
            raise ValueError(f"metadata is a {type(metadata).__name__}, not what prepare returned")
        if metadata.origin.table is not self.table:
            raise ValueError("metadata was prepared by another MetadataService")
        prepared = metadata.origin.prepared_batch
        if prepared is not None and prepared != metadata.batch and not self._order.capturing():
            raise MetadataReplacedError(
                f"metadata of slot {metadata.slot} has {metadata.batch} rows, but the slot was since prepared with {prepared}"
            )
        self._order.join()
        zos.ops.call(
            "commit",
            self.table.records,
            self.table.token_ids,
            metadata.tickets,
            _as_tensor("num_kept", num_kept),
            None if finished is None else _as_tensor("finished", finished),
            None if next_tokens is None else _as_tensor("next_tokens", next_tokens),
            self.operator_counters,
            self.geometry.tokens_per_step,
            self.max_prefill_tokens,
        )
        self._order.mark()

    def flush(self) -> None:
        """Apply what is staged now, in one launch on the current stream; nothing staged, nothing launched.

        Call it before replaying a graph of your own, and `launched` after.

        Raises
        ------
        EditsDuringCaptureError
            Edits are staged while a CUDA graph is captured.
        """
        if self._edits and self._order.capturing():
            raise EditsDuringCaptureError("edits are staged, and a capture would replay them: flush before capturing")
        self._order.join()
        if self._edits:
            self._edits.flush()
            self._order.mark()

    def launched(self, steps: int) -> None:
        """Say that a graph with `steps` captured steps was replayed on the current stream, so that ordering counts it.

        What such a graph prepared the host does not know: until a slot's next eager prepare, `commit` cannot tell metadata that
        another batch size has replaced.
        """
        self.steps_launched += whole_number("steps", steps, 0)
        for state in self._slots:  # the graph may have prepared any batch size
            for buffers in (state.buffers, state.prefill_buffers):
                if buffers is not None:
                    buffers.origin.prepared_batch = None
        self._order.mark()

    def _count_step(self) -> None:
        self.steps_launched += 1
        self._order.mark()

    # ---- capture --------------------------------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Compile, load and launch the kernels once on private padding, so that a capture finds them ready.

        The table, staged edits, live batches, metadata and counters stay untouched.
        """
        if self.device.type == "cuda":
            for kernel in zos.ops.KERNELS:
                kernel.load(self.device.index)
        metadata = self.private_metadata(1, self.geometry.tokens_per_step)
        self.launch_prepare(metadata)
        self.launch_prepare(self._new_prefill_buffers(-1, -1).view(1, full_index=True))
        self.commit(metadata, torch.zeros(1, dtype=torch.int32, device=self.device))
        edits = StagedEdits(self.table, self._batches, self.geometry.tokens_per_step, self.max_prefill_tokens)
        edits.stage_batch(2 * self.metadata_slots, np.full(1, -1, np.int32))  # the padding batch: what it holds already
        edits.flush()
        self._order.mark()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before the padding's buffers are freed

    def private_metadata(self, batch: int, tokens: int) -> DecodeMetadata:
        """All-padding metadata on buffers of its own, for warm-ups that must not touch a slot's."""
        return self._new_buffers(-1, batch).view(batch, tokens)

    def batches_set(self, slot: int) -> int:
        """How often a batch was set for a slot."""
        return self._slot(slot).batches_set

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a service owns device memory, and operators are bound to its addresses."""
        raise TypeError("a MetadataService owns device memory and cannot be copied or pickled")

    def slot_metadata(self, slot: int, batch: int, tokens: int) -> DecodeMetadata:
        """Metadata of a slot as a prepare of that shape returns it, without preparing."""
        return self._slot(slot).buffers.view(batch, tokens)

    def slot_prefill_metadata(self, slot: int, batch: int, full_index: bool) -> PrefillMetadata:
        """Metadata of a slot as a prepare_prefill of that shape returns it, without preparing; after its first prefill batch."""
        return self._prefill_buffers(slot).view(batch, full_index)

    def launch_prepare(self, metadata: StepMetadata) -> None:
        """Launch a prepare into `metadata`, flushing and counting nothing: what a captured step consists of."""
        self._order.join()
        metadata.launch_prepare()

    # ---- looking at it ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait for the device and raise DeviceStateError, naming every state in error with field, value and rule."""
        self._order.join()
        faults = self.table.faults()
        if faults:
            raise DeviceStateError(faults)

    def counters(self) -> dict[str, int]:
        """Results dropped as stale or duplicate, rows deferred, errors recorded: as of now, read without a CUDA call."""
        return dict(zip(COUNTERS, self._counters_host.tolist(), strict=True))

    # ---- arguments --------------------------------------------------------------------------------------------------------------

    def _new_buffers(self, slot: int, max_batch: int) -> DecodeBuffers:
        state_ids, packed = self._batches[slot, :max_batch], self.token_layout == "packed"
        return DecodeBuffers(
            slot, state_ids, self.table, self.operator_counters, self.geometry, self.compression, packed
        )

    def _new_prefill_buffers(self, slot: int, batch_row: int) -> PrefillBuffers:
        state_ids, most = self._batches[batch_row], self.max_prefill_tokens
        return PrefillBuffers(
            slot, state_ids, self.table, self.operator_counters, self.geometry, self.compression, most
        )

    def _prefill_buffers(self, slot: int) -> PrefillBuffers:
        buffers = self._slot(slot).prefill_buffers
        if buffers is None:
            raise ValueError(f"slot={slot} has no prefill batch: call set_prefill_batch first")
        return buffers

    def _slot(self, slot: int) -> _Slot:
        if not 0 <= whole_number("slot", slot, -1) < self.metadata_slots:
            raise IndexError(f"slot={slot} is outside 0 … {self.metadata_slots - 1}")
        return self._slots[slot]


def _padded(ids: list[int], rows: int) -> np.ndarray:
    """Ids padded with -1 to int32 [rows]."""
    if len(ids) > rows:
        raise ValueError(f"state_ids has {len(ids)} rows, more than batch={rows}")
    return np.array(ids + [-1] * (rows - len(ids)), np.int32)


def _as_tensor(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or torch's view of another library's array (DLPack)."""
    if isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        raise ValueError(f"{name} is a {type(value).__name__}, not a tensor on the device")
    try:
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} cannot be taken as a tensor: {error}") from error
