"""commit in Numba: moves the sequences of a prepared batch on, as device_kernels/commit.cu does."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from host_fallback.ring import ERROR, FINISHED, LIVE, NO_ERROR, PAUSED, kept_before_stop, kept_error, next_seqlen_q

_NOTHING_FINISHED = np.zeros(0, np.bool_)
_NO_TOKENS = np.zeros((0, 0), np.int64)


@njit(cache=True, error_model="numpy")
def _commit(
    records, token_ids, tickets, num_kept, finished, next_tokens, counters, tokens_per_step, max_prefill_tokens
):
    for row in range(tickets.shape[0]):
        state_id, generation, q_start, q = tickets[row, 0], tickets[row, 1], tickets[row, 2], tickets[row, 3]
        if q <= 0 or not 0 <= state_id < records.shape[0]:
            continue
        record = records[state_id]
        if record[6] != generation or (record[0] != LIVE and record[0] != PAUSED):
            counters[0] += 1
            continue
        if record[2] != q_start:
            counters[1] += 1
            continue
        prompt_end, stop_at = record[3], record[9]
        prefilling = q_start < prompt_end
        if prefilling:
            kept = q
        else:
            kept = num_kept[row]
            error = kept_error(kept, q, tokens_per_step)
            if error != NO_ERROR:
                record[0] = ERROR
                if record[7] == NO_ERROR:  # the first error of a state stays
                    record[7] = error
                    record[12] = kept
                    counters[3] += 1
                continue
            if kept == 0:  # no result
                continue
        record[8] = max(record[8], q_start + q)
        record[2] = q_start + kept_before_stop(kept, q_start, stop_at)
        if prefilling:
            record[1] = next_seqlen_q(
                record[2], prompt_end, record[10], record[11], tokens_per_step, max_prefill_tokens
            )
        prompt_complete = record[2] >= prompt_end
        if (stop_at > 0 and record[2] >= stop_at) or (prompt_complete and finished.size > 0 and finished[row]):
            record[0] = FINISHED
        if prompt_complete and next_tokens.size > 0:
            token_ids[state_id] = next_tokens[row]


def commit(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    tickets: torch.Tensor,
    num_kept: torch.Tensor,
    finished: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    counters: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
) -> None:
    """Move the sequences on, on checked CPU arguments; shapes and meaning are documented at `zos.ops`."""
    _commit(
        records.numpy(),
        _NO_TOKENS if token_ids is None else token_ids.numpy(),
        tickets.numpy(),
        num_kept.numpy(),
        _NOTHING_FINISHED if finished is None else finished.numpy(),
        _NO_TOKENS if next_tokens is None else next_tokens.numpy(),
        counters.numpy(),
        tokens_per_step,
        max_prefill_tokens,
    )
