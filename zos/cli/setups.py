"""Sizes that `zos parity` runs services and oracle with, the model family's and odd ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zos.cli.oracle_prefill import PrefillOracle
from zos.geometry import CompressionRing, RingGeometry
from zos.service import MetadataService

SLOTS = 3
RECORDS = 12  # of a mailbox: few, so that it goes round


@dataclass(frozen=True)
class Setup:
    """Sizes of a service, and of the oracle that judges it."""

    geometry: RingGeometry
    token_layout: str
    compression: tuple[CompressionRing, ...] = ()
    carry_tokens: bool = False
    max_prefill_tokens: int = 8192
    capacity: int = 384
    max_batch: int = 256
    snapshot_every: int = 0  # tokens between boundaries of snapshots, 0 for none
    records: int = 0  # of each slot's mailbox, beside which there is a ready queue; 0: neither

    def service(self, device: str) -> MetadataService:
        """Make a service with every state admitted, so that edits of any of them are legal."""
        svc = MetadataService(
            self.capacity,
            self.max_batch,
            self.geometry,
            device,
            self.max_prefill_tokens,
            self.token_layout,
            self.compression,
            self.carry_tokens,
            SLOTS,
            self.snapshot_every,
        )
        for state_id in range(self.capacity):
            svc.admit(state_id)
        for slot in range(SLOTS if self.records else 0):
            svc.attach_mailbox(slot, self.records, kept_tokens=self.carry_tokens)
            svc.set_ready([], slot)
        svc.flush()
        return svc

    def oracle(self) -> PrefillOracle:
        """Make the oracle of the same sizes."""
        return PrefillOracle(
            self.capacity,
            window=self.geometry.window,
            ring=self.geometry.ring,
            tokens_per_step=self.geometry.tokens_per_step,
            compression=[(ring.ratio, ring.entries) for ring in self.compression],
            max_prefill_tokens=self.max_prefill_tokens,
            carry_tokens=self.carry_tokens,
            snapshot_every=self.snapshot_every,
        )


SEED, ODD, ONE, WIDE = (
    RingGeometry(),
    RingGeometry(7, 3, 12),
    RingGeometry(1, 0, 1),
    RingGeometry(131, 7, 2**20),
)
SETUPS = (
    Setup(
        SEED, "packed", (CompressionRing(2),), max_prefill_tokens=300, snapshot_every=128
    ),  # T > W + R: rows past the ring and its history
    Setup(
        SEED,
        "strided",
        (CompressionRing(2), CompressionRing(4, overlap=True), CompressionRing(128)),
        carry_tokens=True,
        max_prefill_tokens=150,
        records=RECORDS,
    ),
    Setup(
        RingGeometry(128, 5, 133),
        "packed",
        (CompressionRing(128), CompressionRing(4, overlap=True)),
        carry_tokens=True,
        max_prefill_tokens=600,
        snapshot_every=7,
    ),
    Setup(ODD, "packed", (CompressionRing(2, 4),), True, max_prefill_tokens=16, snapshot_every=5, records=RECORDS),
    Setup(
        ODD, "strided", (CompressionRing(3, 4, overlap=True),), max_prefill_tokens=3, records=RECORDS
    ),  # fewer than a decode step
    Setup(ODD, "strided", (CompressionRing(2, 4), CompressionRing(5, 4)), carry_tokens=True, max_prefill_tokens=100),
    Setup(ONE, "packed", (CompressionRing(1, 1),), max_prefill_tokens=5, snapshot_every=1, records=RECORDS),
    Setup(RingGeometry(1, 5), "strided", max_prefill_tokens=64),
    # Slots up to int32's end
    Setup(
        WIDE,
        "packed",
        (CompressionRing(2, 8, entries=2**24),),
        max_prefill_tokens=200,
        capacity=2047,
        records=RECORDS,
    ),
    Setup(WIDE, "strided", (CompressionRing(4, 8, entries=2**24 - 3),), max_prefill_tokens=40, capacity=2047),
    # Batches of two launches, or of several blocks
    Setup(RingGeometry(16, 5), "packed", (CompressionRing(2),), capacity=2600, max_batch=2500, records=RECORDS),
    Setup(RingGeometry(16, 5, 30), "strided", carry_tokens=True, max_prefill_tokens=700, capacity=2600, max_batch=2500),
    Setup(
        SEED,
        "packed",
        (CompressionRing(2),),
        carry_tokens=True,
        max_prefill_tokens=8192,
        snapshot_every=512,
        records=RECORDS,
    ),
)
TOKENS_OF_A_ROW = 8  # prefill places that cost about what a row of a batch does


def random_setup(rng: np.random.Generator) -> Setup:
    """Choose a setup; one of long batches or prefills less often, so that each takes about as long."""
    shares = np.array([1 / max(setup.max_batch, setup.max_prefill_tokens // TOKENS_OF_A_ROW) for setup in SETUPS])
    return SETUPS[rng.choice(len(SETUPS), p=shares / shares.sum())]
