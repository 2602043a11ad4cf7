"""Test that any split of a sequence into chunks and decode steps, with any rejections, shows every query exactly its window.

Each ring slot holds what was last written there: a token's position, or a mark where a draft was rejected. So a slot that a query
reads at the wrong time shows. ZOS_HISTORIES sets how many sequences are run (default 10,000).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import zos

HISTORIES = int(os.environ.get("ZOS_HISTORIES", "10000"))
SEQUENCES = 50  # of one service at a time
REJECTED = -(10**6)  # a rejected draft's entry at position p is REJECTED - p


def window_of(metadata: zos.StepMetadata, valid_start: np.ndarray, window: int) -> np.ndarray:
    """Positions that each live query must see, oldest first, then -1: int64 [T, W]."""
    row, position = metadata.token_row.numpy(), metadata.positions.numpy()
    first = np.maximum(np.maximum(position - window + 1, valid_start[row]), 0)
    seen = first[:, None] + np.arange(window)
    return np.where((seen <= position[:, None]) & (row[:, None] >= 0), seen, -1)


def entries_of(metadata: zos.StepMetadata, kept: np.ndarray) -> np.ndarray:
    """What the step's tokens write: their position, or a rejected draft's mark."""
    row, position = metadata.token_row.numpy(), metadata.positions.numpy()
    j = np.arange(len(row)) - metadata.cu_seqlens_q.numpy()[row]
    return np.where(j < kept[row], position, REJECTED - position)


def check(seen: np.ndarray, metadata: zos.StepMetadata, kept: np.ndarray, valid_start: np.ndarray, window: int) -> None:
    """Compare what the kept queries see; a rejected query's own context does not count."""
    row = metadata.token_row.numpy()
    j = np.arange(len(row)) - metadata.cu_seqlens_q.numpy()[row]
    counts = (row >= 0) & (j < kept[row])
    expected = window_of(metadata, valid_start, window)
    wrong = np.argwhere((seen != expected) & counts[:, None])
    assert not len(wrong), f"token {wrong[0][0]} sees {seen[tuple(wrong[0])]} instead of {expected[tuple(wrong[0])]}"


@pytest.mark.parametrize(("window", "drafts", "ring"), [(128, 5, 134), (128, 5, 133), (5, 3, 8), (1, 2, 3)])
def test_histories(window: int, drafts: int, ring: int, seed: int) -> None:
    """Prompts in random chunks (some by bounded replay), then decode steps with random rejections and lengths."""
    rng = np.random.default_rng(seed)
    geometry = zos.RingGeometry(window, drafts, ring)
    step = geometry.tokens_per_step
    ids = list(range(SEQUENCES))
    for _ in range(max(1, HISTORIES // SEQUENCES // 4)):
        svc = zos.MetadataService(
            capacity=SEQUENCES, max_batch=SEQUENCES, geometry=geometry, device="cpu", max_prefill_tokens=SEQUENCES * 60
        )
        held = np.full(SEQUENCES * ring, REJECTED, np.int64)  # by ring slot
        valid_start = np.zeros(SEQUENCES, np.int64)
        for state_id in ids:
            prompt = int(rng.integers(0, 4 * window + 20))
            hit = int(rng.integers(0, prompt + 1)) if rng.random() < 0.3 else 0
            svc.admit(state_id, prefix_hit=hit, prompt_end=prompt, chunk_q=int(rng.integers(1, 60)))
            valid_start[state_id] = zos.plan_bounded_replay(hit, prompt, window).swa_valid_start
        svc.set_prefill_batch(ids)
        svc.set_batch(ids)
        for _ in range(14):
            _prefill(svc, held, valid_start, window)
            _decode(svc, held, valid_start, window, rng)
            svc.flush()
            for state_id in ids:  # as a drafter does on the device
                if svc.table.q_start[state_id] >= svc.table.prompt_end[state_id]:
                    svc.table.seqlen_q[state_id] = int(rng.integers(1, step + 1))
        svc.check()
        for state_id, q_start in enumerate(svc.table.q_start.tolist()):
            for position in range(max(0, q_start - window, int(valid_start[state_id])), q_start):
                assert held[state_id * ring + position % ring] == position


def _prefill(svc: zos.MetadataService, held: np.ndarray, valid_start: np.ndarray, window: int) -> None:
    """Load, attend, store, commit, for every row (decode rows keep all their tokens here)."""
    metadata = svc.prepare_prefill(full_index=True)
    kept = metadata.seqlens_q.numpy().astype(np.int64)
    buffer = np.full(SEQUENCES * window + metadata.tokens, REJECTED, np.int64)
    plan = metadata.swa_load_plan.numpy()
    assert plan[:, :, 3].sum() == SEQUENCES * window
    for state_id, slot, to, rows in plan.reshape(-1, 4)[plan.reshape(-1, 4)[:, 0] >= 0]:
        buffer[to : to + rows] = held[state_id * svc.geometry.ring + slot :][:rows]
    entries = entries_of(metadata, kept)
    buffer[SEQUENCES * window :] = entries
    assert metadata.kv_swa_full_index is not None
    index = metadata.kv_swa_full_index.numpy()
    check(np.where(index >= 0, buffer[index], -1), metadata, kept, valid_start, window)
    write(metadata, entries, held)
    svc.commit(metadata, torch.from_numpy(kept.astype(np.int32)))


def _decode(
    svc: zos.MetadataService, held: np.ndarray, valid_start: np.ndarray, window: int, rng: np.random.Generator
) -> None:
    """Write first, then attend, then keep a random number of the tokens."""
    metadata = svc.prepare()
    length = metadata.seqlens_q.numpy().astype(np.int64)
    kept = np.minimum(rng.integers(1, svc.geometry.tokens_per_step + 1, SEQUENCES), length)
    kept = np.where((svc.table.q_start < svc.table.prompt_end).numpy(), length, kept)  # a short chunk is kept whole
    write(metadata, entries_of(metadata, kept), held)
    index = metadata.kv_swa_index.numpy()
    check(np.where(index >= 0, held[index], -1), metadata, kept, valid_start, window)
    svc.commit(metadata, torch.from_numpy(kept.astype(np.int32)))


def write(metadata: zos.StepMetadata, entries: np.ndarray, held: np.ndarray) -> None:
    """Write entries at their slots; no slot is written twice in one call."""
    slots = metadata.swa_write_slot.numpy()
    named = slots[slots >= 0]
    assert len(np.unique(named)) == len(named)
    held[named] = entries[slots >= 0]
