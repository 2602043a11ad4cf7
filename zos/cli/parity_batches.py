"""Random batches for `zos parity`, decode and prefill: their rows, and what each asks of a service and of the oracle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zos.cli.cases import INT32, one_of
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.oracle_views import expected_tail
from zos.cli.setups import Setup
from zos.metadata import DecodeMetadata, PrefillMetadata, StepMetadata
from zos.service import MetadataService

FEW_ROWS = 8
MORE_ROWS = 64


@dataclass(frozen=True)
class Batch(ABC):
    """Rows of a prepare."""

    setup: Setup
    state_ids: np.ndarray  # int32 [B]: what the host may ask for
    device_ids: np.ndarray  # int32 [B]: the same, or with ids that no host call would let through

    @property
    def rows(self) -> int:
        """B."""
        return len(self.state_ids)

    @property
    def named(self) -> list[int]:
        """State ids of the rows but for the padding behind the last, which a service adds."""
        used = np.flatnonzero(self.state_ids != -1)
        return [int(state_id) for state_id in self.state_ids[: used[-1] + 1]] if used.size else []

    @property
    @abstractmethod
    def tokens(self) -> int:
        """T."""

    @classmethod
    @abstractmethod
    def draw(cls, rng: np.random.Generator, setup: Setup) -> Batch:
        """Make a random one."""

    @abstractmethod
    def set_on(self, svc: MetadataService, slot: int) -> None:
        """Set it on a service, as far as a host call may."""

    @abstractmethod
    def prepare(self, svc: MetadataService, slot: int) -> StepMetadata:
        """Prepare the slot, on which it was set."""

    @abstractmethod
    def expected(self, oracle: PrefillOracle, state_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """What the oracle makes of these rows."""

    @staticmethod
    @abstractmethod
    def storage(svc: MetadataService, slot: int) -> StepMetadata:
        """Views of all that the slot's buffers hold, of which a step writes a part."""


@dataclass(frozen=True)
class DecodeBatch(Batch):
    """Rows of `prepare`."""

    max_tokens: int | None

    @property
    def tokens(self) -> int:
        """The budget, or all of the rows' places."""
        return self.rows * self.setup.geometry.tokens_per_step if self.max_tokens is None else self.max_tokens

    @classmethod
    def draw(cls, rng: np.random.Generator, setup: Setup) -> DecodeBatch:
        """Any number of rows up to max_batch, with or without a token budget."""
        step, most = setup.geometry.tokens_per_step, setup.max_batch
        rows = one_of(rng, rng.integers(0, min(most, FEW_ROWS) + 1), *rng.integers(1, most + 1, 7), most)
        state_ids, device_ids = _ids(rng, setup, rows)
        budget = None
        if setup.token_layout == "packed" and rows > 0 and rng.random() < 0.4:
            budget = int(rng.integers(step, rows * step + 1))
        return cls(setup, state_ids, device_ids, budget)

    def set_on(self, svc: MetadataService, slot: int) -> None:
        """`set_batch`."""
        svc.set_batch(self.named, batch=self.rows, max_tokens=self.max_tokens, slot=slot)

    def prepare(self, svc: MetadataService, slot: int) -> DecodeMetadata:
        """`prepare`."""
        metadata: DecodeMetadata = svc.prepare(slot)
        return metadata

    def expected(self, oracle: PrefillOracle, state_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Outputs of `prepare`."""
        return oracle.prepare(state_ids, self.setup.token_layout, self.max_tokens)

    @staticmethod
    def storage(svc: MetadataService, slot: int) -> DecodeMetadata:
        """Of max_batch rows without a budget."""
        return svc.slot_metadata(slot, svc.max_batch, svc.max_batch * svc.geometry.tokens_per_step)


@dataclass(frozen=True)
class PrefillBatch(Batch):
    """Rows of `prepare_prefill`."""

    full_index: bool
    tail: bool

    @property
    def tokens(self) -> int:
        """All places of a prefill."""
        return self.setup.max_prefill_tokens

    @classmethod
    def draw(cls, rng: np.random.Generator, setup: Setup) -> PrefillBatch:
        """Mostly no more rows than may fit, but up to max_batch."""
        most = setup.max_batch
        few, more = rng.integers(0, min(most, FEW_ROWS) + 1), rng.integers(1, min(most, MORE_ROWS) + 1)
        many = one_of(rng, rng.integers(1, most + 1), most)
        rows = one_of(rng, *[few] * 10, *[more] * 5, many)
        return cls(setup, *_ids(rng, setup, rows), full_index=bool(rng.random() < 0.5), tail=bool(rng.random() < 0.5))

    def set_on(self, svc: MetadataService, slot: int) -> None:
        """`set_prefill_batch`."""
        svc.set_prefill_batch(self.named, batch=self.rows, slot=slot)

    def prepare(self, svc: MetadataService, slot: int) -> PrefillMetadata:
        """`prepare_prefill`."""
        metadata: PrefillMetadata = svc.prepare_prefill(slot, self.full_index, self.tail)
        return metadata

    def expected(self, oracle: PrefillOracle, state_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Outputs of `prepare_prefill`."""
        out = oracle.prepare_prefill(state_ids, self.full_index)
        if self.tail:
            out |= {f"tail.{name}": array for name, array in expected_tail(oracle, out).items()}
        return out

    @staticmethod
    def storage(svc: MetadataService, slot: int) -> PrefillMetadata:
        """Of max_batch rows with the full index and the tail."""
        return svc.slot_prefill_metadata(slot, svc.max_batch, full_index=True, tail=True)


def _ids(rng: np.random.Generator, setup: Setup, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Different states, padding anywhere; and what the device holds instead: at times ids that name no state."""
    pool = max(rows, one_of(rng, min(setup.capacity, MORE_ROWS), setup.capacity))  # at times few, so that batches meet
    ids = (setup.capacity - 1 - rng.permutation(pool)[:rows]).astype(np.int32)
    ids[rng.random(rows) < rng.choice([0.0, 0.1, 0.5])] = -1
    if rng.random() >= 0.1:
        return ids, ids
    strange = rng.choice([INT32.min, -2, setup.capacity, setup.capacity + 1, INT32.max], rows)
    return ids, np.where(rng.random(rows) < 0.1, strange, ids).astype(np.int32)
