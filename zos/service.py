"""MetadataService: admits sequences, prepares a step's metadata, commits its result, and knows when each edit takes effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

import zos.ops
from zos.arguments import flag, whole_number
from zos.block_view import BlockView, launch_block_view
from zos.buffers import DecodeBuffers, PrefillBuffers, compression_rings
from zos.devices import resolve_device
from zos.edits import StagedEdits
from zos.errors import DeviceStateError, MetadataReplacedError
from zos.geometry import CompressionRing, RingGeometry
from zos.launches import StepLaunches
from zos.mailbox import Mailbox
from zos.mapped import shared_zeros
from zos.metadata import DecodeMetadata, PrefillMetadata, StepMetadata
from zos.snapshots import SnapshotPool
from zos.streams import StreamOrder
from zos.table import SequenceTable

TOKEN_LAYOUTS = ("packed", "strided")
COUNTERS = ("stale", "duplicate", "deferred", "errors")


class MetadataService(StepLaunches):
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
    snapshot_every : int
        Tokens between the boundaries of snapshots, 0 for none: chunks end at its multiples (a seqlen_q that the caller gives stays
        as it is), and commit marks the rows that went through one (`StepMetadata.marks`).

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
        snapshot_every: int = 0,
    ) -> None:
        geometry = geometry or RingGeometry()
        step = geometry.tokens_per_step
        self.capacity = whole_number("capacity", capacity, 1)
        max_batch = whole_number("max_batch", max_batch, 1)  # a NumPy number's products would wrap
        self.metadata_slots = whole_number("metadata_slots", metadata_slots, 1)
        max_prefill_tokens = whole_number("max_prefill_tokens", max_prefill_tokens, 1)
        snapshot_every = whole_number("snapshot_every", snapshot_every, 0)
        whole_number("capacity * ring", self.capacity * geometry.ring, 1)
        whole_number("max_batch * (window + tokens_per_step)", max_batch * (geometry.window + step), 1)
        if token_layout not in TOKEN_LAYOUTS:
            raise ValueError(f"token_layout={token_layout!r} is none of {', '.join(TOKEN_LAYOUTS)}")
        compression = compression_rings(compression_ratios, step)
        self.device = resolve_device(device)
        self.steps_launched = 0  # prepared here, or reported through `launched`
        self._replays = 0  # graphs replayed
        # (address of the tickets, rows, whether the queue refills) -> the mailbox that commit was bound to, and the bound operator
        self._commits: dict[tuple[int, int, bool], tuple[Mailbox | None, Callable[..., None]]] = {}
        self._snapshots: SnapshotPool | None = None

        table = SequenceTable(self.capacity, step, flag("carry_tokens", carry_tokens), self.device)
        # int32 [2 * slots + 1, max_batch]: state ids by row, of each slot's decode batch, then of each slot's prefill batch; the
        # last is all padding, for warm-ups
        shape = (2 * self.metadata_slots + 1, max_batch)
        self._batches = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        edits = StagedEdits(table, self._batches, step, max_prefill_tokens, snapshot_every)
        self._counters_host, self.operator_counters = shared_zeros(len(COUNTERS), torch.int64, self.device)
        super().__init__(
            table, edits, geometry, max_prefill_tokens, compression, max_batch, token_layout, self.metadata_slots,
            snapshot_every,
        )  # fmt: skip
        self._order = StreamOrder(self.device)
        self._order.keep_until_launched(self, self._edits, self._counters_host)

    # ---- steps ----------------------------------------------------------------------------------------------------------------

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
        state = self.slot(slot)
        if state.batch is None:
            raise ValueError(f"slot={slot} has no batch: call set_batch first")
        self.flush()
        metadata = state.buffers.view(state.batch, state.tokens)
        self.launch_prepare(metadata)
        if not self._order.capturing():
            self._prepared(metadata)
            self._bounds.prepared(slot)
            self._count_step()
        return metadata

    @torch.compiler.disable
    def prepare_prefill(self, slot: int = 0, full_index: bool = False, tail: bool = False) -> PrefillMetadata:
        """Flush staged edits, then turn the slot's prefill batch into metadata; moves no sequence.

        One launch, two for a batch of more than 128 rows, and one more for the tail. A chunk longer than ring - window overwrites
        history that it was given: once its entries are stored, commit it before preparing the row again.

        Parameters
        ----------
        slot : int
            Metadata slot.
        full_index : bool
            Whether `kv_swa_full_index` is wanted. Its first use allocates T * W int32, so it must come before a capture.
        tail : bool
            Whether `tail` is wanted: the sub-batch of each prompt's last W tokens. Its first use allocates, too.

        Returns
        -------
        PrefillMetadata
            Views over the slot's fixed buffers, valid until its next prepare_prefill.

        Raises
        ------
        ValueError, EditsDuringCaptureError, KernelNotReadyError
            As prepare.
        """
        state, buffers = self.slot(slot), self._prefill_buffers(slot)
        wants_index, wants_tail = flag("full_index", full_index), flag("tail", tail)
        self.flush()
        metadata = buffers.view(state.prefill_batch, wants_index, wants_tail)
        self.launch_prepare(metadata)
        if not self._order.capturing():
            self._prepared(metadata)
            self._bounds.prepared(slot, prefill=True)
            self._count_step()
        return metadata

    @torch.compiler.disable
    def commit(
        self,
        metadata: StepMetadata,
        num_kept: torch.Tensor,
        finished: torch.Tensor | None = None,
        next_tokens: torch.Tensor | None = None,
        kept_tokens: torch.Tensor | None = None,
    ) -> None:
        """Move the prepared sequences on by the tokens that were kept; the only thing that moves a sequence, one launch.

        Rows are taken from the metadata's tickets, so a result counts once, however often and in whatever order it arrives. May
        be captured. With a mailbox the step leaves a record, with a ready queue the batch rows of finished sequences are refilled;
        outside a capture the record is published at once.

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
        kept_tokens : torch.Tensor, optional
            int64 [B, tokens per step]: ids of the tokens kept, for the record of a mailbox that has room for them.

        Raises
        ------
        ValueError
            Wrong dtype, shape, device or stride, or metadata of another service.
        MetadataReplacedError
            The slot was since prepared with another batch size.
        """
        self._check_prepared_here(metadata)
        capturing = self._order.capturing()
        slot = None if metadata.slot < 0 else self._slots[metadata.slot]
        mailbox = None if slot is None else slot.mailbox
        prefill = isinstance(metadata, PrefillMetadata)
        refills = slot is not None and slot.has_queue and not prefill
        if kept_tokens is not None and slot is not None and (mailbox is None or not mailbox.kept_tokens):
            raise ValueError(f"kept_tokens given, but the mailbox of slot {metadata.slot} has no room for them")
        self._order.join()
        self._commit_of(metadata, mailbox, refills)(
            _as_tensor("num_kept", num_kept),
            None if finished is None else _as_tensor("finished", finished),
            None if next_tokens is None else _as_tensor("next_tokens", next_tokens),
            None if kept_tokens is None else _as_tensor("kept_tokens", kept_tokens),
        )
        if self._snapshots is not None:
            self._snapshots.snapshot(metadata)
        if not capturing:
            if slot is not None:
                self._count_launched(metadata.slot, 1, prefill)
            if mailbox is not None:
                mailbox.publish()
        self._order.mark()

    def _commit_of(self, metadata: StepMetadata, mailbox: Mailbox | None, refills: bool) -> Callable[..., None]:
        """The operator bound to a slot's tickets and to what the step leaves: once for each batch size, mailbox and queue."""
        prefill, slot = isinstance(metadata, PrefillMetadata), metadata.slot
        key = (metadata.tickets.data_ptr(), metadata.batch, refills)
        bound_for, bound = self._commits.get(key, (None, None)) if slot >= 0 else (None, None)
        if bound is not None and bound_for is mailbox:
            return bound
        leaves_more = refills or mailbox is not None
        bound = zos.ops.bind_commit(
            records=self.table.records,
            token_ids=self.table.token_ids,
            tickets=metadata.tickets,
            counters=self.operator_counters,
            tokens_per_step=self.geometry.tokens_per_step,
            max_prefill_tokens=self.max_prefill_tokens,
            batch=self._batches[slot + self.metadata_slots * prefill] if leaves_more else None,
            batch_state=self._edits.batch_states[slot] if leaves_more else None,
            ready=self._edits.ready[slot] if refills else None,
            results=None if mailbox is None else mailbox.results,
            results_state=None if mailbox is None else mailbox.results_state,
            prefill=prefill,
            marks=metadata.marks,
            snapshot_every=self.snapshot_every,
            window=self.geometry.window,
            ring=self.geometry.ring,
        )
        if slot >= 0:
            self._commits[key] = mailbox, bound
        return bound

    def attach_snapshots(self, pool: SnapshotPool) -> None:
        """Let every commit from now on, in any slot, copy the states that it marks into a free slot of `pool`.

        A graph captured before takes no snapshots.

        Raises
        ------
        ValueError
            The pool was made for another service.
        """
        if not isinstance(pool, SnapshotPool) or pool.table is not self.table:
            raise ValueError("pool was made for another MetadataService")
        self._snapshots = pool

    @torch.compiler.disable
    def view_block(self, metadata: StepMetadata, num_kept: torch.Tensor | None = None) -> BlockView:
        """Where a block drafter's next Q tokens of every prepared row read and write; moves nothing, one launch.

        Each row's block begins at its ticket's q_start + num_kept, whatever its seqlen_q, and is not causal: its Q tokens see the W
        positions before it and the whole block. Padding where the row has no tokens, its sequence has ended or been replaced,
        num_kept is outside 0 … seqlen_q, the block would pass position 2^31 - 1, or swa_valid_start lies past its beginning.
        Meant for the time between a step and its commit; after that the ticket still decides where the block begins, and the table
        what is valid. May be captured.

        Parameters
        ----------
        metadata : DecodeMetadata or PrefillMetadata
            What `prepare` or `prepare_prefill` returned.
        num_kept : torch.Tensor, optional
            int32 [B] on the device, as for `commit`; not read for prefilling rows, which keep all their tokens. Default: 0 each.

        Returns
        -------
        BlockView
            Views over fixed buffers, valid until the slot's next call of the kind.

        Raises
        ------
        ValueError
            The ring has fewer than W + Q slots; or as commit.
        MetadataReplacedError
            As commit.

        Examples
        --------
        >>> svc = MetadataService(capacity=16, max_batch=4, device="cpu")
        >>> svc.admit(state_id=3, q_start=1000)
        >>> svc.set_batch([3], batch=1)
        >>> svc.view_block(svc.prepare(), torch.tensor([2], dtype=torch.int32)).positions.tolist()
        [1002, 1003, 1004, 1005, 1006, 1007]
        """
        self._check_prepared_here(metadata)
        self._order.join()
        kept = None if num_kept is None else _as_tensor("num_kept", num_kept)
        view = launch_block_view(metadata.block_view, self.table.records, metadata.tickets, kept, self.geometry)
        self._order.mark()
        return view

    def _check_prepared_here(self, metadata: StepMetadata) -> None:
        """Raise unless these are this service's metadata, and not known to be replaced."""
        if not isinstance(metadata, StepMetadata):
            raise ValueError(f"metadata is a {type(metadata).__name__}, not what prepare returned")
        if metadata.origin.table is not self.table:
            raise ValueError("metadata was prepared by another MetadataService")
        prepared = metadata.origin.prepared_batch
        known = prepared is not None and metadata.origin.prepared_after == self._replays
        if known and prepared != metadata.batch and not self._order.capturing():
            raise MetadataReplacedError(
                f"metadata of slot {metadata.slot} has {metadata.batch} rows, but the slot was since prepared with {prepared}"
            )

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
        self.launch_prepare(self._new_prefill_buffers(-1).view(1, full_index=True, tail=True))
        if metadata.block_view is not None:
            self.view_block(metadata)
        self.commit(metadata, torch.zeros(1, dtype=torch.int32, device=self.device))
        self._edits.launch_nothing()
        self._order.mark()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before the padding's buffers are freed

    def private_metadata(self, batch: int, tokens: int) -> DecodeMetadata:
        """All-padding metadata on buffers of its own, for warm-ups that must not touch a slot's."""
        return self._new_buffers(-1, batch).view(batch, tokens)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a service owns device memory, and operators are bound to its addresses."""
        raise TypeError("a MetadataService owns device memory and cannot be copied or pickled")

    def slot_metadata(self, slot: int, batch: int, tokens: int) -> DecodeMetadata:
        """Metadata of a slot as a prepare of that shape returns it, without preparing."""
        return self.slot(slot).buffers.view(batch, tokens)

    def slot_prefill_metadata(self, slot: int, batch: int, full_index: bool, tail: bool = False) -> PrefillMetadata:
        """Metadata of a slot as a prepare_prefill of that shape returns it, without preparing; after its first prefill batch."""
        return self._prefill_buffers(slot).view(batch, full_index, tail)

    def launch_prepare(self, metadata: StepMetadata) -> None:
        """Launch a prepare into `metadata`, flushing and counting nothing: what a captured step consists of."""
        self._order.join()
        metadata.launch_prepare()

    # ---- looking at it ---------------------------------------------------------------------------------------------------------

    @property
    def stream_order(self) -> StreamOrder:
        """Order of the service's launches, for one that must keep it: `join` before it, `mark` after it."""
        return self._order

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
            slot, state_ids, self.table, self.operator_counters, self.geometry, self.compression,
            self.snapshot_every > 0, packed,
        )  # fmt: skip

    def _new_prefill_buffers(self, slot: int) -> PrefillBuffers:
        row = self.metadata_slots + slot if slot >= 0 else -1
        return PrefillBuffers(
            slot, self._batches[row], self.table, self.operator_counters, self.geometry, self.compression,
            self.snapshot_every > 0, self.max_prefill_tokens,
        )  # fmt: skip

    def _prefill_buffers(self, slot: int) -> PrefillBuffers:
        buffers = self.slot(slot).prefill_buffers
        if buffers is None:
            raise ValueError(f"slot={slot} has no prefill batch: call set_prefill_batch first")
        return buffers


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
