"""Sizes that `zos parity` runs services and oracle with, the model family's and odd ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zos.cli.oracle import Oracle
from zos.geometry import CompressionRing, RingGeometry
from zos.service import MetadataService

SLOTS = 3


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
        )
        for state_id in range(self.capacity):
            svc.admit(state_id)
        svc.flush()
        return svc

    def oracle(self) -> Oracle:
        """Make the oracle of the same sizes."""
        return Oracle(
            self.capacity,
            window=self.geometry.window,
            ring=self.geometry.ring,
            tokens_per_step=self.geometry.tokens_per_step,
            compression=[(ring.ratio, ring.entries) for ring in self.compression],
            max_prefill_tokens=self.max_prefill_tokens,
            carry_tokens=self.carry_tokens,
        )


SEED, ODD, ONE, WIDE = (
    RingGeometry(),
    RingGeometry(7, 3, 12),
    RingGeometry(1, 0, 1),
    RingGeometry(131, 7, 2**20),
)
SETUPS = (
    Setup(SEED, "packed", (CompressionRing(2),)),
    Setup(
        SEED,
        "strided",
        (CompressionRing(2), CompressionRing(4, overlap=True), CompressionRing(128)),
        carry_tokens=True,
    ),
    Setup(
        RingGeometry(128, 5, 133),
        "packed",
        (CompressionRing(128), CompressionRing(4, overlap=True)),
        carry_tokens=True,
    ),
    Setup(ODD, "packed", (CompressionRing(2, 4),), carry_tokens=True, max_prefill_tokens=16),
    Setup(ODD, "strided", (CompressionRing(3, 4, overlap=True),), max_prefill_tokens=3),
    Setup(ONE, "packed", (CompressionRing(1, 1),), max_prefill_tokens=5),
    Setup(RingGeometry(1, 5), "strided", max_prefill_tokens=64),
    Setup(WIDE, "packed", (CompressionRing(2, 8, entries=2**24),), capacity=2047),  # slots up to int32's end
    Setup(WIDE, "strided", (CompressionRing(4, 8, entries=2**24 - 3),), capacity=2047),
    Setup(RingGeometry(16, 5), "packed", (CompressionRing(2),), capacity=2600, max_batch=2500),  # two launches
    Setup(RingGeometry(16, 5, 30), "strided", carry_tokens=True, capacity=2600, max_batch=2500),
)


def random_setup(rng: np.random.Generator) -> Setup:
    """Choose a setup; one of long batches less often, so that each gets about as many rows."""
    shares = np.array([1 / setup.max_batch for setup in SETUPS])
    return SETUPS[rng.choice(len(SETUPS), p=shares / shares.sum())]
