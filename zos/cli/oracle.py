"""The oracle: what prepare must do, in plain Python from the text of docs/design.md; it judges the fast paths.

Slow, scalar and complete; it shares no code with the paths that it judges, and NumPy only holds the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from zos.cli.oracle_commit import DEFERRED, IN_ERROR, PADDING, CommitOracle
from zos.cli.oracle_table import (
    CHUNK_PAST_PROMPT_END,
    LIVE,
    POSITION_OVERFLOW,
    Q_START_NEGATIVE,
    SEQLEN_Q_RANGE,
    VALID_START_NEGATIVE,
    VALID_START_PAST_Q_START,
)

LARGEST_POSITION = 2**31 - 1


class Oracle(CommitOracle):
    """A table of sequences with the operators of the service.

    Parameters
    ----------
    capacity : int
        Number of states.
    window, ring, tokens_per_step : int
        W, R and Q.
    compression : sequence of (ratio, entries)
        Compression rings whose outputs are wanted.
    max_prefill_tokens : int
        Chunk length that a chunk_q of 0 stands for.
    carry_tokens : bool
        Whether the table holds the next step's input ids.
    snapshot_every : int
        Tokens between boundaries of snapshots, 0 for none.

    Examples
    --------
    >>> oracle = Oracle(4, window=128, ring=134, tokens_per_step=6)
    >>> oracle.admit(3, q_start=1000)
    >>> oracle.prepare([3])["kv_swa_index_offset_len"][0].tolist()
    [471, 128]
    """

    def __init__(
        self,
        capacity: int,
        *,
        window: int,
        ring: int,
        tokens_per_step: int,
        compression: Sequence[tuple[int, int]] = (),
        max_prefill_tokens: int = 8192,
        carry_tokens: bool = False,
        snapshot_every: int = 0,
    ) -> None:
        super().__init__(capacity, tokens_per_step, max_prefill_tokens, carry_tokens, snapshot_every)
        self.window = window
        self.ring = ring
        self.compression = tuple(compression)

    def prepare(
        self, state_ids: Iterable[int], token_layout: str = "packed", max_tokens: int | None = None
    ) -> dict[str, np.ndarray]:
        """Metadata of a batch.

        Parameters
        ----------
        state_ids : iterable of int
            The state of each row, -1 for padding.
        token_layout : {"packed", "strided"}
            Where a row's tokens stand.
        max_tokens : int, optional
            T of a packed batch. Default: B * Q.

        Returns
        -------
        dict of str to numpy.ndarray
            DecodeMetadata's outputs by name, "tickets", "compression_write_slot[r]", "compression_index[r]".
        """
        ids = [int(state_id) for state_id in state_ids]
        places = len(ids) * self.tokens_per_step if max_tokens is None else max_tokens
        out = self._padding(len(ids), places)
        before = 0  # token places of the rows before this one, deferred rows included
        for row, state_id in enumerate(ids):
            taken, error, value = self._examine(state_id, self.tokens_per_step)
            first = before
            before += taken if token_layout == "packed" else self.tokens_per_step
            out["cu_seqlens_q"][row + 1] = min(before, places)
            self._write_empty_ticket(out["tickets"][row], state_id, error, taken)
            if error:
                self._record_error(self.records[state_id], error, value)
            elif taken > 0 and first + taken > places:
                self.counters["deferred"] += 1
            elif taken > 0:
                self._write_row(out, row, state_id, first, len(ids))
        return out

    def _examine(self, state_id: int, limit: int) -> tuple[int, int, int]:
        """(token places, error code, offending value) of a row of at most `limit` tokens; padding takes no place."""
        if not 0 <= state_id < len(self.records):
            return 0, 0, 0
        record = self.records[state_id]
        q, q_start, valid_start = record["seqlen_q"], record["q_start"], record["swa_valid_start"]
        prefilling = q_start < record["prompt_end"]
        if record["phase"] != LIVE or q == 0 or (prefilling and q > limit):
            return 0, 0, 0
        if not 0 <= q <= limit:
            return 0, SEQLEN_Q_RANGE, q
        if q_start < 0:
            return q, Q_START_NEGATIVE, q_start
        if valid_start < 0:
            return q, VALID_START_NEGATIVE, valid_start
        if valid_start > q_start:
            return q, VALID_START_PAST_Q_START, valid_start
        if q_start + q > LARGEST_POSITION:
            return q, POSITION_OVERFLOW, q_start
        if prefilling and q_start + q > record["prompt_end"]:
            return q, CHUNK_PAST_PROMPT_END, q
        return q, 0, 0

    def _write_empty_ticket(self, ticket: np.ndarray, state_id: int, error: int, taken: int) -> None:
        """Say in a ticket without tokens why there are none: 0 padding, 1 an error, 2 it did not fit; and whose it would be."""
        named = state_id if 0 <= state_id < len(self.records) else -1
        ticket[:] = (-1, IN_ERROR if error else DEFERRED if taken else PADDING, named, 0)

    def _padding(self, rows: int, places: int) -> dict[str, np.ndarray]:
        """Make the outputs of a batch without a live row."""

        def pad(value: int, *shape: int, dtype: Any = np.int32) -> np.ndarray:
            return np.full(shape, value, dtype)

        out = {
            "kv_swa_index_offset_len": pad(0, places, 2),
            "kv_swa_index": pad(-1, places, self.window),
            "kv_swa_full_index_pivots": pad(0, places, 4),
            "swa_len": pad(0, places),
            "positions": pad(0, places, dtype=np.int64),
            "swa_write_slot": pad(-1, places, dtype=np.int64),
            "token_row": pad(-1, places),
            "token_state_id": pad(-1, places),
            "cu_seqlens_q": pad(0, rows + 1),
            "seqlens_q": pad(0, rows),
            "seqlens_k": pad(0, rows),
            "num_tokens": pad(0, 1),
            "tickets": pad(0, rows, 4),
        }
        if self.token_ids is not None:
            out["input_ids"] = pad(0, places, dtype=np.int64)
        for ratio, _ in self.compression:
            out[f"compression_write_slot[{ratio}]"] = pad(-1, places, dtype=np.int64)
            out[f"compression_index[{ratio}]"] = pad(-1, places, dtype=np.int64)
        return out

    def _write_row(self, out: dict[str, np.ndarray], row: int, state_id: int, first: int, rows: int) -> None:
        """Write a live row: `first` is its first token place, `rows` the batch's B."""
        record = self.records[state_id]
        q, q_start, window, ring = record["seqlen_q"], record["q_start"], self.window, self.ring
        prefilling = q_start < record["prompt_end"]
        out["seqlens_q"][row] = q
        out["seqlens_k"][row] = q_start + q
        out["tickets"][row] = (state_id, record["generation"], q_start, q)
        out["num_tokens"][0] += q
        for j in range(q):
            place, p = first + j, q_start + j
            lo = max(p - window + 1, record["swa_valid_start"], 0)  # oldest visible position
            length = p - lo + 1
            out["kv_swa_index_offset_len"][place] = (state_id * ring + lo % ring, length)
            if "kv_swa_index" in out:
                out["kv_swa_index"][place, :length] = [state_id * ring + (lo + k) % ring for k in range(length)]
            # Section 1 holds each row's positions q_start - W … q_start - 1, section 2 the step's own tokens.
            skipped = min(lo, q_start) - (q_start - window)  # rows of section 1 before the first visible one
            hidden = max(0, lo - q_start)  # rows of section 2 before it
            out["kv_swa_full_index_pivots"][place] = (
                row * window + skipped, window - skipped, rows * window + first + hidden, j - hidden + 1,
            )  # fmt: skip
            out["swa_len"][place] = length
            out["positions"][place] = p
            if self.token_ids is not None:
                callers_ids = prefilling or q > self.tokens_per_step  # a chunk's ids are not in the table
                out["input_ids"][place] = 0 if callers_ids else self.token_ids[state_id][j]
            out["swa_write_slot"][place] = state_id * ring + p % ring if j >= q - ring else -1
            out["token_row"][place] = row
            out["token_state_id"][place] = state_id
            for ratio, entries in self.compression:
                slot = state_id * entries + p % entries if j >= q - entries else -1
                emits = (p + 1) % ratio == 0 and p >= record["kv_cached_end"]
                out[f"compression_write_slot[{ratio}]"][place] = slot
                out[f"compression_index[{ratio}]"][place] = p // ratio if emits else -1
