"""BatchEdits: the calls that say which sequences a slot's steps serve, and what the host knows of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from zos.arguments import INT32_LARGEST, INT64_LARGEST, whole_number
from zos.bounds import SequenceBounds
from zos.buffers import DecodeBuffers, PrefillBuffers
from zos.edits import ANY_VERSION, StagedEdits
from zos.forks import SequenceForks
from zos.geometry import CompressionRing, RingGeometry
from zos.mailbox import Mailbox, StepRecord
from zos.table import SequenceTable

DEFAULT_RECORDS = 64
RECORDS_UNLEARNED = 64  # records that were read and are kept before what they say is taken in


@dataclass
class MetadataSlot:
    """One metadata slot: its buffers, the shapes of the batches last set, its mailbox and its ready queue."""

    buffers: DecodeBuffers
    batch: int | None = None  # B
    tokens: int = 0  # T
    prefill_buffers: PrefillBuffers | None = None  # made with the first prefill batch
    prefill_batch: int = 0  # B
    batches_set: int = 0  # how often a batch was set: tells a loop whether the batch is still its own
    mailbox: Mailbox | None = None
    has_queue: bool = False
    # What the host knows of the decode batch on the device
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [B]: as last set, or as last read
    in_force: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # int32 [B]: as the last record leaves it
    refused: int = 0  # set_batch edits that the last record says were refused
    changes: int = (
        0  # refills that are known of, and every set_batch launched, also a refused one: what the next one expects
    )
    # For each set_batch that no record tells of: steps launched before it, and its ids
    sets_launched: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (state, which of its lives) in the ready queue
    ready_taken: int = 0  # entries of the queue that are known to be taken

    def may_move(self) -> np.ndarray:
        """States that the next decode step may move: in the batch, or in the queue that refills it."""
        states = np.concatenate([self.rows, np.array([state_id for state_id, _ in self.waiting], np.int32)])
        return states[states >= 0]


class BatchEdits(SequenceForks):
    """What a service lets the host say about batches.

    Parameters
    ----------
    table, edits, geometry, max_prefill_tokens, compression
        As SequenceEdits.
    max_batch : int
        Most rows of a batch.
    token_layout : str
        Where a row's tokens stand.
    metadata_slots : int
        Batches that can be in flight at once.
    snapshot_every : int
        As SequenceEdits.
    """

    def __init__(
        self,
        table: SequenceTable,
        edits: StagedEdits,
        geometry: RingGeometry,
        max_prefill_tokens: int,
        compression: tuple[CompressionRing, ...],
        max_batch: int,
        token_layout: str,
        metadata_slots: int,
        snapshot_every: int,
    ) -> None:
        bounds = SequenceBounds(table.capacity, metadata_slots)
        super().__init__(table, edits, geometry, max_prefill_tokens, compression, bounds, snapshot_every)
        self.max_batch = max_batch
        self.token_layout = token_layout
        self._unlearned: list[tuple[int, StepRecord]] = []  # records read: (slot, record)
        self._slots = [MetadataSlot(self._new_buffers(slot, max_batch)) for slot in range(metadata_slots)]

    def _new_buffers(self, slot: int, max_batch: int) -> DecodeBuffers:
        """Make the buffers of a slot's decode steps."""
        raise NotImplementedError

    def _new_prefill_buffers(self, slot: int) -> PrefillBuffers:
        """Make the buffers of a slot's prefill steps."""
        raise NotImplementedError

    def set_batch(
        self, state_ids: Iterable[int], batch: int | None = None, max_tokens: int | None = None, slot: int = 0
    ) -> None:
        """Set the rows of a slot's decode batch.

        While the slot has a ready queue this is a compare-and-set: the device refuses the edit, whole, if its batch has since
        changed from the one that the host has read (`StepRecord.batches_refused` counts that); read on and set it again.

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
        self._learn()
        state = self.slot(slot)
        rows = self.max_batch if batch is None else whole_number("batch", batch, 0, self.max_batch)
        step = self.geometry.tokens_per_step
        tokens = rows * step
        if max_tokens is not None:
            if self.token_layout == "strided":
                raise ValueError(f"max_tokens={max_tokens} given, but token_layout='strided' has no token budget")
            tokens = whole_number("max_tokens", max_tokens, min(step, tokens), tokens)
        ids = _padded(self._checked_ids(state_ids), rows)
        self._edits.stage_batch(slot, ids, state.changes if state.has_queue else ANY_VERSION)
        state.batch, state.tokens = rows, tokens
        state.batches_set += 1
        state.rows = ids

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
        state, ids = self.slot(slot), self._checked_ids(state_ids)
        rows = whole_number("batch", len(ids) if batch is None else batch, 0, self.max_batch)
        padded = _padded(ids, rows)
        if state.prefill_buffers is None:
            state.prefill_buffers = self._new_prefill_buffers(slot)
        self._edits.stage_batch(len(self._slots) + slot, padded)
        state.prefill_batch = rows

    def set_ready(self, state_ids: Iterable[int], slot: int = 0) -> None:
        """Append sequences to a slot's ready queue; from now on `commit` refills the slot's decode batch from it.

        Every batch row whose sequence has finished or is in error gets, in row order, the next entry that is still LIVE and of the
        generation it has now, with no host in between. An entry whose sequence stands in the batch already is passed over.

        Parameters
        ----------
        state_ids : iterable of int
            States in use, first to run first; an empty call attaches the queue.
        slot : int
            Metadata slot. A graph captured before its queue was attached does not refill.

        Raises
        ------
        ValueError, IndexError
            A state twice, out of range or not in use, or a queue whose entries nobody has taken for too long; nothing is staged.
        """
        self._learn()
        state = self.slot(slot)
        ids = [self._state_in_use(state_id) for state_id in self._checked_ids(state_ids)]
        room = self.ready_room(slot)
        if len(ids) > room:
            raise ValueError(
                f"state_ids has {len(ids)} ids, but the ready queue of slot {slot} has room for {room}: "
                "attach a mailbox and read it, so that entries already taken are known"
            )
        state.has_queue = True
        for state_id in ids:
            self._edits.stage_ready(slot, state_id)
            state.waiting.append((state_id, self._lives[state_id]))
        if ids:
            self._bounds.set_states(slot, False, np.array(ids, np.int32), also=True)

    def attach_mailbox(self, slot: int = 0, records: int = DEFAULT_RECORDS, kept_tokens: bool = False) -> Mailbox:
        """Let every step of a slot leave a record that the host can read without a CUDA call; see `poll`.

        A graph captured before does not leave records. In a graph of your own, launch `publish` between two commits, best on a
        branch beside the step's body; eager commits publish at once.

        Parameters
        ----------
        slot : int
            Metadata slot; a second call replaces its mailbox only if no step has run since the first.
        records : int
            Records that the mailbox holds, 2 or more.
        kept_tokens : bool
            Whether records have room for the ids that `commit(kept_tokens=…)` is given.

        Returns
        -------
        Mailbox
            The slot's; `poll`, `wait` and `drain` read it.
        """
        state, step = self.slot(slot), self.geometry.tokens_per_step
        first = self._bounds.launched_steps(slot)
        if state.mailbox is not None and state.mailbox.first != first:
            raise ValueError(f"slot {slot} has a mailbox, and steps have left records in it")
        state.mailbox = Mailbox(records, self.max_batch, step, kept_tokens, self.table.records.device, first)
        state.in_force = state.rows
        self._bounds.attach(slot, records)
        return state.mailbox

    def poll(self, slot: int = 0) -> list[StepRecord]:
        """Return the records that have come since the last call, in order; no CUDA call.

        Raises
        ------
        ValueError
            The slot has no mailbox.
        MailboxOverrunError
            Records were overwritten before they were read; those that were not come with the next call.
        """
        return self._to_learn(slot, self._attached(slot).poll())

    def _to_learn(self, slot: int, records: list[StepRecord]) -> list[StepRecord]:
        """Keep records to learn from when it matters, though never many."""
        self._unlearned += [(slot, record) for record in records]
        if len(self._unlearned) > RECORDS_UNLEARNED:
            self._learn()
        return records

    def bounds(self, state_ids: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Say how far sequences are, without asking the device: what a block allocator or a planner needs.

        Parameters
        ----------
        state_ids : iterable of int
            States.

        Returns
        -------
        lower, upper : numpy.ndarray
            int64 each: q_start is between them, inclusive, once everything staged and launched has run. They are equal when every
            record is read.

        Raises
        ------
        IndexError
            An id is out of range.
        """
        self._learn()
        return self._bounds.bounds(np.array([self._state_id(state_id) for state_id in state_ids], np.int64))

    def known_batch(self, slot: int = 0) -> tuple[list[int], list[int]]:
        """(states by batch row, states in the ready queue) of a slot's decode batch, as far as the host knows."""
        self._learn()
        state = self.slot(slot)
        queued = [state_id for state_id, life in state.waiting if self._lives[state_id] == life]
        return state.rows.tolist(), queued

    def ready_room(self, slot: int = 0) -> int:
        """Entries that a slot's ready queue has room for; those of sequences that left it count until they are taken."""
        return int(self._edits.ready.shape[1]) - len(self.slot(slot).waiting)

    def lives_on(self, state_id: int, step: int, slot: int = 0) -> bool:
        """Whether a state was admitted or reset after a step of a slot, so that an error in that step is past."""
        self.slot(slot)
        step = whole_number("step", step, -INT64_LARGEST, INT64_LARGEST)
        self._learn()
        return self._bounds.lives_on(slot, self._state_id(state_id), step)

    def slot_steps_launched(self, slot: int = 0) -> int:
        """Steps of a slot launched so far: the number that the last one's record will have."""
        self.slot(slot)
        return self._bounds.launched_steps(slot)

    def _learn(self) -> None:
        """Learn from the records that were read, before what they say is used."""
        unlearned, self._unlearned = self._unlearned, []
        for slot, record in unlearned:
            self._learn_from(slot, record)

    def _learn_from(self, slot: int, record: StepRecord) -> None:
        state = self._slots[slot]
        self._bounds.read(slot, record)
        ids, sets = state.in_force, 0
        while state.sets_launched and state.sets_launched[0][0] < record.step:
            _, ids = state.sets_launched.popleft()
            sets += 1
        if sets > record.batches_refused - state.refused:  # of several the last: it was staged knowing most
            state.in_force = ids
        state.refused = record.batches_refused
        state.changes = (record.batch_version + record.batches_refused + len(state.sets_launched)) & INT32_LARGEST
        for _ in range((record.ready_taken - state.ready_taken) % 2**32):
            state.waiting.popleft()
        state.ready_taken = record.ready_taken
        if not record.prefill:  # a late result's metadata may have fewer rows than the batch has by now
            rows = record.next_state_ids
            state.in_force = np.concatenate([rows, state.in_force[len(rows) :]])
        if state.has_queue and not state.sets_launched and not self._edits.sets_batch(slot):
            state.rows = state.in_force
            self._bounds.set_states(slot, False, state.may_move())

    def _batch_launched(self, batch_row: int, ids: np.ndarray) -> None:
        """A set_batch is on its way to the device."""
        slot, prefill = batch_row % len(self._slots), batch_row >= len(self._slots)
        state = self._slots[slot]
        self._bounds.set_states(slot, prefill, ids[ids >= 0], also=state.has_queue and not prefill)  # it may be refused
        if prefill:
            return
        state.changes = (state.changes + 1) & INT32_LARGEST
        if state.mailbox is not None:
            launched = self._bounds.launched_steps(slot)
            state.sets_launched.append((launched, ids))
            if (
                launched - state.sets_launched[0][0] > state.mailbox.records
            ):  # nobody reads, and a later record tells of it
                state.sets_launched.popleft()

    def _attached(self, slot: int) -> Mailbox:
        mailbox = self.slot(slot).mailbox
        if mailbox is None:
            raise ValueError(f"slot={slot} has no mailbox: call attach_mailbox first")
        return mailbox

    def slot(self, slot: int) -> MetadataSlot:
        """Return what the host knows of a metadata slot; raises IndexError for one that is none."""
        if not 0 <= whole_number("slot", slot, -1) < len(self._slots):
            raise IndexError(f"slot={slot} is outside 0 … {len(self._slots) - 1}")
        return self._slots[slot]


def _padded(ids: list[int], rows: int) -> np.ndarray:
    """Ids padded with -1 to int32 [rows]."""
    if len(ids) > rows:
        raise ValueError(f"state_ids has {len(ids)} rows, more than batch={rows}")
    return np.array(ids + [-1] * (rows - len(ids)), np.int32)
