"""Staged edits: host calls pack small records into mapped memory, and one launch applies all that a flush packed."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

import zos.ops
from zos.mapped import shared_zeros
from zos.step_checks import BATCH_STATE_WORDS, BUFFER_HEADER_WORDS, EDIT_WORDS
from zos.table import SequenceTable

EDITS_PER_BUFFER = 256
NUM_BUFFERS = 64  # flushes that may be under way before the next one waits
POLL_S = 50e-6  # between looks at how many flushes are applied, in a flush that waits
ERROR_CHECK_S = 1.0  # a flush that waits asks the device for errors so often
WORD_BYTES = 4
ANY_VERSION = -1
NO_TOKENS = -1  # in place of where an ADMIT's token ids are
TOKENS_AT = 10 * WORD_BYTES  # byte of an ADMIT's row that says where they are

_ROW = struct.Struct(f"{EDIT_WORDS}i")
_HEADER = struct.Struct(f"{BUFFER_HEADER_WORDS}i")
_WORD = struct.Struct("i")
_NOTHING = (0,) * EDIT_WORDS
_REST_OF_HEADER = (0,) * (BUFFER_HEADER_WORDS - 2)

Batches = dict[int, tuple[np.ndarray, int]]  # batch row -> (ids, version that they replace)


_state_id = attrgetter("state_id")


class Edit:
    """What a record edit does; the numbers are those of device_kernels/table_edits.cu, and zeros are no edit.

    Plain numbers: packing a member of an enumeration takes three times as long.
    """

    ADMIT = 1
    RELEASE = 2
    RESET = 3
    PAUSE = 4
    RESUME = 5
    SET_SEQLEN_Q = 6
    SET_VALID_START = 7
    APPEND_READY = 8
    FORK = 9


LIFE_EDITS = (Edit.ADMIT, Edit.RELEASE, Edit.RESET, Edit.FORK)  # those that begin or end a life of a state


class BatchEdit:
    """What a batch edit does."""

    SET_BATCH = 0
    SET_APPENDED = 1


class StagedEdit(NamedTuple):
    """One record edit."""

    state_id: int
    kind: int
    row: bytes  # EDIT_WORDS int32: (state_id, kind, values…)
    tokens: list[int] | None  # ids of the next step that an ADMIT brings
    appends_to: int  # batch row whose ready queue gets an entry, -1 for none
    source: int  # state that a FORK copies, -1 for none


class StagedEdits:
    """Edits waiting for the next flush, and the buffers in mapped pinned memory that carry them.

    Flush n goes into buffer n % NUM_BUFFERS, and the launch that applies it takes the buffer after that of the launch before it. So
    a launch captured in a graph applies what was packed for it and nothing that is packed later. A buffer is written again only
    after the kernel has said, in mapped memory, that the launch which read it is over: no CUDA call, no wait in between.

    Parameters
    ----------
    table : SequenceTable
        Whose records the edits change.
    batches : torch.Tensor
        int32 [batch rows, max_batch]: the state ids of every batch.
    tokens_per_step : int
        Tokens of a decode step, the width of `table.token_ids`.
    max_prefill_tokens : int
        Chunk length that a chunk_q of 0 stands for.
    snapshot_every : int
        No chunk passes a multiple of it; 0: they may.

    Attributes
    ----------
    batch_states : torch.Tensor
        int64 [batch rows, 8]: version, refused edits, ready entries taken, appended, and workspace of commit.
    ready : torch.Tensor
        int32 [batch rows, K, 2]: ready queues of (state_id, generation); entry n stands at n % K.
    """

    def __init__(
        self,
        table: SequenceTable,
        batches: torch.Tensor,
        tokens_per_step: int,
        max_prefill_tokens: int,
        snapshot_every: int = 0,
    ) -> None:
        self._device = table.records.device
        self._tokens_per_step = tokens_per_step
        self._carries_tokens = table.token_ids is not None
        self._edits: list[StagedEdit] = []  # in call order
        self._staged_batches: Batches = {}  # batch row -> (ids, version); the last staged wins
        self._forks = 0  # of the edits
        self._appended: dict[int, int] = {}  # batch row -> entries appended to its ready queue, staged ones included
        rows, width = batches.shape
        self.batch_states = torch.zeros(rows, BATCH_STATE_WORDS, dtype=torch.int64, device=self._device)
        self.ready = torch.zeros(rows, 2 * table.capacity, 2, dtype=torch.int32, device=self._device)
        words = BUFFER_HEADER_WORDS + EDITS_PER_BUFFER * (EDIT_WORDS + 2 * tokens_per_step)
        words += rows * (2 * EDIT_WORDS + width)
        words += -words % 4  # every buffer begins at a multiple of 16 bytes
        host, buffers = shared_zeros(NUM_BUFFERS * words, torch.int32, self._device)
        self._buffers = [memoryview(buffer.numpy()).cast("B") for buffer in host.view(NUM_BUFFERS, words)]
        self._packed = 0  # flushes packed so far
        self._applied, applied_on_host = shared_zeros(1, torch.int64, self._device)
        self._applied_count = self._applied.numpy()
        # The bound launch below knows addresses alone: what lies there is kept here.
        self._memory = host, torch.zeros(1, dtype=torch.int64, device=self._device)
        self.launch: Callable[[], None] = zos.ops.bind_apply_table_edits(
            records=table.records,
            token_ids=table.token_ids,
            batches=batches,
            edits=buffers.view(NUM_BUFFERS, words),
            batch_states=self.batch_states,
            ready=self.ready,
            applied=self._memory[1],
            applied_on_host=applied_on_host,
            tokens_per_step=tokens_per_step,
            max_prefill_tokens=max_prefill_tokens,
            snapshot_every=snapshot_every,
        )

    def __bool__(self) -> bool:
        return bool(self._edits or self._staged_batches)

    @property
    def fits(self) -> bool:
        """Whether one buffer holds everything staged, and a launch at the head of a graph may apply it."""
        return len(self._edits) <= EDITS_PER_BUFFER and not self._forks

    def sets_batch(self, batch_row: int) -> bool:
        """Whether a batch is staged for a batch row."""
        return batch_row in self._staged_batches

    def stage(self, state_id: int, kind: int, *values: int, tokens: list[int] | None = None) -> None:
        """Stage one record edit; edits of one flush apply in call order."""
        words = (state_id, kind, *values)
        row = _ROW.pack(*words, *_NOTHING[len(words) :])
        appends_to = values[0] if kind == Edit.APPEND_READY else -1
        source = values[0] if kind == Edit.FORK else -1
        self._edits.append(StagedEdit(state_id, kind, row, tokens, appends_to, source))
        self._forks += kind == Edit.FORK

    def stage_batch(self, batch_row: int, state_ids: np.ndarray, version: int = ANY_VERSION) -> None:
        """Stage the ids of a batch (int32 [B]); of several for one batch row the last one counts.

        With a `version` the device refuses them unless the batch has it: unless it is the one that the host knows.
        """
        self._staged_batches[batch_row] = state_ids, version

    def stage_ready(self, batch_row: int, state_id: int) -> None:
        """Stage an entry of a batch's ready queue: the state with the generation that it has then."""
        number = self._appended.get(batch_row, 0)
        self.stage(state_id, Edit.APPEND_READY, batch_row, number % self.ready.shape[1])
        self._appended[batch_row] = number + 1

    def unpack(self, packed: tuple[list[StagedEdit], Batches]) -> None:
        """Stage again what `pack` returned, since the launch for it did not happen."""
        edits, batches = packed
        self._packed -= 1
        self._edits[:0] = edits
        self._forks += len(edits) if is_forks(edits) else 0
        self._staged_batches = {**batches, **self._staged_batches}

    def pack(self) -> tuple[list[StagedEdit], Batches]:
        """Write the next buffer for exactly one launch after this, and return what it holds; nothing staged, nothing in it."""
        self._wait_for_buffer()
        count = self._next_launch() if self._forks else EDITS_PER_BUFFER
        edits, self._edits = self._edits[:count], self._edits[count:]
        if self._forks and is_forks(edits):
            self._forks -= len(edits)
        batches: Batches = {}
        if not self._edits:
            batches, self._staged_batches = self._staged_batches, {}
        # The kernel gives a state's edits to one thread, so they stand together; the sort keeps their order.
        ordered = sorted(edits, key=_state_id) if len(edits) > 1 else edits
        rows = [edit.row for edit in ordered]
        payloads: list[bytes] = []
        words = 0  # of the payloads so far
        batch_rows = self._pack_appended(edits) if self._appended else []
        batch_rows += [b""] * len(batches)
        first = BUFFER_HEADER_WORDS + (len(rows) + len(batch_rows)) * EDIT_WORDS  # word of the first payload
        # Token ids come first: so they stay at multiples of 8 bytes.
        for number, edit in enumerate(ordered) if self._carries_tokens else ():
            if edit.tokens:
                padded = edit.tokens + [0] * (self._tokens_per_step - len(edit.tokens))
                rows[number] = edit.row[:TOKENS_AT] + _WORD.pack(first + words) + edit.row[TOKENS_AT + WORD_BYTES :]
                payloads.append(struct.pack(f"{len(padded)}q", *padded))
                words += 2 * self._tokens_per_step
        for number, (batch_row, (state_ids, version)) in enumerate(
            batches.items(), start=len(batch_rows) - len(batches)
        ):
            row = (batch_row, BatchEdit.SET_BATCH, first + words, len(state_ids), version)
            batch_rows[number] = _ROW.pack(*row, *_NOTHING[len(row) :])
            payloads.append(state_ids.tobytes())
            words += len(state_ids)
        header = _HEADER.pack(len(rows), len(batch_rows), *_REST_OF_HEADER)
        written = b"".join((header, *rows, *batch_rows, *payloads))
        self._buffers[self._packed % NUM_BUFFERS][: len(written)] = written
        self._packed += 1
        return edits, batches

    def _next_launch(self) -> int:
        """Return how many of the edits, of which some are forks, the next launch applies.

        A fork reads the record of one state and writes another's, and the threads of a launch do not wait for one another: so forks
        have launches of their own, in which none reads what another writes.
        """
        forks = self._edits[0].kind == Edit.FORK
        written: set[int] = set()
        for number, edit in enumerate(self._edits[:EDITS_PER_BUFFER]):
            if (edit.kind == Edit.FORK) != forks or edit.source in written:
                return number
            if forks:
                written.add(edit.state_id)
        return EDITS_PER_BUFFER

    def launch_nothing(self) -> None:
        """Launch the kernel on an empty buffer; what is staged stays staged."""
        self._wait_for_buffer()
        _HEADER.pack_into(self._buffers[self._packed % NUM_BUFFERS], 0, *_NOTHING)
        self.launch()
        self._packed += 1  # only now: a launch that fails takes no buffer

    def _pack_appended(self, edits: list[StagedEdit]) -> list[bytes]:
        """Pack rows that say how many entries each ready queue has once `edits` are applied, for those that they append to."""
        rows = []
        for batch_row in {edit.appends_to for edit in edits} - {-1}:
            later = sum(edit.appends_to == batch_row for edit in self._edits)
            low, high = struct.unpack("2i", struct.pack("q", self._appended[batch_row] - later))
            rows.append(_ROW.pack(batch_row, BatchEdit.SET_APPENDED, low, high, *_NOTHING[4:]))
        return rows

    def _wait_for_buffer(self) -> None:
        """Wait until the launch that last read the next buffer is over: it is never written while a launch may still read it."""
        if self._packed - self._applied_count[0] < NUM_BUFFERS:
            return
        begin = time.perf_counter()
        while self._packed - self._applied_count[0] >= NUM_BUFFERS:
            time.sleep(POLL_S)
            if time.perf_counter() - begin > ERROR_CHECK_S:
                torch.cuda.current_stream(self._device).query()  # raises if the device has failed
                begin = time.perf_counter()


def is_forks(edits: list[StagedEdit]) -> bool:
    """Whether edits that one launch applies are forks: all of them are, or none."""
    return bool(edits) and edits[0].source >= 0
