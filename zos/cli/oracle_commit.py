"""The oracle of commit: how a step's result moves sequences, and what each row's result came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zos.cli.oracle_table import (
    CHUNK_NOT_KEPT_WHOLE,
    ERROR,
    FINISHED,
    LIVE,
    NUM_KEPT_RANGE,
    PAUSED,
    OracleTable,
)

PADDING, IN_ERROR, DEFERRED = range(3)  # why a ticket has no tokens
IS_FINISHED, IS_ERROR, IS_STALE, IS_DUPLICATE, IS_DEFERRED = 1, 2, 4, 8, 16  # flags of an outcome


class Outcome(NamedTuple):
    """What the result of a row came to."""

    state_id: int  # whose row it was, -1 for none
    generation: int = 0  # of its ticket, 0 for a row without tokens
    q_start: int = 0  # after the step, 0 for a row without tokens
    kept: int = 0  # tokens that the sequence moved on by
    flags: int = 0


class CommitOracle(OracleTable):
    """A table of sequences that the results of steps move on.

    Attributes
    ----------
    marks : list of int
        Of the last commit, by row: the boundary at which the row's state is worth a snapshot, -1 for none.
    """

    marks: list[int]

    def commit(
        self,
        tickets: Iterable[Sequence[int]],
        num_kept: Iterable[int],
        finished: Iterable[bool] | None = None,
        next_tokens: Iterable[Sequence[int]] | None = None,
    ) -> list[Outcome]:
        """Move the ticketed sequences on by what was kept.

        Parameters
        ----------
        tickets : iterable of (state_id, generation, q_start, seqlen_q)
            What a prepare recorded, by row.
        num_kept : iterable of int
            Tokens kept by row, 0 for no result.
        finished : iterable of bool, optional
            Rows whose sequence ends here.
        next_tokens : iterable of sequences of int, optional
            Q input ids by row.

        Returns
        -------
        list of Outcome
            What each row's result came to.
        """
        ends = None if finished is None else list(finished)
        tokens = None if next_tokens is None else list(next_tokens)
        outcomes = []
        self.marks = []
        for row, (ticket, kept) in enumerate(zip(tickets, num_kept, strict=True)):
            state_id, generation, q_start, q = (int(word) for word in ticket)
            self.marks.append(-1)
            if state_id < 0 or q <= 0:
                flags = {IN_ERROR: IS_ERROR, DEFERRED: IS_DEFERRED}.get(generation, 0)
                outcomes.append(Outcome(q_start, flags=flags) if state_id == -1 else Outcome(-1))
                continue
            record = self.records[state_id]
            flags = moved = 0
            if record["generation"] != generation or record["phase"] not in (LIVE, PAUSED):
                self.counters["stale"] += 1
                flags = IS_STALE
            elif record["q_start"] != q_start:
                self.counters["duplicate"] += 1
                flags = IS_DUPLICATE
            else:
                ends_here = ends is not None and bool(ends[row])
                self._commit_row(state_id, q, int(kept), ends_here, None if tokens is None else tokens[row])
                moved = record["q_start"] - q_start
                self.marks[-1] = self._mark(record, q_start)
                flags = {FINISHED: IS_FINISHED, ERROR: IS_ERROR}.get(record["phase"], 0)
            outcomes.append(Outcome(state_id, generation, q_start + moved, moved, flags))
        return outcomes

    def _mark(self, record: dict[str, int], before: int) -> int:
        """Return the last multiple of snapshot_every that the row came to or past, if its ring holds all that is visible there."""
        if not self.snapshot_every:
            return -1
        boundary = record["q_start"] // self.snapshot_every * self.snapshot_every
        if not max(before, 0) < boundary:
            return -1
        # What is loaded ahead of a chunk is a whole window before it, and none of it may be overwritten.
        if record["head"] - boundary > self.ring - self.window:
            return -1
        visible = range(max(0, boundary - self.window + 1), boundary + 1)  # to the query at the boundary
        return boundary if all(position >= record["swa_valid_start"] for position in visible) else -1

    def _commit_row(self, state_id: int, q: int, kept: int, ends: bool, tokens: Sequence[int] | None) -> None:
        record = self.records[state_id]
        q_start, stop_at = record["q_start"], record["stop_at"]
        prefilling = q_start < record["prompt_end"]
        if prefilling:
            kept = q
        elif q > self.tokens_per_step:
            if kept != q:
                return self._fail(record, CHUNK_NOT_KEPT_WHOLE, kept)
        elif kept == 0:
            return None
        elif not 0 < kept <= q:
            return self._fail(record, NUM_KEPT_RANGE, kept)
        if stop_at > 0:
            kept = max(0, min(kept, stop_at - q_start))
        record["head"] = max(record["head"], q_start + q)
        record["q_start"] = q_start + kept
        prompt_complete = record["q_start"] >= record["prompt_end"]
        if prefilling:
            record["seqlen_q"] = self._next_seqlen_q(record)
        if prompt_complete and tokens is not None:
            self._set_tokens(state_id, tokens)
        if (prompt_complete and ends) or 0 < stop_at <= record["q_start"]:
            record["phase"] = FINISHED
        return None
