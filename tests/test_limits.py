"""Test that sizes at the ends of what is allowed are right on every path, and past them a named error."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal
from tests.twins import Twins
from zos.arguments import INT32_LARGEST
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.parity_round import Rig, Round
from zos.cli.setups import Setup
from zos.table import COLUMNS, RECORD_WORDS, Phase

WINDOWS = (1, 2, 3, 31, 33, 127, 128, 129, 1000, 4096)
RATIOS = (1, 2, 3, 5, 128, 1000, 1023, 1024)
MOST_DRAFTS = 16
SETUPS_DRAWN = 40
LONG_BATCH = 65_537
LARGEST_SLAB = 2**32  # bytes that 32 bits count


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


def test_one_state(device: str) -> None:
    """One state, one row, one token, a ring of one."""
    geometry = zos.RingGeometry(window=1, draft_tokens=0)
    twins = Twins(device, capacity=1, max_batch=1, geometry=geometry, token_layout="packed", max_prefill_tokens=1)
    twins.edit("admit", 0, prompt_end=2, chunk_q=1)
    twins.set_batch([0])
    twins.set_prefill_batch([0])
    for prefill in (True, True, False, False):
        step = twins.prepare(0, prefill)
        twins.commit(step, [1])
        twins.compare()
    assert int(twins.svc.table.q_start[0]) == 4


@pytest.mark.parametrize("token_layout", ["packed", "strided"])
def test_long_batch(device: str, token_layout: str, seed: int) -> None:
    """More rows than a launch's second dimension may have blocks."""
    rng = np.random.default_rng(seed)
    geometry = zos.RingGeometry(window=3, draft_tokens=1)
    step = geometry.tokens_per_step
    svc = zos.MetadataService(
        LONG_BATCH, LONG_BATCH, geometry, device, token_layout=token_layout, compression_ratios=()
    )
    records = np.zeros((LONG_BATCH, RECORD_WORDS), np.int32)
    records[:, COLUMNS["phase"]] = Phase.LIVE
    records[:, COLUMNS["seqlen_q"]] = rng.integers(0, step + 1, LONG_BATCH)
    records[:, COLUMNS["q_start"]] = rng.integers(0, INT32_LARGEST - step, LONG_BATCH)
    svc.table.records.copy_(torch.from_numpy(records))
    ids = rng.permutation(LONG_BATCH).astype(np.int32)
    svc.set_batch(ids)
    metadata = svc.prepare()
    oracle = PrefillOracle(
        LONG_BATCH, window=geometry.window, ring=geometry.ring, tokens_per_step=step, compression=[], max_prefill_tokens=1,
        carry_tokens=False, snapshot_every=0,
    )  # fmt: skip
    oracle.load_records(records)
    expected = oracle.prepare(ids.tolist(), token_layout)
    for name in ("kv_swa_index", "kv_swa_index_offset_len", "swa_write_slot", "positions", "token_row", "cu_seqlens_q"):
        assert_bitwise_equal(as_array(getattr(metadata, name)), expected[name], name)
    svc.commit(metadata, metadata.seqlens_q)
    moved = as_array(svc.table.q_start) - records[:, COLUMNS["q_start"]]
    assert np.array_equal(moved, records[:, COLUMNS["seqlen_q"]])


def test_slots_up_to_the_end_of_int32(device: str) -> None:
    """Capacity * ring just below 2^31: the last state's slots are right; just above: refused by name."""
    geometry = zos.RingGeometry(window=4, draft_tokens=1, ring=2**24 - 1)
    capacity = INT32_LARGEST // geometry.ring
    svc = zos.MetadataService(capacity, 1, geometry, device, token_layout="strided")
    last = geometry.ring - 1
    svc.admit(capacity - 1, q_start=last)
    svc.set_batch([capacity - 1])
    metadata = svc.prepare()
    first = (capacity - 1) * geometry.ring
    assert first + last > 0.99 * INT32_LARGEST
    assert metadata.swa_write_slot.tolist() == [first + last, first]
    assert metadata.kv_swa_index[0].tolist() == [first + last - 3, first + last - 2, first + last - 1, first + last]
    with pytest.raises(ValueError, match=re.escape("capacity * ring=")):
        zos.MetadataService(INT32_LARGEST // geometry.ring + 1, 1, geometry, device)


def test_slab_of_more_than_4_gib(device: str) -> None:
    """Entries past 4 GiB are written and read where they belong, and nothing else is."""
    layout = zos.StateSlotLayout(stored_layers=1)
    slots, entry, window = layout.geometry.ring, layout.entry.entry_bytes, layout.geometry.window
    states = LARGEST_SLAB // (slots * entry) + 2
    shape = (states, slots, 1, entry)
    # NumPy's zeros are memory only once they are touched.
    ring = (
        torch.from_numpy(np.zeros(shape, np.uint8))
        if device == "cpu"
        else torch.zeros(shape, dtype=torch.uint8, device=device)
    )
    values = torch.ones(3, layout.entry.values, device=device)
    torch.ops.zos.swa_ring_store(values, torch.tensor([states * slots - 1, 5, -1], device=device), ring)
    plan = torch.tensor([[[states - 1, slots - 1, 0, 1], [0, 5, 1, 1], [0, 6, 2, 1]]], dtype=torch.int32, device=device)
    history = torch.full((window, layout.entry.values), torch.nan, device=device)
    torch.ops.zos.swa_ring_load(ring, plan, history, window)
    assert bool((history[:2] == 1).all()) and bool((history[2] == 0).all())
