"""Staged edits: host calls pack small records, a flush applies all of them in one launch on the current stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

import zos.ops
from zos.checks import EDIT_WORDS
from zos.mapped import shared_zeros
from zos.table import SequenceTable

EDITS_PER_BUFFER = 1024
NUM_BUFFERS = 4  # flushes that may be under way before the next one waits
INT64_WORDS = 2


class Edit(IntEnum):
    """What a record edit does; the numbers are those of device_kernels/table_edits.cu, and zeros are no edit."""

    ADMIT = 1
    RELEASE = 2
    RESET = 3
    PAUSE = 4
    RESUME = 5
    SET_SEQLEN_Q = 6
    SET_VALID_START = 7


@dataclass
class _Buffer:
    """One pinned buffer; it may be written again once `applied` has passed."""

    words: np.ndarray  # int32, the host's view
    operand: torch.Tensor  # the same bytes as the operator takes them
    applied: torch.cuda.Event | None = None


class _StagedEdit(NamedTuple):
    words: tuple[int, ...]  # (state_id, kind, values…)
    tokens: list[int] | None  # ids of the next step that an ADMIT brings


class StagedEdits:
    """Edits waiting for the next flush, and the pinned buffers that carry them.

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
    """

    def __init__(
        self, table: SequenceTable, batches: torch.Tensor, tokens_per_step: int, max_prefill_tokens: int
    ) -> None:
        self._table = table
        self._batches = batches
        self._tokens_per_step = tokens_per_step
        self._max_prefill_tokens = max_prefill_tokens
        self._device = table.records.device
        self._edits: list[_StagedEdit] = []  # in call order
        self._staged_batches: dict[int, np.ndarray] = {}  # batch row -> ids; the last one staged wins
        edit_words = EDIT_WORDS + INT64_WORDS * tokens_per_step
        words = EDITS_PER_BUFFER * edit_words + batches.shape[0] * (EDIT_WORDS + batches.shape[1])
        words += words % INT64_WORDS
        self._buffers = []
        for _ in range(NUM_BUFFERS):
            host, operand = shared_zeros(words, torch.int32, self._device)
            self._buffers.append(_Buffer(host.numpy(), operand))
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._edits or self._staged_batches)

    def stage(self, state_id: int, kind: Edit, *values: int, tokens: list[int] | None = None) -> None:
        """Stage one record edit; edits of one flush apply in call order."""
        self._edits.append(_StagedEdit((state_id, int(kind), *values), tokens))

    def stage_batch(self, batch_row: int, state_ids: np.ndarray) -> None:
        """Stage the ids of a batch (int32 [B]); of several for one batch row the last one counts."""
        self._staged_batches[batch_row] = state_ids

    def flush(self) -> None:
        """Launch everything staged on the current stream: one launch, more only past EDITS_PER_BUFFER edits.

        What a failing launch did not apply stays staged.
        """
        while self:
            part = self._edits[:EDITS_PER_BUFFER]
            last = len(part) == len(self._edits)
            # The kernel gives a state's edits to one thread, so they stand together; a stable sort keeps their order.
            self._launch(sorted(part, key=lambda edit: edit.words[0]), self._staged_batches if last else {})
            del self._edits[: len(part)]
            if last:
                self._staged_batches = {}

    def _launch(self, edits: list[_StagedEdit], batches: dict[int, np.ndarray]) -> None:
        buffer = self._free_buffer()
        words = buffer.words
        rows = words[: (len(edits) + len(batches)) * EDIT_WORDS].reshape(-1, EDIT_WORDS)
        payload = rows.size  # word at which the next payload begins; token ids first, so that they stay 8-byte aligned
        for row, edit in zip(rows, edits, strict=False):
            row[: len(edit.words)] = edit.words
            if edit.words[1] == Edit.ADMIT:
                row[len(edit.words)] = payload if edit.tokens else -1
            if edit.tokens:
                ids = words[payload : payload + INT64_WORDS * self._tokens_per_step].view(np.int64)
                ids[:] = 0
                ids[: len(edit.tokens)] = edit.tokens
                payload += INT64_WORDS * self._tokens_per_step
        for row, (batch_row, state_ids) in zip(rows[len(edits) :], batches.items(), strict=True):
            row[:4] = (batch_row, 0, payload, len(state_ids))
            words[payload : payload + len(state_ids)] = state_ids
            payload += len(state_ids)
        zos.ops.call(
            "apply_table_edits",
            self._table.records,
            self._table.token_ids,
            self._batches,
            buffer.operand,
            len(edits),
            len(batches),
            self._tokens_per_step,
            self._max_prefill_tokens,
        )
        if self._device.type == "cuda":
            buffer.applied = buffer.applied or torch.cuda.Event()
            buffer.applied.record(torch.cuda.current_stream(self._device))

    def _free_buffer(self) -> _Buffer:
        """Return the next buffer of the pool; waits until the launch that last read it is over."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        if buffer.applied is not None:
            buffer.applied.synchronize()  # a pinned buffer is never written while a launch may still read it
        return buffer
