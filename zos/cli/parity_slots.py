"""Slots of a round of `zos parity`: batches, ready queues and step records, the oracle's and every path's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from zos.cli.compare import record_arrays
from zos.cli.oracle_commit import CommitOracle
from zos.cli.oracle_queue import OracleSlot
from zos.cli.oracle_table import COLUMNS, FINISHED
from zos.cli.setups import SLOTS, Setup
from zos.mailbox import StepRecord
from zos.service import MetadataService

COUNTS = ("step", "batch_version", "batches_refused", "ready_taken")  # that go on from round to round
MOST_AT_ONCE = 64  # entries appended by a call


class Slots:
    """The oracle's slots, and where each path's counts stood when the round began.

    Every round begins with empty queues and everything read, so that it repeats alone.

    Parameters
    ----------
    setup : Setup
        Sizes; without records there is nothing to compare.
    services : dict of str to MetadataService
        The paths.
    oracle : CommitOracle
        The table of the oracle's slots.
    """

    def __init__(self, setup: Setup, services: dict[str, MetadataService], oracle: CommitOracle) -> None:
        self._setup, self._services = setup, services
        self.oracle = [OracleSlot(oracle, setup.max_batch) for _ in range(SLOTS)]
        self._unread = [0] * SLOTS
        self._begin: dict[tuple[str, int], StepRecord] = {}
        if not setup.records:
            return
        for slot, expected in enumerate(self.oracle):
            expected.set_ready([])
            expected.batch[0] = 0
            for path, svc in services.items():
                self._begin[path, slot] = _empty_queue(svc, slot)

    def committed(self, slot: int) -> None:
        """A step of a slot left a record."""
        self._unread[slot] += 1

    def due(self, rng: np.random.Generator) -> list[int]:
        """Choose slots whose records the host reads now: those whose mailbox is nearly full, and others at random."""
        if not self._setup.records:
            return []
        reads = rng.random(SLOTS) < 0.2  # mostly late: so a set_batch meets refills unread
        return [slot for slot, unread in enumerate(self._unread) if unread and (reads[slot] or self._full(unread))]

    def _full(self, unread: int) -> bool:
        return unread + 2 > self._setup.records  # an action leaves at most one record before this is asked again

    def read(self, slot: int, judged: bool) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """Read a slot's records: (path, fields, what they must be) of each; without `judged` the first path says it."""
        self._unread[slot] = 0
        expected = self.oracle[slot].read() if judged else None
        for path, svc in self._services.items():
            records = [self._since_begin(path, slot, record) for record in svc.drain(slot)]
            if expected is None:
                expected = records
            yield path, {"records": np.array(len(records))}, {"records": np.array(len(expected))}
            yield from ((path, record, its) for record, its in zip(records, expected, strict=True))

    def batches(self) -> dict[str, np.ndarray]:
        """Return what the oracle's batches and queues hold."""
        entries = [entry for slot in self.oracle for entry in slot.queue or ()]
        return {
            "batches": np.array([slot.batch for slot in self.oracle], np.int32),
            "ready": np.array(entries, np.int32).reshape(-1, 2),
        }

    def batches_of(self, svc: MetadataService) -> dict[str, np.ndarray]:
        """Return what a service's batches and queues hold."""
        states, ready = svc._edits.batch_states[:SLOTS].cpu().numpy(), svc._edits.ready[:SLOTS].cpu().numpy()
        waiting = [ready[slot, np.arange(state[2], state[3]) % ready.shape[1]] for slot, state in enumerate(states)]
        return {"batches": svc._batches[:SLOTS].cpu().numpy(), "ready": np.concatenate(waiting)}

    def random_ready(self, rng: np.random.Generator, slot: int) -> list[int]:
        """Choose states to append to a slot's queue, no more than it has room for: a few, or so many that few are left over."""
        svc = next(iter(self._services.values()))
        svc.known_batch(slot)  # learns what the records read tell of entries taken
        room = svc._edits.ready.shape[1] - len(svc.slot(slot).waiting)
        most = rng.choice([2, 8, MOST_AT_ONCE])
        return [
            int(state_id) for state_id in rng.permutation(self._setup.capacity)[: min(room, rng.integers(most + 1))]
        ]

    def _since_begin(self, path: str, slot: int, record: StepRecord) -> dict[str, np.ndarray]:
        begin = self._begin[path, slot]
        return record_arrays(record._replace(**{name: getattr(record, name) - getattr(begin, name) for name in COUNTS}))


def _empty_queue(svc: MetadataService, slot: int) -> StepRecord:
    """Let a step of one finished sequence pass over every entry, read everything, and return the record of that step."""
    records = torch.zeros_like(svc.table.records)
    records[0, COLUMNS.index("phase")] = FINISHED
    svc.table.records.copy_(records)
    svc.drain(slot)
    svc.set_batch([0], batch=1, slot=slot)
    svc.commit(svc.prepare(slot), torch.zeros(1, dtype=torch.int32, device=svc.device))
    record = svc.drain(slot)[-1]
    assert record.next_state_ids.tolist() == [0]
    return record
