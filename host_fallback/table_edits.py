"""apply_table_edits in Numba: applies one flush of staged edits, as device_kernels/table_edits.cu does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from host_fallback.ring import ERROR, FREE, INT32_LARGEST, LIVE, NO_ERROR, PAUSED, next_seqlen_q

EDIT_WORDS = 16
ADMIT, RELEASE, RESET, PAUSE, RESUME, SET_SEQLEN_Q, SET_VALID_START, APPEND_READY, FORK = range(1, 10)  # 0: no edit
SET_BATCH, SET_APPENDED = range(2)  # kinds of batch edits
NUM_EDITS, NUM_BATCHES, HEADER_WORDS = 0, 1, 16  # words of a buffer
VERSION, REFUSED, TAKEN, APPENDED = range(4)

_NO_TOKENS = np.zeros((0, 0), np.int64)
_NO_READY = np.zeros((0, 0, 2), np.int32)


@njit(cache=True, error_model="numpy")
def _apply_edit(record, tokens, edit, words, ready, tokens_per_step, max_prefill_tokens, snapshot_every):
    """Apply one edit to its state's record and, where it sets them, to the tokens of its next step."""
    kind, value = edit[1], edit[2]
    if kind == ADMIT:
        generation = record[6]
        record[:] = 0
        record[0], record[1], record[2], record[3] = LIVE, value, edit[3], edit[4]
        record[4], record[5], record[6] = edit[5], edit[6], generation + 1
        record[8], record[9], record[10], record[11] = edit[3], edit[7], edit[8], edit[9]
        tokens[:] = 0
        at = edit[10] // 2
        if edit[10] >= 0 and tokens.size > 0 and at + tokens_per_step <= words.shape[0]:
            tokens[:] = words[at : at + tokens_per_step]
    elif kind == RELEASE:
        record[0], record[6], record[7], record[12] = FREE, record[6] + 1, NO_ERROR, 0
    elif kind == RESET:
        if record[0] == LIVE or record[0] == PAUSED or record[0] == ERROR:
            seqlen_q = next_seqlen_q(
                0, value, record[10], record[11], tokens_per_step, max_prefill_tokens, snapshot_every
            )
            record[0], record[1], record[2], record[3] = LIVE, seqlen_q, 0, value
            record[4], record[5], record[6], record[7] = 0, 0, record[6] + 1, NO_ERROR
            record[8], record[12] = 0, 0
            tokens[:] = 0
    elif kind == PAUSE:
        if record[0] == LIVE:
            record[0] = PAUSED
    elif kind == RESUME:
        if record[0] == PAUSED:
            record[0] = LIVE
    elif kind == SET_SEQLEN_Q:
        record[1] = value
    elif kind == SET_VALID_START:
        record[4] = value
    elif kind == APPEND_READY:
        place = edit[3]
        if 0 <= value < ready.shape[0] and 0 <= place < ready.shape[1]:
            ready[value, place, 0], ready[value, place, 1] = edit[0], record[6]


@njit(cache=True, error_model="numpy")
def _fork(records, token_ids, state_id, source):
    """Copy all that the table holds of the source, but for the generation."""
    if not 0 <= source < records.shape[0]:
        return
    generation = records[state_id, 6]
    records[state_id] = records[source]
    records[state_id, 6] = generation + 1
    if token_ids.size > 0:
        token_ids[state_id] = token_ids[source]


@njit(cache=True, error_model="numpy")
def _apply_batch_edit(batches, batch_states, edit, buffer):
    """Set a batch, where it changed as often as expected, or the number of entries appended to its ready queue."""
    row = np.int64(edit[0])
    if not 0 <= row < batches.shape[0]:
        return
    state = batch_states[row]
    if edit[1] == SET_APPENDED:
        state[APPENDED] = (np.int64(edit[3]) << 32) | (np.int64(edit[2]) & 0xFFFFFFFF)
        return
    at, count, expected = np.int64(edit[2]), np.int64(edit[3]), edit[4]
    if edit[1] != SET_BATCH or at < 0 or not 0 <= count <= batches.shape[1] or at + count > buffer.shape[0]:
        return
    # Every set_batch counts here, refused or not: one that was staged on top of another finds the number that it expects only if
    # no refill came in between, whatever became of the other.
    if expected >= 0 and expected != (state[VERSION] + state[REFUSED]) & INT32_LARGEST:
        state[REFUSED] += 1
        return
    state[VERSION] += 1
    batches[row, :count] = buffer[at : at + count]
    batches[row, count:] = -1  # a later step of more rows, or a late refill, must not find a former batch there


@njit(cache=True, error_model="numpy")
def _apply(
    records,
    token_ids,
    batches,
    edits,
    batch_states,
    ready,
    applied,
    applied_on_host,
    tokens_per_step,
    max_prefill_tokens,
    snapshot_every,
):
    buffer = edits[applied[0] % edits.shape[0]]
    words = buffer.view(np.int64)
    rows = buffer[HEADER_WORDS:]
    num_edits, num_batches = np.int64(buffer[NUM_EDITS]), np.int64(buffer[NUM_BATCHES])
    if num_edits < 0 or num_batches < 0 or num_edits + num_batches > rows.shape[0] // EDIT_WORDS:
        num_edits = num_batches = np.int64(0)  # no buffer of the host's: read no further than it reaches
    nobody = np.zeros(0, np.int64)
    for i in range(num_edits):
        edit = rows[i * EDIT_WORDS : (i + 1) * EDIT_WORDS]
        if not 0 <= edit[0] < records.shape[0]:
            continue  # skipped, as everything that would read or write outside
        if edit[1] == FORK:
            _fork(records, token_ids, edit[0], edit[2])
            continue
        tokens = token_ids[edit[0]] if token_ids.size > 0 else nobody
        _apply_edit(records[edit[0]], tokens, edit, words, ready, tokens_per_step, max_prefill_tokens, snapshot_every)
    for i in range(num_edits, num_edits + num_batches):
        _apply_batch_edit(batches, batch_states, rows[i * EDIT_WORDS : (i + 1) * EDIT_WORDS], buffer)
    applied[0] += 1
    applied_on_host[0] = applied[0]


def bind_apply_table_edits(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    batches: torch.Tensor,
    edits: torch.Tensor,
    batch_states: torch.Tensor,
    ready: torch.Tensor | None,
    applied: torch.Tensor,
    applied_on_host: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
    snapshot_every: int = 0,
) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result applies the next buffer."""
    arguments = (
        records.numpy(),
        _NO_TOKENS if token_ids is None else token_ids.numpy(),
        batches.numpy(),
        edits.numpy(),
        batch_states.numpy(),
        _NO_READY if ready is None else ready.numpy(),
        applied.numpy(),
        applied_on_host.numpy(),
        tokens_per_step,
        max_prefill_tokens,
        snapshot_every,
    )
    return lambda: _apply(*arguments)


def apply_table_edits(**operands: Any) -> None:
    """Apply once, on the arguments of `bind_apply_table_edits`."""
    bind_apply_table_edits(**operands)()
