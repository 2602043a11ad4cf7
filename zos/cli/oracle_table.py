"""The oracle's table: the columns of every state as plain Python, and what each edit does to them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

FREE, LIVE, FINISHED, ERROR, PAUSED = range(5)  # phases

SEQLEN_Q_RANGE = 1
Q_START_NEGATIVE = 2
VALID_START_NEGATIVE = 3
VALID_START_PAST_Q_START = 4
POSITION_OVERFLOW = 5
CHUNK_PAST_PROMPT_END = 6
NUM_KEPT_RANGE = 7
CHUNK_NOT_KEPT_WHOLE = 8

COLUMNS = (
    *("phase", "seqlen_q", "q_start", "prompt_end"),
    *("swa_valid_start", "kv_cached_end", "generation", "error"),
    *("head", "stop_at", "chunk_q", "decode_q"),
    *("error_value", "reserved_13", "reserved_14", "reserved_15"),
)

Record = dict[str, int]


class OracleTable:
    """Sequences and the edits of the service; every method acts at once, as the device does in stream order.

    Nothing is checked that the service refuses before a launch: these are the arguments that the device gets.

    Parameters
    ----------
    capacity : int
        Number of states.
    tokens_per_step : int
        Q.
    max_prefill_tokens : int
        Chunk length that a chunk_q of 0 stands for.
    carry_tokens : bool
        Whether the table holds the next step's input ids.
    snapshot_every : int
        Tokens between boundaries, 0 for none.

    Attributes
    ----------
    records : list of dict
        The columns of each state by name.
    token_ids : list of list of int, or None
        Q input ids a state.
    counters : dict of str to int
        stale, duplicate, deferred, errors.
    """

    window: int  # tokens that a query sees; set by the oracle of prepare, as is
    ring: int  # slots of a ring

    def __init__(
        self,
        capacity: int,
        tokens_per_step: int,
        max_prefill_tokens: int,
        carry_tokens: bool,
        snapshot_every: int = 0,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.max_prefill_tokens = max_prefill_tokens
        self.snapshot_every = snapshot_every
        self.records: list[Record] = [dict.fromkeys(COLUMNS, 0) for _ in range(capacity)]
        self.token_ids = [[0] * tokens_per_step for _ in range(capacity)] if carry_tokens else None
        self.counters = dict.fromkeys(("stale", "duplicate", "deferred", "errors"), 0)

    def records_array(self) -> np.ndarray:
        """Return the table as the device holds it: int32 [capacity, 16]."""
        return np.array(list(map(itemgetter(*COLUMNS), self.records)), np.int32)

    def load_records(self, array: np.ndarray) -> None:
        """Replace the table by int32 [capacity, 16]."""
        self.records = [dict(zip(COLUMNS, words, strict=True)) for words in array.tolist()]

    # ---- edits ---------------------------------------------------------------------------------------------

    def admit(
        self,
        state_id: int,
        q_start: int = 0,
        seqlen_q: int | None = None,
        *,
        swa_valid_start: int = 0,
        stop_at: int = 0,
        prompt_end: int = 0,
        chunk_q: int = 0,
        decode_q: int = 0,
        kv_cached_end: int = 0,
        tokens: Sequence[int] | None = None,
        prefix_hit: int | None = None,
    ) -> None:
        """Let a sequence in: every column is set, so that nothing of an earlier tenant remains."""
        record = self.records[state_id]
        if prefix_hit is not None:
            hit = min(prefix_hit, prompt_end)
            kv_cached_end = hit if hit > self.window else 0
            q_start = swa_valid_start = max(0, kv_cached_end - self.window)
        record.update(
            phase=LIVE, q_start=q_start, prompt_end=prompt_end, swa_valid_start=swa_valid_start,
            kv_cached_end=kv_cached_end, head=q_start, stop_at=stop_at, chunk_q=chunk_q, decode_q=decode_q,
        )  # fmt: skip
        record["seqlen_q"] = self._next_seqlen_q(record) if seqlen_q is None else seqlen_q
        self._new_generation(record)
        self._set_tokens(state_id, tokens or ())

    def release(self, state_id: int) -> None:
        """Free the state; results still on their way meet another generation."""
        self.records[state_id]["phase"] = FREE
        self._new_generation(self.records[state_id])

    def reset(self, state_id: int, prompt_end: int = 0) -> None:
        """LIVE, PAUSED or ERROR -> LIVE at position 0."""
        record = self.records[state_id]
        if record["phase"] not in (LIVE, PAUSED, ERROR):
            return
        record.update(phase=LIVE, q_start=0, swa_valid_start=0, head=0, kv_cached_end=0, prompt_end=prompt_end)
        record["seqlen_q"] = self._next_seqlen_q(record)
        self._new_generation(record)
        self._set_tokens(state_id, ())

    def pause(self, state_id: int) -> None:
        """LIVE -> PAUSED."""
        if self.records[state_id]["phase"] == LIVE:
            self.records[state_id]["phase"] = PAUSED

    def resume(self, state_id: int) -> None:
        """PAUSED -> LIVE."""
        if self.records[state_id]["phase"] == PAUSED:
            self.records[state_id]["phase"] = LIVE

    def set_seqlen_q(self, state_id: int, seqlen_q: int) -> None:
        """Set the tokens wanted in the next step; whether there is one is the phase's matter."""
        self.records[state_id]["seqlen_q"] = seqlen_q

    def set_valid_start(self, state_id: int, swa_valid_start: int) -> None:
        """Declare ring positions below it missing."""
        self.records[state_id]["swa_valid_start"] = swa_valid_start

    def fork(self, src: int, dst: int) -> None:
        """Make `dst` what `src` is; its generation rises as with every life, and the error is the copy's too."""
        self.records[dst] = {**self.records[src], "generation": self.records[dst]["generation"] + 1}
        if self.token_ids is not None:
            self.token_ids[dst] = list(self.token_ids[src])

    # ---- columns -------------------------------------------------------------------------------------------

    def _next_seqlen_q(self, record: Record) -> int:
        """Return the next chunk while the prompt is incomplete, a decode step after."""
        q_start, missing = record["q_start"], record["prompt_end"] - record["q_start"]
        if missing > 0:
            chunk = min(record["chunk_q"] or self.max_prefill_tokens, missing)
            if self.snapshot_every:  # it ends where it comes to a multiple
                within = (token + 1 for token in range(chunk) if (q_start + token + 1) % self.snapshot_every == 0)
                chunk = next(within, chunk)
            return chunk
        return record["decode_q"] or self.tokens_per_step

    def _new_generation(self, record: Record) -> None:
        record["generation"] += 1
        record["error"] = record["error_value"] = 0

    def _record_error(self, record: Record, code: int, value: int) -> None:
        """Record an error, unless an earlier one of the state stands."""
        if record["error"] == 0:
            record["error"], record["error_value"] = code, value
            self.counters["errors"] += 1

    def _fail(self, record: Record, code: int, value: int) -> None:
        self._record_error(record, code, value)
        record["phase"] = ERROR

    def _set_tokens(self, state_id: int, tokens: Sequence[int]) -> None:
        if self.token_ids is not None:
            ids = [int(token) for token in tokens]
            self.token_ids[state_id] = ids + [0] * (self.tokens_per_step - len(ids))
