"""Twins: a service and the oracle, given the same calls and compared: table, records, batches and ready queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import zos
from tests.reference import PrefillOracle, as_array, assert_bitwise_equal
from zos.cli.compare import record_arrays
from zos.cli.oracle_queue import OracleSlot
from zos.mailbox import StepRecord
from zos.metadata import StepMetadata

TAKEN, APPENDED = 2, 3  # words of a batch's state


@dataclass
class Step:
    """A step that was prepared, and what its commit needs."""

    metadata: StepMetadata
    tickets: list[list[int]]
    slot: int
    prefill_batch: list[int] | None  # of a prefill step: its rows


class Twins:
    """A service and the oracle.

    Parameters
    ----------
    device : str
        Where the service runs.
    records : int
        Records of each slot's mailbox.
    queue : bool
        Whether each slot has a ready queue.
    kept_tokens : bool
        Whether records have room for token ids.
    options
        Of MetadataService.
    """

    def __init__(
        self,
        device: str,
        *,
        capacity: int = 64,
        max_batch: int = 8,
        slots: int = 1,
        records: int = 16,
        queue: bool = True,
        kept_tokens: bool = False,
        **options: Any,
    ) -> None:
        self.svc = zos.MetadataService(
            capacity, max_batch, device=device, metadata_slots=slots, compression_ratios=(), **options
        )
        geometry = self.svc.geometry
        self.oracle = PrefillOracle(
            capacity,
            window=geometry.window,
            ring=geometry.ring,
            tokens_per_step=geometry.tokens_per_step,
            max_prefill_tokens=self.svc.max_prefill_tokens,
            carry_tokens=self.svc.table.token_ids is not None,
            snapshot_every=self.svc.snapshot_every,
        )
        self._host_knows = True  # how far sequences are: nobody else has written to the table
        self.slots = [OracleSlot(self.oracle, max_batch) for _ in range(slots)]
        self._batches: list[list[int]] = [[]] * slots  # rows of the decode batch last set, by slot
        self._prefill_batches: list[list[int]] = [[]] * slots
        for slot in range(slots):
            self.svc.attach_mailbox(slot, records, kept_tokens)
            if queue:
                self.set_ready([], slot)

    def edit(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Make a call that concerns a sequence."""
        for target in (self.svc, self.oracle):
            getattr(target, method)(*arguments, **keywords)

    def admit(self, state_ids: Sequence[int], **columns: Any) -> None:
        """Admit several sequences, each at a position of its own."""
        for state_id in state_ids:
            self.edit("admit", state_id, **{"q_start": 10 * state_id, **columns})

    def load(self, records: np.ndarray) -> None:
        """Replace the table, as the caller's device code might."""
        self._host_knows = False
        self.oracle.load_records(records)
        self.svc.table.records.copy_(torch.from_numpy(records))

    def set_ready(self, state_ids: Sequence[int], slot: int = 0) -> None:
        """Append to a ready queue."""
        self.svc.set_ready(state_ids, slot)
        self.slots[slot].set_ready(state_ids)

    def set_batch(
        self,
        state_ids: Sequence[int],
        batch: int | None = None,
        slot: int = 0,
        flush: bool = True,
        max_tokens: int | None = None,
    ) -> bool:
        """Set a decode batch; whether the oracle says that it is accepted. Without `flush` the next prepare sets it."""
        rows = list(state_ids) + [-1] * ((len(state_ids) if batch is None else batch) - len(state_ids))
        self.svc.set_batch(state_ids, len(rows), max_tokens, slot)
        if flush:
            self.svc.flush()
        self._batches[slot] = rows
        return self.slots[slot].set_batch(rows)

    def set_prefill_batch(self, state_ids: Sequence[int], slot: int = 0) -> None:
        """Set a prefill batch."""
        self.svc.set_prefill_batch(state_ids, slot=slot)
        self._prefill_batches[slot] = list(state_ids)

    def prepare(self, slot: int = 0, prefill: bool = False) -> Step:
        """Prepare a step, and compare its tickets."""
        rows, metadata = self._prefill_batches[slot], None
        if prefill:
            metadata = self.svc.prepare_prefill(slot)
            tickets = self.oracle.prepare_prefill(rows)["tickets"]
        else:
            metadata = self.svc.prepare(slot)
            tickets = self.oracle.prepare(
                self.slots[slot].batch[: metadata.batch], self.svc.token_layout, metadata.tokens
            )["tickets"]
        assert_bitwise_equal(metadata.tickets, tickets, "tickets")
        return Step(metadata, tickets.tolist(), slot, list(rows) if prefill else None)

    def commit(
        self,
        step: Step,
        num_kept: Sequence[int] | np.ndarray,
        finished: Sequence[int] | np.ndarray | None = None,
        next_tokens: np.ndarray | None = None,
        kept_tokens: np.ndarray | None = None,
    ) -> None:
        """Commit a step; `finished` holds a truth value by row."""
        ends = None if finished is None else np.array(finished, bool)
        self.svc.commit(
            step.metadata,
            *(
                None if value is None else torch.as_tensor(value).to(self.svc.device)
                for value in (np.array(num_kept, np.int32), ends, next_tokens, kept_tokens)
            ),
        )
        self.slots[step.slot].commit(step.tickets, num_kept, ends, next_tokens, kept_tokens, step.prefill_batch)
        if step.metadata.marks is not None:
            assert_bitwise_equal(step.metadata.marks, np.array(self.oracle.marks, np.int32), "marks")

    def step(self, finish: Sequence[int] = (), slot: int = 0) -> None:
        """Run a decode step in which every row keeps a token, and the states `finish` end."""
        step = self.prepare(slot)
        self.commit(step, [1] * len(step.tickets), [ticket[0] in finish for ticket in step.tickets])

    def read(self, slot: int = 0) -> list[StepRecord]:
        """Read every record of a slot, compare them, and everything else."""
        records, expected = self.svc.drain(slot), self.slots[slot].read()
        assert len(records) == len(expected)
        for record, its in zip(records, expected, strict=True):
            arrays = record_arrays(record)
            assert arrays.keys() == its.keys()
            for name, array in its.items():
                assert_bitwise_equal(arrays[name], array, f"{name} of step {its['step']}")
        self.compare()
        return records

    def compare(self) -> None:
        """Compare tables, counters, batches and what waits in the ready queues, with all that is staged."""
        self.svc.flush()
        assert_bitwise_equal(self.svc.table.records, self.oracle.records_array(), "records")
        assert self.svc.counters() == self.oracle.counters
        if self._host_knows:
            lower, upper = self.svc.bounds(range(self.svc.capacity))
            length, free = self.svc.table.q_start.cpu().numpy(), self.svc.table.phase.cpu().numpy() == zos.Phase.FREE
            assert (free | ((lower <= length) & (length <= upper))).all()
            if not any(slot.unread for slot in self.slots):
                assert (free | (lower == upper)).all()
        for slot, expected in enumerate(self.slots):
            most = self.svc.max_batch
            batch = self.svc.slot_metadata(slot, most, most * self.svc.geometry.tokens_per_step).state_ids
            assert batch.tolist() == expected.batch
            counts, ready = self.svc._edits.batch_states[slot].tolist(), as_array(self.svc._edits.ready[slot])
            places = np.arange(counts[TAKEN], counts[APPENDED]) % len(ready)
            assert [tuple(entry) for entry in ready[places].tolist()] == (expected.queue or [])

    def known_batch(self, slot: int = 0) -> list[int]:
        """Rows that the host believes the batch to hold, once everything is read: they must be the device's."""
        rows, _ = self.svc.known_batch(slot)
        batch = self.slots[slot].batch
        assert rows == batch[: len(rows)] and set(batch[len(rows) :]) <= {-1}
        return rows
