"""apply_table_edits in Numba: applies one flush of staged edits, as device_kernels/table_edits.cu does."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from host_fallback.ring import ERROR, FREE, LIVE, NO_ERROR, PAUSED, next_seqlen_q

EDIT_WORDS = 16
ADMIT, RELEASE, RESET, PAUSE, RESUME, SET_SEQLEN_Q, SET_VALID_START = range(1, 8)  # 0: no edit

_NO_TOKENS = np.zeros((0, 0), np.int64)


@njit(cache=True, error_model="numpy")
def _apply_edit(record, tokens, edit, words, tokens_per_step, max_prefill_tokens):
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
            seqlen_q = next_seqlen_q(0, value, record[10], record[11], tokens_per_step, max_prefill_tokens)
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


@njit(cache=True, error_model="numpy")
def _apply(records, token_ids, batches, edits, words, num_edits, num_batches, tokens_per_step, max_prefill_tokens):
    nobody = np.zeros(0, np.int64)
    for i in range(num_edits):
        edit = edits[i * EDIT_WORDS : (i + 1) * EDIT_WORDS]
        if not 0 <= edit[0] < records.shape[0]:
            continue  # skipped, as everything that would read or write outside
        tokens = token_ids[edit[0]] if token_ids.size > 0 else nobody
        _apply_edit(records[edit[0]], tokens, edit, words, tokens_per_step, max_prefill_tokens)
    for i in range(num_edits, num_edits + num_batches):
        edit = edits[i * EDIT_WORDS : (i + 1) * EDIT_WORDS]
        row, at, count = np.int64(edit[0]), np.int64(edit[2]), np.int64(edit[3])
        if 0 <= row < batches.shape[0] and at >= 0 and 0 <= count <= batches.shape[1] and at + count <= edits.shape[0]:
            batches[row, :count] = edits[at : at + count]


def apply_table_edits(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    batches: torch.Tensor,
    edits: torch.Tensor,
    num_edits: int,
    num_batches: int,
    tokens_per_step: int,
    max_prefill_tokens: int,
) -> None:
    """Apply the edits on checked CPU arguments; shapes and meaning are documented at `zos.ops`."""
    words = edits.numpy()
    _apply(
        records.numpy(),
        _NO_TOKENS if token_ids is None else token_ids.numpy(),
        batches.numpy(),
        words,
        words.view(np.int64),
        num_edits,
        num_batches,
        tokens_per_step,
        max_prefill_tokens,
    )
