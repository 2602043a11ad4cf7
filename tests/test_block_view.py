"""Test that a block drafter's view names exactly its window and its block, from tickets alone, and leaves everything else alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import (
    POISON,
    PrefillOracle,
    as_array,
    assert_bitwise_equal,
    assert_block_view,
    block_view_tensors,
    random_steps,
)

NEAR_THE_END = 2**31 - 1 - 300


def service(device: str, rows: int = 4, **options: Any) -> zos.MetadataService:
    return zos.MetadataService(
        **{"capacity": 16, "max_batch": rows, "device": device, "max_prefill_tokens": 300, **options}
    )


def viewed(svc: zos.MetadataService, metadata: zos.DecodeMetadata, num_kept: list[int] | None) -> zos.BlockView:
    """View into poisoned buffers."""
    assert metadata.block_view is not None
    for tensor in block_view_tensors(metadata.block_view).values():
        tensor.fill_(POISON)
    kept = None if num_kept is None else torch.tensor(num_kept, dtype=torch.int32, device=svc.device)
    return svc.view_block(metadata, kept)


def random_records(rng: np.random.Generator, window: int, ring: int, step: int) -> np.ndarray:
    """Sixteen states of every kind: short, long, near int32's end, prefilling, not live."""
    records = np.zeros((16, 16), np.int32)
    records[:, 0] = rng.choice([1, 1, 1, 1, 0, 2, 4], 16)
    records[:, 1] = rng.choice([0, 1, step, step + 1, 100], 16, p=[0.1, 0.2, 0.5, 0.1, 0.1])
    records[:, 2] = rng.choice([0, 1, window, 3 * ring, 1000, NEAR_THE_END, 2**31 - 2 - step], 16)
    records[:, 3] = np.where(rng.random(16) < 0.6, 0, np.minimum(records[:, 2].astype(np.int64) + 250, 2**31 - 1))
    records[:, 4] = np.maximum(0, records[:, 2] - rng.choice([0, 3, 50, 2000], 16))
    records[:, 6] = rng.integers(0, 9, 16)
    return records


def changed(rng: np.random.Generator, records: np.ndarray) -> np.ndarray:
    """The table as it may be when the view is made: sequences paused, ended, replaced, their valid starts raised."""
    records = records.copy()
    records[rng.random(16) < 0.1, 0] = rng.choice([0, 2, 3])
    records[rng.random(16) < 0.1, 0] = 4
    records[rng.random(16) < 0.1, 6] += 1
    records[rng.random(16) < 0.1, 4] += rng.integers(1, 9)
    return records


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(("window", "drafts", "ring"), [(128, 5, 134), (7, 3, 12), (1, 0, 2), (40, 24, 77)])
def test_against_the_oracle(device: str, window: int, drafts: int, ring: int, prefill: bool, seed: int) -> None:
    """Random tickets, tables and results, every output, bit for bit."""
    rng = np.random.default_rng(seed)
    rows, geometry, layout = 9, zos.RingGeometry(window, drafts, ring), str(rng.choice(["packed", "strided"]))
    step = geometry.tokens_per_step
    svc = service(device, rows, geometry=geometry, token_layout=layout)
    oracle = PrefillOracle(16, window=window, ring=ring, tokens_per_step=step, max_prefill_tokens=300)
    blocks = 0
    for _ in range(30):
        records = random_records(rng, window, ring, step)
        svc.table.records.copy_(torch.from_numpy(records))
        ids = [int(i) if rng.random() < 0.9 else -1 for i in rng.permutation(16)[: rng.integers(0, rows + 1)]]
        (svc.set_prefill_batch if prefill else svc.set_batch)(ids, batch=len(ids))
        metadata = svc.prepare_prefill() if prefill else svc.prepare()
        tickets = as_array(metadata.tickets).copy()
        records = changed(rng, as_array(svc.table.records))
        svc.table.records.copy_(torch.from_numpy(records))
        oracle.load_records(records)
        kept = rng.integers(0, np.maximum(tickets[:, 3], 0) + 1)
        kept = np.where(rng.random(len(ids)) < 0.1, rng.choice([-(2**31), -1, 2**31 - 1], len(ids)), kept)
        kept = np.where(rng.random(len(ids)) < 0.1, tickets[:, 3] + 1, kept).astype(np.int32)
        for num_kept in (None, kept.tolist()):
            view = viewed(svc, metadata, num_kept)
            assert_block_view(view, oracle, tickets, num_kept)
            blocks += int((view.swa_len > 0).sum())
        assert_bitwise_equal(svc.table.records, records, "records")
        assert_bitwise_equal(metadata.tickets, tickets, "tickets")
    assert blocks > 0


def test_figures(device: str) -> None:
    """Position 1000, two kept: 134 keys 874 … 1007 from slot 70 on, the block's own slots 64 … 69; a young one sees fewer."""
    svc = service(device)
    svc.admit(state_id=3, q_start=1000, seqlen_q=3)
    svc.admit(state_id=5, q_start=20, seqlen_q=6, swa_valid_start=10)
    svc.set_batch([3, -1, 5])
    view = viewed(svc, svc.prepare(), [2, 0, 6, 0])
    assert view.kv_swa_index.shape == (4 * 6, 192)
    assert view.kv_swa_index_offset_len[::6].tolist() == [[472, 134], [0, 0], [680, 22], [0, 0]]
    assert view.kv_swa_index[5].tolist() == [*range(472, 536), *range(402, 472)] + [-1] * 58
    assert view.swa_write_slot[:6].tolist() == list(range(466, 472))
    assert view.kv_swa_index[12, :23].tolist() == [*range(680, 702), -1]
    assert view.positions.tolist() == [*range(1002, 1008), *[0] * 6, *range(26, 32), *[0] * 6]
    assert view.token_row[::6].tolist() == [0, -1, 2, -1] and view.token_state_id[::6].tolist() == [3, -1, 5, -1]


def test_chunks_keep_all(device: str) -> None:
    """A chunk's block begins behind it whatever num_kept holds, and without num_kept at its first token."""
    svc = service(device)
    svc.admit(state_id=3, prompt_end=500, chunk_q=200)
    svc.set_prefill_batch([3])
    metadata = svc.prepare_prefill()
    assert viewed(svc, metadata, [-9]).positions.tolist() == list(range(200, 206))
    assert viewed(svc, metadata, None).positions.tolist() == list(range(6))


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_every_block_sees_its_window(device: str, layout: str, seed: int) -> None:
    """A drafter's ring, written by steps and blocks alike, holds under a view's index exactly the window and the block.

    Each drafted block overwrites what later steps write again, so one slot too few in the ring would show.
    """
    rng = np.random.default_rng(seed)
    geometry = zos.RingGeometry(9, 3)
    svc = service(device, 4, geometry=geometry, token_layout=layout)
    for state_id in range(4):
        svc.admit(state_id=state_id, prompt_end=int(rng.integers(1, 40)), chunk_q=int(rng.integers(1, 5)))
    svc.set_batch(range(4))
    svc.set_prefill_batch(range(4))
    held = np.full(16 * geometry.ring, -1, np.int64)  # position in each slot
    for metadata, kept in random_steps(svc, 40, rng):
        slots = as_array(metadata.swa_write_slot)
        held[slots[slots >= 0]] = as_array(metadata.positions)[slots >= 0]
        view = block_view_tensors(viewed(svc, metadata, kept.tolist()))
        arrays = {name: as_array(tensor) for name, tensor in view.items()}
        mine = arrays["token_row"] >= 0
        assert set(arrays["token_row"][mine]) == set(np.flatnonzero(as_array(metadata.seqlens_q)))
        held[arrays["swa_write_slot"][mine]] = arrays["positions"][mine]
        for place in np.flatnonzero(mine):
            row = arrays["token_row"][place]
            start = as_array(metadata.seqlens_k)[row] - as_array(metadata.seqlens_q)[row] + kept[row]
            index = arrays["kv_swa_index"][place]
            seen = held[index[index >= 0]].tolist()
            assert seen == list(range(max(start - geometry.window, 0), start + geometry.tokens_per_step))
            assert arrays["positions"][place] == start + place % geometry.tokens_per_step


def test_after_commit_the_ticket_decides(device: str) -> None:
    """The block stays where it was once its step is committed; a finished sequence has none."""
    svc = service(device)
    for state_id in (1, 2):
        svc.admit(state_id=state_id, q_start=50)
    svc.set_batch([1, 2], batch=2)
    metadata = svc.prepare()
    kept = torch.tensor([4, 4], dtype=torch.int32, device=device)
    svc.commit(metadata, kept, torch.tensor([False, True], device=device))
    assert viewed(svc, metadata, [4, 4]).positions.tolist() == [*range(54, 60), *[0] * 6]


def test_addresses_stay(device: str) -> None:
    """A captured drafter reads the same addresses for as long as the batch's shape stays, and each slot has its own."""
    svc = service(device, metadata_slots=2)
    svc.admit(state_id=1, q_start=5)
    views = []
    for slot in (0, 0, 1):
        svc.set_batch([1], slot=slot)
        views.append(svc.view_block(svc.prepare(slot)))
    for field in fields(zos.BlockView):
        first, again, other = (getattr(view, field.name).data_ptr() for view in views)
        assert first == again != other


def test_within_a_loop(device: str) -> None:
    """A loop whose step drafts a block before its commit, captured or not, keeps what the block says and views every row."""
    svc = service(device, rows=4)
    seen = torch.zeros(4 * 6, dtype=torch.int64, device=device)
    for state_id in range(3):
        svc.admit(state_id=state_id, q_start=100 * state_id)

    def step(metadata: zos.DecodeMetadata) -> torch.Tensor:
        kept = torch.where(metadata.seqlens_q > 0, 1 + metadata.seqlens_k % 3, 0).to(torch.int32)
        view = svc.view_block(metadata, kept)
        seen[: len(view.positions)].copy_(view.positions)
        return kept

    loop = zos.DecodeLoop(svc, step, buckets=(4,))
    loop.set_batch([0, 2, 1])
    for _ in range(5):
        loop.run(steps=2)
        starts = as_array(svc.table.q_start)[[0, 2, 1]]
        expected = np.concatenate([starts[:, None] + np.arange(6), np.zeros((1, 6), np.int64)]).reshape(-1)
        assert_bitwise_equal(seen, expected.astype(np.int64), "positions")
    svc.check()


def test_refusals(device: str) -> None:
    """A short ring, foreign or replaced metadata and a wrong num_kept are named before anything is launched."""
    svc, other = service(device), service(device)
    short = service(device, geometry=zos.RingGeometry(ring=133))
    for one in (svc, other, short):
        one.admit(state_id=1)
        one.set_batch([1], batch=2)
    metadata = svc.prepare()
    before = viewed(svc, metadata, None).positions.clone()
    with pytest.raises(ValueError, match=r"ring=133 .* window=128 and tokens_per_step=6 need 134"):
        short.view_block(short.prepare())
    with pytest.raises(ValueError, match="another MetadataService"):
        svc.view_block(other.prepare())
    with pytest.raises(ValueError, match="not what prepare returned"):
        svc.view_block(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape of num_kept"):
        svc.view_block(metadata, torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="dtype of num_kept"):
        svc.view_block(metadata, torch.zeros(2, device=device))
    svc.set_batch([1], batch=3)
    svc.prepare()
    with pytest.raises(zos.MetadataReplacedError, match="2 rows"):
        svc.view_block(metadata)
    assert_bitwise_equal(metadata.block_view.positions, before, "positions")


def test_opcheck(device: str) -> None:
    """Schema, fake implementation and functionalisation agree; a short ring or an index that is no whole vectors is refused."""
    svc = service(device)
    svc.admit(state_id=1, q_start=300)
    svc.set_batch([1, -1], batch=2)
    metadata = svc.prepare()
    outputs = [tensor.clone() for tensor in block_view_tensors(metadata.block_view).values()]
    kept = torch.tensor([3, 0], dtype=torch.int32, device=device)
    inputs = (svc.table.records, metadata.tickets, kept)
    torch.library.opcheck(torch.ops.zos.view_block.default, (*inputs, *outputs, 128, 134, 6))
    with pytest.raises(ValueError, match="ring=133 is too short"):
        torch.ops.zos.view_block(*inputs, *outputs, 128, 133, 6)
    outputs[1] = outputs[1][:, :135].contiguous()
    with pytest.raises(ValueError, match="shape of kv_swa_index"):
        torch.ops.zos.view_block(*inputs, *outputs, 128, 134, 6)
