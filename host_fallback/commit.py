"""commit in Numba: moves the sequences of a prepared batch on, as device_kernels/commit.cu does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from host_fallback.ring import (
    ERROR,
    FINISHED,
    LIVE,
    NO_ERROR,
    PAUSED,
    TICKET_DEFERRED,
    TICKET_ERROR,
    kept_before_stop,
    kept_error,
    next_seqlen_q,
    snapshot_boundary,
)

IS_FINISHED, IS_ERROR, IS_STALE, IS_DUPLICATE, IS_DEFERRED, IS_REFILLED = 1, 2, 4, 8, 16, 32
STATE_ID, GENERATION, Q_START, KEPT, FLAGS, NEXT_STATE_ID, ROW_WORDS = range(7)
VERSION, REFUSED, TAKEN, APPENDED = range(4)
HEADER_WORDS = 16

_NOTHING_FINISHED = np.zeros(0, np.bool_)
_NO_TOKENS = np.zeros((0, 0), np.int64)
_NO_BATCH = np.zeros(0, np.int32)
_NO_STATE = np.zeros(0, np.int64)
_NO_READY = np.zeros((0, 2), np.int32)
_NO_RESULTS = np.zeros((0, 0), np.int32)
_NO_MARKS = np.zeros(0, np.int32)


@njit(cache=True, error_model="numpy")
def _commit_row(
    records,
    token_ids,
    ticket,
    kept,
    ends,
    next_tokens,
    row,
    counters,
    tokens_per_step,
    max_prefill_tokens,
    outcome,
    marks,
    snapshot_every,
    window,
    ring,
):
    """Commit one row; what it came to goes to `outcome` (state_id, generation, q_start, kept, flags)."""
    if marks.size > 0:
        marks[row] = -1
    state_id, generation, q_start, q = ticket[0], ticket[1], ticket[2], ticket[3]
    outcome[:] = 0
    if q <= 0 or not 0 <= state_id < records.shape[0]:
        outcome[STATE_ID] = q_start if state_id == -1 else -1
        if state_id == -1:
            outcome[FLAGS] = (
                IS_ERROR if generation == TICKET_ERROR else IS_DEFERRED if generation == TICKET_DEFERRED else 0
            )
        return
    outcome[STATE_ID], outcome[GENERATION], outcome[Q_START] = state_id, generation, q_start
    record = records[state_id]
    if record[6] != generation or (record[0] != LIVE and record[0] != PAUSED):
        counters[0] += 1
        outcome[FLAGS] = IS_STALE
        return
    if record[2] != q_start:
        counters[1] += 1
        outcome[FLAGS] = IS_DUPLICATE
        return
    prompt_end, stop_at = record[3], record[9]
    prefilling = q_start < prompt_end
    if prefilling:
        kept = q
    else:
        error = kept_error(kept, q, tokens_per_step)
        if error != NO_ERROR:
            record[0] = ERROR
            outcome[FLAGS] = IS_ERROR
            if record[7] == NO_ERROR:  # the first error of a state stays
                record[7] = error
                record[12] = kept
                counters[3] += 1
            return
        if kept == 0:  # no result
            return
    kept = kept_before_stop(kept, q_start, stop_at)
    record[8] = max(record[8], q_start + q)
    record[2] = q_start + kept
    if prefilling:
        record[1] = next_seqlen_q(
            record[2], prompt_end, record[10], record[11], tokens_per_step, max_prefill_tokens, snapshot_every
        )
    if marks.size > 0:
        marks[row] = snapshot_boundary(q_start, record[2], record[8], record[4], window, ring, snapshot_every)
    prompt_complete = record[2] >= prompt_end
    if (stop_at > 0 and record[2] >= stop_at) or (prompt_complete and ends):
        record[0] = FINISHED
        outcome[FLAGS] = IS_FINISHED
    if prompt_complete and next_tokens.size > 0:
        token_ids[state_id] = next_tokens[row]
    outcome[Q_START], outcome[KEPT] = record[2], kept


@njit(cache=True, error_model="numpy")
def _refill(records, tickets, batch, batch_state, ready, refilled):
    """Put waiting sequences into the batch rows of finished ones, where the batch still holds what was prepared."""
    changed = False
    for row in range(tickets.shape[0]):
        state_id = batch[row]
        prepared = tickets[row, 0] if tickets[row, 0] >= 0 else tickets[row, 2]
        if state_id != prepared or not 0 <= state_id < records.shape[0]:
            continue
        if records[state_id, 0] != FINISHED and records[state_id, 0] != ERROR:
            continue
        while batch_state[TAKEN] < batch_state[APPENDED]:
            entry = ready[batch_state[TAKEN] % ready.shape[0]]
            batch_state[TAKEN] += 1
            waiting = entry[0]
            if not 0 <= waiting < records.shape[0] or records[waiting, 0] != LIVE or records[waiting, 6] != entry[1]:
                continue
            if not (batch == waiting).any():  # an entry whose sequence stands in the batch already is passed over
                batch[row] = waiting
                refilled[row] = changed = True
                break
    if changed:
        batch_state[VERSION] += 1


@njit(cache=True, error_model="numpy")
def _commit(
    records,
    token_ids,
    tickets,
    num_kept,
    finished,
    next_tokens,
    counters,
    tokens_per_step,
    max_prefill_tokens,
    batch,
    batch_state,
    ready,
    results,
    results_state,
    kept_tokens,
    prefill,
    marks,
    snapshot_every,
    window,
    ring,
):
    rows = tickets.shape[0]
    outcomes = np.zeros((rows if results.size > 0 else 1, 5), np.int32)
    for row in range(rows):
        ends = finished.size > 0 and finished[row]
        outcome = outcomes[row if results.size > 0 else 0]
        _commit_row(
            records, token_ids, tickets[row], num_kept[row], ends, next_tokens, row, counters, tokens_per_step,
            max_prefill_tokens, outcome, marks, snapshot_every, window, ring,
        )  # fmt: skip
    refilled = np.zeros(rows, np.bool_)
    if ready.shape[0] > 0:
        _refill(records, tickets, batch, batch_state, ready, refilled)
    if results.size == 0:
        return
    step = results_state[0] + 1
    record = results[step % results.shape[0]]
    arrays = record[HEADER_WORDS : HEADER_WORDS + ROW_WORDS * rows].reshape(ROW_WORDS, rows)
    counts = np.zeros(4, np.int32)
    for row in range(rows):
        outcomes[row, FLAGS] |= IS_REFILLED if refilled[row] else 0
        flags = outcomes[row, FLAGS]
        arrays[:NEXT_STATE_ID, row] = outcomes[row]
        arrays[NEXT_STATE_ID, row] = batch[row] if batch.size > 0 else outcomes[row, STATE_ID]
        counts[0] += (flags & IS_ERROR) != 0
        counts[1] += (flags & IS_DEFERRED) != 0
        counts[2] += (flags & IS_STALE) != 0
        counts[3] += (flags & IS_DUPLICATE) != 0
    if kept_tokens.size > 0:
        begin = HEADER_WORDS + ROW_WORDS * rows
        tokens = record[begin : begin + 2 * kept_tokens.size].view(np.int64).reshape(kept_tokens.shape)
        for row in range(rows):
            for j in range(tokens_per_step):
                tokens[row, j] = kept_tokens[row, j] if j < outcomes[row, KEPT] else -1
    record[:2].view(np.int64)[0] = step
    record[2], record[3] = rows, prefill
    record[4], record[5], record[6] = batch_state[VERSION], batch_state[REFUSED], batch_state[TAKEN]
    record[7:11] = counts
    record[11] = tokens_per_step if kept_tokens.size > 0 else 0
    results_state[0] = step


def bind_commit(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    tickets: torch.Tensor,
    counters: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
    batch: torch.Tensor | None = None,
    batch_state: torch.Tensor | None = None,
    ready: torch.Tensor | None = None,
    results: torch.Tensor | None = None,
    results_state: torch.Tensor | None = None,
    prefill: bool = False,
    marks: torch.Tensor | None = None,
    snapshot_every: int = 0,
    window: int = 0,
    ring: int = 0,
) -> Callable[..., None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once.

    Calling the result with (num_kept, finished, next_tokens, kept_tokens), checked as well, moves the sequences on.
    """
    table = (records.numpy(), _NO_TOKENS if token_ids is None else token_ids.numpy(), tickets.numpy())
    sizes = (counters.numpy(), tokens_per_step, max_prefill_tokens)
    memory = (
        _NO_BATCH if batch is None else batch.numpy(),
        _NO_STATE if batch_state is None else batch_state.numpy(),
        _NO_READY if ready is None else ready.numpy(),
        _NO_RESULTS if results is None else results.numpy(),
        _NO_STATE if results_state is None else results_state.numpy(),
    )
    rest = (bool(prefill), _NO_MARKS if marks is None else marks.numpy(), snapshot_every, window, ring)

    def commit_result(
        num_kept: torch.Tensor,
        finished: torch.Tensor | None,
        next_tokens: torch.Tensor | None,
        kept_tokens: torch.Tensor | None,
    ) -> None:
        _commit(
            *table,
            num_kept.numpy(),
            _NOTHING_FINISHED if finished is None else finished.numpy(),
            _NO_TOKENS if next_tokens is None else next_tokens.numpy(),
            *sizes,
            *memory,
            _NO_TOKENS if kept_tokens is None else kept_tokens.numpy(),
            *rest,
        )

    return commit_result


def commit(
    num_kept: torch.Tensor,
    finished: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    kept_tokens: torch.Tensor | None = None,
    **operands: Any,
) -> None:
    """Commit once, on the arguments of `bind_commit` and what it returns."""
    bind_commit(**operands)(num_kept, finished, next_tokens, kept_tokens)
