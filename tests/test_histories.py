"""Test that any split of a sequence into chunks and decode steps, with any rejections, shows every query exactly its window.

Each ring slot holds what was last written there: a token's position, or a mark where a draft was rejected. So a slot that a query
reads at the wrong time shows. A share of the sequences is run with real entries, whose bytes are compared. ZOS_HISTORIES sets how
many sequences are run (default 10,000; a tenth of them on a GPU, where each step is looked at from the host).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal, kept_tokens, random_steps
from zos.metadata import StepMetadata

HISTORIES = int(os.environ.get("ZOS_HISTORIES", "10000"))
SEQUENCES = 50  # of one service at a time
ROUNDS = 14
LONGEST_CHUNK = 60
REJECTED = -(10**6)  # a rejected draft's entry at position p is REJECTED - p
GPU_SHARE, BYTES_SHARE = 10, 25  # one history in so many
GEOMETRIES = [(128, 5, 134), (128, 5, 133), (5, 3, 8), (1, 2, 3)]  # window, drafts, ring
SPARE_STATES = 3  # never admitted
LAYER = 1  # whose ring is written, of a slot of several layers
LATENTS = 4093  # a prime: no two of so many neighbouring positions of a sequence share a latent


def services(device: str, share: int) -> int:
    """How many services a geometry is run with, one history in `share` of the CPU's."""
    return max(1, HISTORIES // (share * (GPU_SHARE if device == "cuda" else 1)) // SEQUENCES // len(GEOMETRIES))


def new_service(
    device: str, geometry: zos.RingGeometry, ids: list[int], rng: np.random.Generator
) -> zos.MetadataService:
    """Prompts of random length in random chunks, some by bounded replay; the batches are set, the edits flushed."""
    window, tokens = geometry.window, SEQUENCES * LONGEST_CHUNK
    svc = zos.MetadataService(max(ids) + 1, SEQUENCES, geometry, device, max_prefill_tokens=tokens)
    for state_id in ids:
        prompt = int(rng.integers(0, 4 * window + 20))
        hit = int(rng.integers(0, prompt + 1)) if rng.random() < 0.3 else 0
        svc.admit(state_id, prefix_hit=hit, prompt_end=prompt, chunk_q=int(rng.integers(1, LONGEST_CHUNK)))
    svc.set_prefill_batch(ids)
    svc.set_batch(ids)
    svc.flush()
    return svc


def window_of(metadata: StepMetadata, valid_start: np.ndarray, window: int) -> np.ndarray:
    """Positions that each live query must see, oldest first, then -1: int64 [T, W]."""
    row, position = as_array(metadata.token_row), as_array(metadata.positions)
    first = np.maximum(np.maximum(position - window + 1, valid_start[row]), 0)
    seen = first[:, None] + np.arange(window)
    return np.where((seen <= position[:, None]) & (row[:, None] >= 0), seen, -1)


def check(seen: np.ndarray, metadata: StepMetadata, kept: np.ndarray, valid_start: np.ndarray, window: int) -> None:
    """Compare what the kept queries see; a rejected query's own context does not count."""
    expected = window_of(metadata, valid_start, window)
    wrong = np.argwhere((seen != expected) & kept_tokens(metadata, kept)[:, None])
    assert not len(wrong), f"token {wrong[0][0]} sees {seen[tuple(wrong[0])]} instead of {expected[tuple(wrong[0])]}"


@pytest.mark.parametrize(("window", "drafts", "ring"), GEOMETRIES)
def test_histories(device: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """Prompts in random chunks (some by bounded replay), then decode steps with random rejections and lengths."""
    rng = np.random.default_rng(seed)
    for _ in range(services(device, 1)):
        svc = new_service(device, zos.RingGeometry(window, drafts, ring), list(range(SEQUENCES)), rng)
        held = np.full(SEQUENCES * ring, REJECTED, np.int64)  # by ring slot
        valid_start = as_array(svc.table.swa_valid_start.clone()).astype(np.int64)
        for metadata, kept in random_steps(svc, ROUNDS, rng):
            position = as_array(metadata.positions)
            entries = np.where(kept_tokens(metadata, kept), position, REJECTED - position)
            if isinstance(metadata, zos.PrefillMetadata):  # load, attend, store
                seen = seen_in_prefill(metadata, entries, held, svc.geometry)
                write(metadata, entries, held)
            else:  # store, attend
                write(metadata, entries, held)
                index = as_array(metadata.kv_swa_index)
                seen = np.where(index >= 0, held[index], -1)
            check(seen, metadata, kept, valid_start, window)
        svc.check()
        for state_id, q_start in enumerate(svc.table.q_start.tolist()):
            for position in range(max(0, q_start - window, int(valid_start[state_id])), q_start):
                assert held[state_id * ring + position % ring] == position


def seen_in_prefill(
    metadata: zos.PrefillMetadata, entries: np.ndarray, held: np.ndarray, geometry: zos.RingGeometry
) -> np.ndarray:
    """What each query sees of the loaded history and the step's own entries, through the full index: int64 [T, W]."""
    history_rows = SEQUENCES * geometry.window
    buffer = np.full(history_rows + metadata.tokens, REJECTED, np.int64)
    plan = as_array(metadata.swa_load_plan)
    assert plan[:, :, 3].sum() == history_rows
    for state_id, slot, to, rows in plan.reshape(-1, 4)[plan.reshape(-1, 4)[:, 0] >= 0]:
        buffer[to : to + rows] = held[state_id * geometry.ring + slot :][:rows]
    buffer[history_rows:] = entries
    assert metadata.kv_swa_full_index is not None
    index = as_array(metadata.kv_swa_full_index)
    return np.where(index >= 0, buffer[index], -1)


def write(metadata: StepMetadata, entries: np.ndarray, held: np.ndarray) -> None:
    """Write entries at their slots; no slot is written twice in one call."""
    slots = as_array(metadata.swa_write_slot)
    named = slots[slots >= 0]
    assert len(np.unique(named)) == len(named)
    held[named] = entries[slots >= 0]


@pytest.mark.parametrize(("window", "drafts", "ring"), GEOMETRIES)
def test_ring_bytes(device: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """The window's entries are, byte for byte, those of the kept tokens stored one by one; nothing else in memory changes."""
    rng = np.random.default_rng(seed)
    geometry = zos.RingGeometry(window, drafts, ring)
    compression = [(zos.CompressionRing(2, geometry.tokens_per_step), 64, 1)]
    layout = zos.StateSlotLayout(geometry, stored_layers=2, dropped_layers=1, draft_layers=1, compression=compression)
    table = torch.from_numpy(rng.standard_normal((LATENTS, layout.entry.fp8_values)).astype(np.float32)).to(device)

    def latents(state_id: torch.Tensor, position: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Latent of a sequence's token, another one where the token is a draft to be rejected: fp32 [T, D]."""
        return table[(state_id.long() * 1699 + position * 1021 + (~kept).long() * 613) % LATENTS]

    for _ in range(services(device, BYTES_SHARE)):
        ids = [int(state_id) for state_id in rng.permutation(SEQUENCES + SPARE_STATES)[:SEQUENCES]]
        svc = new_service(device, geometry, ids, rng)
        start = svc.table.q_start.clone().tolist()
        offset, gap = int(rng.integers(1, 64)), int(rng.integers(1, 4)) * layout.slot_multiple
        states, pitch = SEQUENCES + SPARE_STATES, layout.slot_bytes + gap
        random_bytes = rng.integers(0, 256, offset + states * pitch, dtype=np.uint8)
        memory = torch.from_numpy(random_bytes).to(device)
        cache = zos.SwaCache(layout, states, device, memory[offset:], pitch)
        before = memory.clone()
        for metadata, kept in random_steps(svc, ROUNDS, rng):
            is_kept = torch.from_numpy(kept_tokens(metadata, kept)).to(device)
            values = latents(metadata.token_state_id, metadata.positions, is_kept)
            torch.ops.zos.swa_ring_store(values, metadata.swa_write_slot, cache.layer(LAYER))
        svc.check()
        q_start, head = svc.table.q_start.tolist(), svc.table.head.tolist()

        may_change = torch.zeros_like(memory)  # bytes of the slots that positions start … head-1 take
        slots = zos.SwaCache(layout, states, device, may_change[offset:], pitch).layer(LAYER)
        for state_id in ids:
            slots[state_id, [position % ring for position in range(start[state_id], head[state_id])]] = 1
        assert_bitwise_equal(memory[may_change == 0], before[may_change == 0], "bytes of nobody, or of others")

        places = [(s, p) for s in ids for p in range(max(start[s], q_start[s] - window), q_start[s])]
        state_id, position = torch.tensor(places, device=device).unbind(1)
        plain = torch.empty(len(places), 1, 1, layout.entry.entry_bytes, dtype=torch.uint8, device=device)
        kept_latents = latents(state_id, position, torch.ones_like(position, dtype=torch.bool))
        torch.ops.zos.swa_ring_store(kept_latents, torch.arange(len(places), device=device), plain)
        assert_bitwise_equal(cache.layer(LAYER)[state_id, position % ring, 0], plain[:, 0, 0], "entries of the window")
