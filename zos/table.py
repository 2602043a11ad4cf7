"""SequenceTable: the device-resident records of all states, one int32 row each, and the meaning of their columns."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch


class Phase(IntEnum):
    """What a state is doing; only LIVE rows are ever prepared."""

    FREE = 0
    LIVE = 1
    FINISHED = 2
    ERROR = 3
    PAUSED = 4


class ErrorCode(IntEnum):
    """Why a state is in error (column `error`); the first error of a state stays until admit, reset or release."""

    NO_ERROR = 0
    SEQLEN_Q_RANGE = 1
    Q_START_NEGATIVE = 2
    VALID_START_NEGATIVE = 3
    VALID_START_PAST_Q_START = 4
    POSITION_OVERFLOW = 5
    CHUNK_PAST_PROMPT_END = 6
    NUM_KEPT_RANGE = 7
    CHUNK_NOT_KEPT_WHOLE = 8


# ErrorCode -> (field whose value `error_value` holds, the rule that it breaks)
ERROR_RULES = {
    ErrorCode.SEQLEN_Q_RANGE: ("seqlen_q", "must be 0 … tokens per step (of a prefill batch: max_prefill_tokens)"),
    ErrorCode.Q_START_NEGATIVE: ("q_start", "must not be negative"),
    ErrorCode.VALID_START_NEGATIVE: ("swa_valid_start", "must not be negative"),
    ErrorCode.VALID_START_PAST_Q_START: ("swa_valid_start", "must not exceed q_start"),
    ErrorCode.POSITION_OVERFLOW: ("q_start", "q_start + seqlen_q must not exceed 2^31 - 1"),
    ErrorCode.CHUNK_PAST_PROMPT_END: ("seqlen_q", "a chunk must not reach past prompt_end"),
    ErrorCode.NUM_KEPT_RANGE: ("num_kept", "must be 0 … seqlen_q of the prepared row"),
    ErrorCode.CHUNK_NOT_KEPT_WHOLE: ("num_kept", "a chunk without prompt_end must be kept whole"),
}

RECORD_WORDS = 16
# Column name -> word of the record. The first four are all that a scan over a batch needs: one 16-byte load a row.
COLUMNS = {
    "phase": 0,
    "seqlen_q": 1,
    "q_start": 2,
    "prompt_end": 3,
    "swa_valid_start": 4,
    "kv_cached_end": 5,
    "generation": 6,
    "error": 7,
    "head": 8,
    "stop_at": 9,
    "chunk_q": 10,
    "decode_q": 11,
    "error_value": 12,
}


class Fault(NamedTuple):
    """One state in error."""

    state_id: int
    code: ErrorCode
    field: str
    value: int
    rule: str


class SequenceTable:
    """The records of all states; the device copy is the truth and the host keeps no mirror that a step depends on.

    Parameters
    ----------
    capacity : int
        Number of states.
    tokens_per_step : int
        Width of `token_ids`.
    carry_tokens : bool
        Whether the table holds the input ids of each state's next step.
    device : torch.device
        Where it lives.

    Attributes
    ----------
    records : torch.Tensor
        int32 [capacity, 16], 64 bytes a state; its `data_ptr()` never changes.
    token_ids : torch.Tensor or None
        int64 [capacity, tokens_per_step], the ids of each state's next step.
    phase, seqlen_q, q_start, prompt_end, swa_valid_start, kv_cached_end, generation, error, head, stop_at, chunk_q, decode_q, \
error_value : torch.Tensor
        int32 [capacity], strided views of `records`.
    """

    phase: torch.Tensor
    seqlen_q: torch.Tensor
    q_start: torch.Tensor
    prompt_end: torch.Tensor
    swa_valid_start: torch.Tensor
    kv_cached_end: torch.Tensor
    generation: torch.Tensor
    error: torch.Tensor
    head: torch.Tensor
    stop_at: torch.Tensor
    chunk_q: torch.Tensor
    decode_q: torch.Tensor
    error_value: torch.Tensor

    def __init__(self, capacity: int, tokens_per_step: int, carry_tokens: bool, device: torch.device) -> None:
        self.capacity = capacity
        self.records = torch.zeros(capacity, RECORD_WORDS, dtype=torch.int32, device=device)
        self.token_ids = (
            torch.zeros(capacity, tokens_per_step, dtype=torch.int64, device=device) if carry_tokens else None
        )
        for name, word in COLUMNS.items():
            setattr(self, name, self.records[:, word])

    def faults(self) -> list[Fault]:
        """Every state in error, in order of state_id. Waits for the device."""
        rows = torch.stack([self.error, self.error_value], dim=1).cpu()
        found = []
        for state_id in torch.nonzero(rows[:, 0]).flatten().tolist():
            code = ErrorCode(int(rows[state_id, 0]))
            field, rule = ERROR_RULES[code]
            found.append(Fault(state_id, code, field, int(rows[state_id, 1]), rule))
        return found
