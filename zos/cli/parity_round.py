"""A round of `zos parity`: one table through random steps on every path, compared after each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from zos.cli.cases import Result, forge_tickets, random_edits, random_result, random_table, tamper
from zos.cli.compare import POISON, block_view_arrays, block_view_tensors, first_mismatch, metadata_arrays, poison
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.oracle_views import expected_block_view
from zos.cli.parity_batches import Batch, DecodeBatch, PrefillBatch
from zos.cli.parity_slots import Slots
from zos.cli.setups import SLOTS, Setup
from zos.metadata import StepMetadata
from zos.service import MetadataService

# What happens in a round, and how often. A prefill has few rows and gives few cases, so it comes more often.
ACTIONS = {
    "prepare": 0.06,
    "prepare_prefill": 0.32,
    "advance": 0.3,
    "commit": 0.14,
    "repeat": 0.06,
    "edit": 0.06,
    "tamper": 0.06,
}
# With ready queues more of it is decode, which they refill; "ready" appends to one, or sets a batch under a step in flight.
QUEUE_ACTIONS = {
    "prepare": 0.14,
    "prepare_prefill": 0.1,
    "advance": 0.2,
    "commit": 0.2,
    "repeat": 0.06,
    "edit": 0.06,
    "tamper": 0.04,
    "ready": 0.2,
}
LONGEST_ADVANCE = 6  # steps
BATCHES: dict[str, type[Batch]] = {"prepare": DecodeBatch, "prepare_prefill": PrefillBatch}
Prepare = tuple[str, int]  # (which of them, slot): buffers of their own, prepared and committed apart


class Mismatch(Exception):
    """Two paths differ; the message says after what, which path, in what, where first, and both values."""


@dataclass
class Rig:
    """The services and the oracle of one setup; rounds reuse them, as an engine would."""

    setup: Setup
    services: dict[str, MetadataService]
    oracle: PrefillOracle

    @classmethod
    def make(cls, setup: Setup, devices: tuple[str, ...]) -> Rig:
        """Build them."""
        return cls(setup, {device: setup.service(device) for device in devices}, setup.oracle())


@dataclass
class Round:
    """One table through a random sequence of prepares, commits, edits and outside writes.

    The paths are compared after each of them; without `judged` the first path stands in for the oracle.
    """

    rig: Rig
    rng: np.random.Generator
    judged: bool
    cases: int = 0  # batch rows prepared
    batches: dict[Prepare, Batch] = field(default_factory=dict)  # set last
    prepared: dict[Prepare, dict[str, StepMetadata]] = field(default_factory=dict)  # metadata by path
    tickets: dict[Prepare, np.ndarray] = field(default_factory=dict)  # that a commit finds there
    last: tuple[Prepare, Result] | None = None  # what was committed last

    def run(self) -> None:
        """Run it; raises Mismatch at the first difference."""
        self.slots = Slots(self.rig.setup, self.rig.services, self.rig.oracle)
        records, token_ids = random_table(self.rng, self.rig.setup)
        self._load(records)
        if token_ids is not None:
            self.rig.oracle.token_ids = token_ids.tolist()
            for svc in self.rig.services.values():
                assert svc.table.token_ids is not None
                svc.table.token_ids.copy_(torch.from_numpy(token_ids))
        self.counted = {path: svc.counters() for path, svc in self.rig.services.items()}
        self.oracle_counted = dict(self.rig.oracle.counters)
        has_queue = self.rig.setup.records > 0
        decode = 0.8 if has_queue else 0.3
        self._prepare((str(self.rng.choice(list(BATCHES), p=[decode, 1 - decode])), 0), redraw=True)
        if has_queue:
            self._append_ready(0)
        actions = QUEUE_ACTIONS if has_queue else ACTIONS
        for action in self.rng.choice(list(actions), self.rng.integers(2, 13), p=list(actions.values())):
            self._act(str(action))

    def _act(self, action: str) -> None:
        if action in BATCHES:
            return self._prepare((action, int(self.rng.integers(SLOTS))), redraw=bool(self.rng.random() < 0.5))
        if action == "advance":
            return self._advance()
        if action == "ready":
            self._ready()
        elif action == "repeat" and self.last is not None:
            self._commit(*self.last)
        elif action == "edit":
            for method, arguments, keywords in random_edits(self.rng, self.rig.setup):
                for target in (*self.rig.services.values(), *([self.rig.oracle] if self.judged else [])):
                    getattr(target, method)(*arguments, **keywords)
            for svc in self.rig.services.values():
                svc.flush()
        elif action == "tamper":
            self._load(tamper(self.rng, self.rig.setup, self._records()))
        else:
            which = self._any_prepared()
            if self.rng.random() < 0.1:
                self._forge(which)
            self._commit_result(which)
        self._compare_tables(action)
        self._read()

    def _ready(self) -> None:
        """Append to a ready queue, or set a batch while a step of the former one is in flight: its result comes late."""
        in_flight = [which for which in self.tickets if which[0] == "prepare"]
        if in_flight and self.rng.random() < 0.5:
            which = in_flight[self.rng.integers(len(in_flight))]
            return self._set_batch(which, DecodeBatch.draw(self.rng, self.rig.setup))
        return self._append_ready(int(self.rng.choice([slot for _, slot in self.tickets])))

    def _append_ready(self, slot: int) -> None:
        state_ids = self.slots.random_ready(self.rng, slot)
        if self.judged:
            self.slots.oracle[slot].set_ready(state_ids)
        for svc in self.rig.services.values():
            svc.set_ready(state_ids, slot)
            svc.flush()

    def _read(self) -> None:
        """Read the records of some slots: what the host knows when it sets the next batch."""
        for slot in self.slots.due(self.rng):
            for path, record, expected in self.slots.read(slot, self.judged):
                self._compare(f"record of slot {slot}", path, record, expected)

    def _advance(self) -> None:
        """Steps as an engine makes them, over batches that stay: what a commit left is what the next prepare finds."""
        for _ in range(self.rng.integers(1, LONGEST_ADVANCE + 1)):
            which = self._any_prepared()
            self._prepare(which)
            self._commit_result(which)
            self._compare_tables("commit")
            self._read()

    def _any_prepared(self) -> Prepare:
        return list(self.tickets)[self.rng.integers(len(self.tickets))]

    def _load(self, records: np.ndarray) -> None:
        if self.judged:
            self.rig.oracle.load_records(records)
        for svc in self.rig.services.values():
            svc.table.records.copy_(torch.from_numpy(records))

    def _records(self) -> np.ndarray:
        """Return the table as the first path has it."""
        return next(iter(self.rig.services.values())).table.records.cpu().numpy().copy()

    def _prepare(self, which: Prepare, redraw: bool = False) -> None:
        action, slot = which
        if redraw or which not in self.batches:
            self._set_batch(which, BATCHES[action].draw(self.rng, self.rig.setup))
        batch = self.batches[which]
        self.cases += batch.rows
        rows = self.slots.oracle[slot].batch[: batch.rows] if action == "prepare" else batch.device_ids.tolist()
        expected = batch.expected(self.rig.oracle, rows) if self.judged else None
        self.prepared[which] = {}
        if self.last is not None and self.last[0] == which and len(self.last[1].num_kept) != batch.rows:
            self.last = None  # its result has another number of rows than the slot now
        for path, svc in self.rig.services.items():
            whole = batch.storage(svc, slot)
            poison(whole)
            metadata = self.prepared[which][path] = batch.prepare(svc, slot)
            if (metadata.batch, metadata.tokens) != (batch.rows, batch.tokens):
                raise Mismatch(f"{action}: {path} made {metadata.batch} rows and {metadata.tokens} tokens of {batch}")
            actual = metadata_arrays(metadata)
            expected = expected or actual
            self._compare(action, path, actual, expected)
            self._refuse_writes_beyond(action, path, actual, metadata_arrays(whole))
        assert expected is not None
        self.tickets[which] = expected["tickets"].copy()
        self._compare_tables(action)

    def _set_batch(self, which: Prepare, batch: Batch) -> None:
        self.batches[which], (action, slot) = batch, which
        strange = not np.array_equal(batch.device_ids, batch.state_ids)
        behind = np.full(self.rig.setup.max_batch - batch.rows, -1, np.int32)
        ids = np.concatenate([batch.device_ids, behind])  # of the whole batch
        if action == "prepare" and self.judged:
            self.slots.oracle[slot].set_batch(batch.state_ids.tolist())
            if strange:
                self.slots.oracle[slot].batch = ids.tolist()
        for svc in self.rig.services.values():
            batch.set_on(svc, slot)
            svc.flush()
            if strange:
                batch.storage(svc, slot).state_ids.copy_(torch.from_numpy(ids))

    def _forge(self, which: Prepare) -> None:
        forged = forge_tickets(self.rng, self.rig.setup, self.tickets[which], self._records())
        self.tickets[which] = forged
        for metadata in self.prepared[which].values():
            metadata.tickets.copy_(torch.from_numpy(forged))

    def _commit_result(self, which: Prepare) -> None:
        self.last = (which, random_result(self.rng, self.rig.setup, self.tickets[which]))
        self._commit(*self.last)

    def _commit(self, which: Prepare, result: Result) -> None:
        action, slot = which
        self._view_blocks(which, result.num_kept)
        self.slots.committed(slot)
        if self.judged:
            rows = None if action == "prepare" else self.batches[which].device_ids.tolist()
            self.slots.oracle[slot].commit(
                self.tickets[which], result.num_kept, result.finished, result.next_tokens, result.kept_tokens, rows
            )
        for path, metadata in self.prepared[which].items():
            svc = self.rig.services[path]
            svc.commit(
                metadata,
                torch.from_numpy(result.num_kept).to(svc.device),
                None if result.finished is None else torch.from_numpy(result.finished).to(svc.device),
                None if result.next_tokens is None else torch.from_numpy(result.next_tokens).to(svc.device),
                None if result.kept_tokens is None else torch.from_numpy(result.kept_tokens).to(svc.device),
            )

    def _compare_marks(self, which: Prepare) -> None:
        found = {path: metadata.marks for path, metadata in self.prepared[which].items()}
        marks = {path: tensor.cpu().numpy() for path, tensor in found.items() if tensor is not None}
        expected = np.array(self.rig.oracle.marks, np.int32) if self.judged else next(iter(marks.values()))
        for path, array in marks.items():
            self._compare("commit", path, {"marks": array}, {"marks": expected})

    def _view_blocks(self, which: Prepare, num_kept: np.ndarray) -> None:
        """View what a drafter would draft next: with the step's result, or without one."""
        geometry = self.rig.setup.geometry
        if geometry.ring < geometry.window + geometry.tokens_per_step:
            return
        given = bool(self.rng.random() < 0.7)
        expected = None
        if self.judged:
            tickets = self.tickets[which].tolist()
            expected = expected_block_view(self.rig.oracle, tickets, num_kept.tolist() if given else None)
        for path, metadata in self.prepared[which].items():
            svc = self.rig.services[path]
            whole = self.batches[which].storage(svc, which[1]).block_view
            assert whole is not None
            for tensor in block_view_tensors(whole).values():
                tensor.fill_(POISON)
            view = svc.view_block(metadata, torch.from_numpy(num_kept).to(svc.device) if given else None)
            actual, stored = block_view_arrays(view), block_view_arrays(whole)
            expected = expected or actual
            self._compare("view_block", path, actual, expected)
            self._refuse_writes_beyond("view_block", path, actual, stored)

    def _compare_tables(self, action: str) -> None:
        expected = self._oracle_table() if self.judged else None
        for path, svc in self.rig.services.items():
            actual = {"records": svc.table.records.cpu().numpy()}  # waits, so that the counters are final
            if svc.table.token_ids is not None:
                actual["token_ids"] = svc.table.token_ids.cpu().numpy()
            counted = [count - self.counted[path][name] for name, count in svc.counters().items()]
            actual["counters"] = np.array(counted, np.int64)
            if self.rig.setup.records:
                actual |= self.slots.batches_of(svc)
            expected = expected or actual
            self._compare(action, path, actual, expected)
        if action in ("commit", "repeat") and self.last is not None and self.rig.setup.snapshot_every:
            self._compare_marks(self.last[0])

    def _oracle_table(self) -> dict[str, np.ndarray]:
        oracle = self.rig.oracle
        table = {"records": oracle.records_array()}
        if oracle.token_ids is not None:
            table["token_ids"] = np.array(oracle.token_ids, np.int64)
        counted = [oracle.counters[name] - count for name, count in self.oracle_counted.items()]
        slots = self.slots.batches() if self.rig.setup.records else {}
        return {**table, "counters": np.array(counted, np.int64), **slots}

    def _refuse_writes_beyond(
        self, action: str, path: str, asked: dict[str, np.ndarray], stored: dict[str, np.ndarray]
    ) -> None:
        """Raise where a path wrote behind what a batch's outputs hold, or into one that was not asked for."""
        for name, array in stored.items():
            written = len(asked.get(name, ()))
            if (array[written:] != POISON).any():
                raise Mismatch(f"{action}: {path} wrote {name} beyond its {written} elements")

    def _compare(self, action: str, path: str, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
        if actual.keys() != expected.keys():
            raise Mismatch(f"{action}: {path} has {sorted(actual)}, expected {sorted(expected)}")
        for name, array in actual.items():
            difference = first_mismatch(array, expected[name])
            if difference is not None:
                raise Mismatch(f"{action}: {path}: {name}: {difference}")
