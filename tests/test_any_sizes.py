"""Test that sizes of any kind are right on every path: random windows, drafts, rings and ratios through random histories."""

from __future__ import annotations

import numpy as np

import zos
from zos.cli.parity_round import Rig, Round
from zos.cli.setups import Setup

WINDOWS = (1, 2, 3, 31, 33, 127, 128, 129, 1000, 4096)
RATIOS = (1, 2, 3, 5, 128, 1000, 1023, 1024)
MOST_DRAFTS = 16
SETUPS_DRAWN = 40


def random_sizes(rng: np.random.Generator) -> Setup:
    """Any window, drafts, ring and ratios; nothing a power of two more often than chance has it."""
    window, drafts = int(rng.choice(WINDOWS)), int(rng.integers(0, MOST_DRAFTS + 1))
    step, least = drafts + 1, window + drafts
    ring = least + int(rng.choice([0, 1, step, rng.integers(0, 2 * window + 1)]))
    ratios = rng.choice(RATIOS, rng.integers(0, 3), replace=False).tolist()
    return Setup(
        zos.RingGeometry(window, drafts, ring),
        str(rng.choice(["packed", "strided"])),
        tuple(zos.CompressionRing(ratio, step, overlap=bool(rng.random() < 0.5)) for ratio in ratios),
        carry_tokens=bool(rng.random() < 0.5),
        max_prefill_tokens=int(rng.integers(1, 200)),
        capacity=int(rng.choice([40, 300])),
        max_batch=40,
        snapshot_every=int(rng.choice([0, 1, window])),
        records=int(rng.choice([0, 12])),
    )


def test_any_sizes(device: str, seed: int) -> None:
    """No path takes a window of 128, a power of two, or a ring with room for granted."""
    rng, rows = np.random.default_rng(seed), 0
    for _ in range(SETUPS_DRAWN):
        setup = random_sizes(rng)
        one = Round(Rig.make(setup, (device,)), rng, judged=True)  # raises Mismatch
        one.run()
        rows += one.cases
    assert rows > SETUPS_DRAWN
