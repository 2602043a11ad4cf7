"""A round of `zos parity`: one table through random steps on every path, compared after each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from zos.cli.cases import (
    Batch,
    Result,
    forge_tickets,
    random_batch,
    random_edits,
    random_result,
    random_table,
    tamper,
)
from zos.cli.compare import POISON, first_mismatch, metadata_arrays, poison
from zos.cli.oracle import Oracle
from zos.cli.setups import SLOTS, Setup
from zos.metadata import DecodeMetadata
from zos.service import MetadataService

# What follows the first prepare of a round, and how often
ACTIONS = {"prepare": 0.3, "commit": 0.35, "repeat": 0.1, "edit": 0.15, "tamper": 0.1}


class Mismatch(Exception):
    """Two paths differ; the message says after what, which path, in what, where first, and both values."""


@dataclass
class Rig:
    """The services and the oracle of one setup; rounds reuse them, as an engine would."""

    setup: Setup
    services: dict[str, MetadataService]
    oracle: Oracle

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
    batches: dict[int, Batch] = field(default_factory=dict)  # slot -> batch set last
    prepared: dict[int, dict[str, DecodeMetadata]] = field(default_factory=dict)  # slot -> path -> metadata
    rows: dict[int, Batch] = field(default_factory=dict)  # slot -> batch of its last prepare
    tickets: dict[int, np.ndarray] = field(default_factory=dict)  # slot -> tickets that a commit finds there
    last: tuple[int, Result] | None = None  # slot and result committed last

    def run(self) -> None:
        """Run it; raises Mismatch at the first difference."""
        records, token_ids = random_table(self.rng, self.rig.setup)
        self._load(records)
        if token_ids is not None:
            self.rig.oracle.token_ids = token_ids.tolist()
            for svc in self.rig.services.values():
                assert svc.table.token_ids is not None
                svc.table.token_ids.copy_(torch.from_numpy(token_ids))
        self.counted = {path: svc.counters() for path, svc in self.rig.services.items()}
        self.oracle_counted = dict(self.rig.oracle.counters)
        self._prepare(0)
        for action in self.rng.choice(list(ACTIONS), self.rng.integers(2, 7), p=list(ACTIONS.values())):
            self._act(str(action))

    def _act(self, action: str) -> None:
        if action == "prepare":
            return self._prepare(int(self.rng.integers(SLOTS)))
        if action == "repeat" and self.last is not None:
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
            slot = int(self.rng.choice(list(self.tickets)))
            if self.rng.random() < 0.1:
                self._forge(slot)
            self.last = (slot, random_result(self.rng, self.rig.setup, self.tickets[slot]))
            self._commit(*self.last)
        self._compare_tables(action)

    def _load(self, records: np.ndarray) -> None:
        if self.judged:
            self.rig.oracle.load_records(records)
        for svc in self.rig.services.values():
            svc.table.records.copy_(torch.from_numpy(records))

    def _records(self) -> np.ndarray:
        """Return the table as the first path has it."""
        return next(iter(self.rig.services.values())).table.records.cpu().numpy().copy()

    def _prepare(self, slot: int) -> None:
        setup = self.rig.setup
        if slot not in self.batches or self.rng.random() < 0.5:
            self._set_batch(slot, random_batch(self.rng, setup))
        batch = self.batches[slot]
        rows = len(batch.device_ids)
        tokens = rows * setup.geometry.tokens_per_step if batch.max_tokens is None else batch.max_tokens
        self.cases += rows
        expected = None
        if self.judged:
            expected = self.rig.oracle.prepare(batch.device_ids, setup.token_layout, batch.max_tokens)
        self.prepared[slot], self.rows[slot] = {}, batch
        if self.last is not None and self.last[0] == slot and len(self.last[1].num_kept) != rows:
            self.last = None  # its result has another number of rows than the slot now
        for path, svc in self.rig.services.items():
            whole = svc.slot_metadata(slot, setup.max_batch, setup.max_batch * setup.geometry.tokens_per_step)
            poison(whole)
            metadata = self.prepared[slot][path] = svc.prepare(slot)
            if (metadata.batch, metadata.tokens) != (rows, tokens):
                raise Mismatch(f"prepare: {path} made {metadata.batch} rows and {metadata.tokens} tokens of {batch}")
            actual = metadata_arrays(metadata)
            expected = expected or actual
            self._compare("prepare", path, actual, expected)
            for name, array in metadata_arrays(whole).items():
                if name != "num_tokens" and (array[len(actual[name]) :] != POISON).any():
                    raise Mismatch(f"prepare: {path} wrote {name} beyond its {len(actual[name])} elements")
        assert expected is not None
        self.tickets[slot] = expected["tickets"].copy()
        self._compare_tables("prepare")

    def _set_batch(self, slot: int, batch: Batch) -> None:
        self.batches[slot] = batch
        rows = len(batch.state_ids)
        used = rows - int(np.argmax(batch.state_ids[::-1] != -1)) if (batch.state_ids != -1).any() else 0
        for svc in self.rig.services.values():
            svc.set_batch(batch.state_ids[:used].tolist(), batch=rows, max_tokens=batch.max_tokens, slot=slot)
            if not np.array_equal(batch.device_ids, batch.state_ids):
                svc.flush()
                state_ids = svc.slot_metadata(slot, rows, rows * self.rig.setup.geometry.tokens_per_step).state_ids
                state_ids.copy_(torch.from_numpy(batch.device_ids))

    def _forge(self, slot: int) -> None:
        state_ids = self.rows[slot].device_ids
        forged = forge_tickets(self.rng, self.rig.setup, state_ids, self.tickets[slot], self._records())
        self.tickets[slot] = forged
        for metadata in self.prepared[slot].values():
            metadata.tickets.copy_(torch.from_numpy(forged))

    def _commit(self, slot: int, result: Result) -> None:
        if self.judged:
            self.rig.oracle.commit(self.tickets[slot], result.num_kept, result.finished, result.next_tokens)
        for path, metadata in self.prepared[slot].items():
            svc = self.rig.services[path]
            svc.commit(
                metadata,
                torch.from_numpy(result.num_kept).to(svc.device),
                None if result.finished is None else torch.from_numpy(result.finished).to(svc.device),
                None if result.next_tokens is None else torch.from_numpy(result.next_tokens).to(svc.device),
            )

    def _compare_tables(self, action: str) -> None:
        expected = self._oracle_table() if self.judged else None
        for path, svc in self.rig.services.items():
            actual = {"records": svc.table.records.cpu().numpy()}  # waits, so that the counters are final
            if svc.table.token_ids is not None:
                actual["token_ids"] = svc.table.token_ids.cpu().numpy()
            counted = [count - self.counted[path][name] for name, count in svc.counters().items()]
            actual["counters"] = np.array(counted, np.int64)
            expected = expected or actual
            self._compare(action, path, actual, expected)

    def _oracle_table(self) -> dict[str, np.ndarray]:
        oracle = self.rig.oracle
        table = {"records": oracle.records_array()}
        if oracle.token_ids is not None:
            table["token_ids"] = np.array(oracle.token_ids, np.int64)
        counted = [oracle.counters[name] - count for name, count in self.oracle_counted.items()]
        return {**table, "counters": np.array(counted, np.int64)}

    def _compare(self, action: str, path: str, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
        if actual.keys() != expected.keys():
            raise Mismatch(f"{action}: {path} has {sorted(actual)}, expected {sorted(expected)}")
        for name, array in actual.items():
            difference = first_mismatch(array, expected[name])
            if difference is not None:
                raise Mismatch(f"{action}: {path}: {name}: {difference}")
