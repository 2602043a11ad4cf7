"""The oracle of a slot's steps: its batch, its ready queue and the records of its steps, in plain Python from the issue's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zos.cli.oracle_commit import IS_DEFERRED, IS_DUPLICATE, IS_ERROR, IS_STALE, CommitOracle
from zos.cli.oracle_table import ERROR, FINISHED, LIVE

IS_REFILLED = 32  # flag of a row that a waiting sequence took over

Record = dict[str, np.ndarray]


class OracleSlot:
    """What one metadata slot holds beside the table.

    Parameters
    ----------
    oracle : CommitOracle
        The table that its batch names.
    max_batch : int
        Rows that the batch has room for.

    Attributes
    ----------
    batch : list of int
        State of each row, -1 for none.
    queue : list of (state_id, generation), or None
        Entries that nobody has taken; None while no queue is attached.
    refills : int
        Steps that refilled a row so far.
    """

    def __init__(self, oracle: CommitOracle, max_batch: int) -> None:
        self.oracle = oracle
        self.batch = [-1] * max_batch
        self.queue: list[tuple[int, int]] | None = None
        self.refills = self._read_refills = 0
        self._sets = self._refused = self._taken = 0
        self._unread: list[Record] = []
        self._steps = 0

    def set_ready(self, state_ids: Iterable[int]) -> None:
        """Append the sequences that the states hold now; the first call attaches the queue."""
        entries = [(state_id, self.oracle.records[state_id]["generation"]) for state_id in state_ids]
        self.queue = (self.queue or []) + entries

    def set_batch(self, state_ids: Iterable[int]) -> bool:
        """Replace the batch, and say so; with a queue only if the host has read of every refill, else refuse all of it."""
        if self.queue is not None and self._read_refills != self.refills:
            self._refused += 1
            return False
        ids = list(state_ids)
        self.batch = ids + [-1] * (len(self.batch) - len(ids))
        self._sets += 1
        return True

    def commit(
        self,
        tickets: Iterable[Sequence[int]],
        num_kept: Iterable[int],
        finished: Iterable[bool] | None = None,
        next_tokens: Iterable[Sequence[int]] | None = None,
        kept_tokens: Iterable[Sequence[int]] | None = None,
        prefill_batch: Sequence[int] | None = None,
    ) -> Record:
        """Commit a step on the table, refill the batch, and leave a record.

        Parameters
        ----------
        tickets, num_kept, finished, next_tokens
            As CommitOracle.commit.
        kept_tokens : iterable of sequences of int, optional
            Q ids by row.
        prefill_batch : sequence of int, optional
            The rows of a prefill batch: the step is one of these, and refills nothing.

        Returns
        -------
        dict of str to numpy.ndarray
            The fields of StepRecord by name.
        """
        rows = [tuple(int(word) for word in ticket) for ticket in tickets]
        outcomes = self.oracle.commit(rows, num_kept, finished, next_tokens)
        refilled = set() if prefill_batch is not None or self.queue is None else self._refill(rows, self.queue)
        self._steps += 1
        after = self.batch if prefill_batch is None else prefill_batch
        flags = [outcome.flags | (IS_REFILLED if row in refilled else 0) for row, outcome in enumerate(outcomes)]
        record = {
            "state_ids": _int32(outcome.state_id for outcome in outcomes),
            "generations": _int32(outcome.generation for outcome in outcomes),
            "q_start": _int32(outcome.q_start for outcome in outcomes),
            "kept": _int32(outcome.kept for outcome in outcomes),
            "flags": _int32(flags),
            "next_state_ids": _int32(after[row] for row in range(len(rows))),
            "step": np.array(self._steps),
            "prefill": np.array(prefill_batch is not None),
            "errors": np.array(sum(row & IS_ERROR > 0 for row in flags)),
            "deferred": np.array(sum(row & IS_DEFERRED > 0 for row in flags)),
            "stale": np.array(sum(row & IS_STALE > 0 for row in flags)),
            "duplicate": np.array(sum(row & IS_DUPLICATE > 0 for row in flags)),
            "batch_version": np.array(self._sets + self.refills),
            "batches_refused": np.array(self._refused),
            "ready_taken": np.array(self._taken),
        }
        if kept_tokens is not None and rows:
            record["kept_tokens"] = np.array(
                [
                    [token if j < outcome.kept else -1 for j, token in enumerate(tokens)]
                    for outcome, tokens in zip(outcomes, kept_tokens, strict=True)
                ],
                np.int64,
            )
        self._unread.append(record)
        return record

    def read(self) -> list[Record]:
        """Return the records that were not read yet; from here on the host knows of their refills."""
        records, self._unread = self._unread, []
        self._read_refills = self.refills
        return records

    @property
    def unread(self) -> int:
        """Records not read yet."""
        return len(self._unread)

    def _refill(self, tickets: list[tuple[int, ...]], queue: list[tuple[int, int]]) -> set[int]:
        """Give each batch row whose sequence is over the next entry that can run; returns these rows."""
        refilled = set()
        for row, ticket in enumerate(tickets):
            prepared, state_id = ticket[0] if ticket[0] >= 0 else ticket[2], self.batch[row]
            if state_id != prepared or not 0 <= state_id < len(self.oracle.records):
                continue
            if self.oracle.records[state_id]["phase"] not in (FINISHED, ERROR):
                continue
            while queue:
                waiting, generation = queue.pop(0)
                self._taken += 1
                record = self.oracle.records[waiting]
                if record["phase"] == LIVE and record["generation"] == generation and waiting not in self.batch:
                    self.batch[row] = waiting
                    refilled.add(row)
                    break
        self.refills += bool(refilled)
        return refilled


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)
