"""Test that a prefill's metadata shows every query exactly its window, whatever the chunks' lengths, and writes every element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import (
    POISON,
    PREFILL_KEYS,
    PrefillOracle,
    assert_bitwise_equal,
    assert_golden,
    golden_cases,
    poison,
    positions_in_ring,
)
from zos.cli.compare import metadata_arrays


def service(device: str, rows: int = 8, max_prefill_tokens: int = 512, **options: Any) -> zos.MetadataService:
    return zos.MetadataService(
        **{"capacity": 4096, "max_batch": rows, "device": device, "max_prefill_tokens": max_prefill_tokens, **options}
    )


def prepared(svc: zos.MetadataService, state_ids: list[int], full_index: bool = True) -> zos.PrefillMetadata:
    """Prepare into poisoned buffers."""
    svc.set_prefill_batch(state_ids)
    poison(svc.prepare_prefill(full_index=full_index))
    return svc.prepare_prefill(full_index=full_index)


@pytest.mark.parametrize("case", golden_cases("prefill"), ids=lambda case: f"{len(case['rows'])}rows")
def test_golden(device: str, case: dict[str, Any]) -> None:
    """Every key of every golden case."""
    rows, expected = case["rows"], case["expect"]
    svc = service(device, len(rows), len(expected["positions"]))
    for row in rows:
        if row["state_id"] >= 0:
            svc.admit(**row)
    arrays = metadata_arrays(prepared(svc, [row["state_id"] for row in rows]))
    assert_golden(arrays, expected, PREFILL_KEYS)


@pytest.mark.parametrize("case", golden_cases("prefill"), ids=lambda case: f"{len(case['rows'])}rows")
def test_golden_on_the_oracle(case: dict[str, Any]) -> None:
    """The oracle gives them too: other tests hold the paths against it."""
    rows, expected = case["rows"], case["expect"]
    oracle = PrefillOracle(
        4096,
        window=128,
        ring=134,
        tokens_per_step=6,
        compression=((2, 7),),
        max_prefill_tokens=len(expected["positions"]),
    )
    for row in rows:
        if row["state_id"] >= 0:
            oracle.admit(**row)
    out = oracle.prepare_prefill([row["state_id"] for row in rows])
    assert_golden(out, expected, PREFILL_KEYS)


def test_seed_figures(device: str) -> None:
    """2,048 cached, 300 new: ring rows 44…133 then 0…37; query 0 sees 127 history keys and 1 new, query 200 none and 128."""
    svc = service(device)
    svc.admit(state_id=3, q_start=2048, seqlen_q=300)
    svc.admit(state_id=5, q_start=0, seqlen_q=10)
    metadata = prepared(svc, [3, 5])
    assert metadata.swa_load_plan[0].tolist() == [[3, 44, 0, 90], [3, 0, 90, 38], [-1, 0, 0, 0]]
    assert metadata.swa_load_plan[1].tolist() == [[-1, 0, 128, 128], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    assert metadata.kv_swa_full_index_pivots[0].tolist() == [1, 127, 256, 1]
    assert metadata.kv_swa_full_index_pivots[200].tolist() == [128, 0, 256 + 73, 128]
    assert metadata.last_token_index.tolist() == [299, 309]


@pytest.mark.parametrize(("window", "drafts", "ring"), [(128, 5, 134), (7, 3, 12), (1, 0, 1), (40, 16, 77)])
def test_against_the_oracle(device: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """Random rows of every kind (chunks, decode rows, padding, errors, deferred), every output, bit for bit."""
    rng = np.random.default_rng(seed)
    limit, rows = 300, 9
    geometry = zos.RingGeometry(window, drafts, ring)
    rings = (2, zos.CompressionRing(4, geometry.tokens_per_step, overlap=True))
    svc = service(device, rows, limit, capacity=16, geometry=geometry, compression_ratios=rings, carry_tokens=True)
    for _ in range(30):
        records = np.zeros((16, 16), np.int32)
        records[:, 0] = rng.choice([1, 1, 1, 1, 0, 2, 4], 16)
        records[:, 1] = rng.choice([0, 1, 6, 40, 100, 299, 300, 301, -1], 16)
        records[:, 2] = rng.choice([0, 1, window - 1, window, 3 * ring, 1000, 2**31 - 300, -2], 16)
        records[:, 3] = np.where(rng.random(16) < 0.5, 0, np.minimum(records[:, 2].astype(np.int64) + 250, 2**31 - 1))
        records[:, 4] = np.maximum(-1, records[:, 2] - rng.choice([-1, 0, 3, 50, 2000], 16))
        records[:, 5] = rng.integers(0, 1200, 16)
        records[:, 6] = rng.integers(0, 9, 16)
        ids = [int(i) if rng.random() < 0.9 else -1 for i in rng.permutation(16)[: rng.integers(0, rows + 1)]]
        oracle = PrefillOracle(
            16, window=window, ring=ring, tokens_per_step=geometry.tokens_per_step,
            compression=tuple((r.ratio, r.entries) for r in svc.compression), max_prefill_tokens=limit, carry_tokens=True,
        )  # fmt: skip
        oracle.load_records(records)
        svc.table.records.copy_(torch.from_numpy(records))
        expected = oracle.prepare_prefill(ids, full_index=True)
        arrays = metadata_arrays(prepared(svc, ids))
        assert set(arrays) == set(expected)
        for name, array in arrays.items():
            assert_bitwise_equal(array, expected[name], name)
        assert_bitwise_equal(svc.table.records, oracle.records_array(), "records")


def test_every_query_sees_its_window(device: str, seed: int) -> None:
    """Fill the history buffer by the load plan with the positions that the ring holds: pivots and index show exactly the window."""
    rng = np.random.default_rng(seed)
    svc = service(device, 3, 700)
    for _ in range(5):
        starts = [int(rng.integers(0, 600)), 0, int(rng.integers(100, 5000))]
        valid = [int(rng.integers(0, start + 1)) for start in starts]
        for state_id, (start, valid_start) in enumerate(zip(starts, valid, strict=True)):
            svc.admit(state_id=state_id, q_start=start, seqlen_q=int(rng.integers(1, 230)), swa_valid_start=valid_start)
        metadata = prepared(svc, [0, 1, 2])
        plan, held = metadata.swa_load_plan.tolist(), [positions_in_ring(start, 134) for start in starts]
        assert sum(segment[3] for row in plan for segment in row) == 3 * 128
        buffer = np.full(3 * 128 + 700, -1, np.int64)
        for state_id, slot, to, rows in (tuple(segment) for row in plan for segment in row):
            if state_id >= 0:
                buffer[to : to + rows] = held[state_id][slot : slot + rows]
        buffer[3 * 128 :] = metadata.positions.tolist()
        full = metadata.kv_swa_full_index
        assert full is not None
        for place, index in enumerate(full.tolist()):
            row = int(metadata.token_row[place])
            seen = [int(buffer[i]) for i in index if i >= 0]
            if row < 0:
                assert seen == []
                continue
            position = int(metadata.positions[place])
            assert seen == list(range(max(position - 127, valid[row], 0), position + 1))
            first, history, second, chunk = metadata.kv_swa_full_index_pivots[place].tolist()
            assert [*buffer[first : first + history], *buffer[second : second + chunk]] == seen
        for state_id in range(3):
            svc.release(state_id)


@pytest.mark.parametrize("tokens", [65_535, 65_536, 65_537])
def test_a14_more_tokens_than_a_grid_axis(device: str, tokens: int) -> None:
    """One prefill past 65,535 tokens: rows on both sides of the limit are right and none is left unwritten."""
    svc = service(device, 1, tokens, capacity=4)
    svc.admit(state_id=3, q_start=0, seqlen_q=tokens)
    metadata = prepared(svc, [3], full_index=False)
    offsets = metadata.kv_swa_index_offset_len
    assert not (offsets == POISON).any() and not (metadata.positions == POISON).any()
    assert offsets[65_534].tolist() == [417, 128]
    for place in range(65_535, tokens):
        assert offsets[place].tolist() == [402 + (place - 127) % 134, 128]
    assert metadata.positions.tolist() == list(range(tokens))


def test_a14_figures(device: str) -> None:
    """Row 65,535 = [418, 128] and row 65,536 = [419, 128]."""
    svc = service(device, 1, 65_537, capacity=4)
    svc.admit(state_id=3, q_start=0, seqlen_q=65_537)
    offsets = prepared(svc, [3], full_index=False).kv_swa_index_offset_len
    assert offsets[65_535:].tolist() == [[418, 128], [419, 128]]


def test_a10_a_cut_prefix_shortens_the_window(device: str) -> None:
    """A hit cut to 960 needs ring rows from 833; where only those from 896 exist, the window is 65 keys and never 128."""
    svc = service(device)
    svc.admit(state_id=3, q_start=960, seqlen_q=6)
    svc.admit(state_id=4, q_start=960, seqlen_q=6, swa_valid_start=896)
    metadata = prepared(svc, [3, 4])
    assert metadata.kv_swa_index_offset_len[0].tolist() == [431, 128]
    assert metadata.swa_len[6].item() == 65
    assert metadata.swa_load_plan[1].tolist()[0] == [-1, 0, 128, 64]


def test_chunks_advance_on_the_device(device: str) -> None:
    """Prepare, commit, again: chunk by chunk to the prompt's end, with no edit from the host; then decode steps."""
    svc = service(device, carry_tokens=True)
    svc.admit(state_id=3, prompt_end=1000, chunk_q=300)
    svc.admit(state_id=4, q_start=77, seqlen_q=6)
    svc.set_prefill_batch([3, -1, 4])
    lengths = []
    for _ in range(5):
        metadata = svc.prepare_prefill()
        lengths.append(metadata.seqlens_q.tolist())
        svc.commit(metadata, metadata.seqlens_q)
    assert lengths == [[300, 0, 6], [300, 0, 6], [300, 0, 6], [100, 0, 6], [6, 0, 6]]
    assert svc.table.q_start[3:5].tolist() == [1006, 107]
    svc.check()


def test_long_chunk_without_a_prompt(device: str) -> None:
    """A row of more tokens than a step, without prompt_end, is kept whole or not at all."""
    svc = service(device)
    svc.admit(state_id=3, q_start=10, seqlen_q=200)
    metadata = prepared(svc, [3])
    svc.commit(metadata, torch.tensor([200], dtype=torch.int32, device=device))
    assert svc.table.q_start[3].item() == 210


def test_bad_calls(device: str) -> None:
    """Refused before anything is staged."""
    svc = service(device, 2)
    with pytest.raises(ValueError, match="no prefill batch"):
        svc.prepare_prefill()
    with pytest.raises(ValueError, match="3 is outside 0 … 2"):
        svc.set_prefill_batch([0, 1, 2])
    with pytest.raises(ValueError, match="state_id 1 twice"):
        svc.set_prefill_batch([1, 1])
    with pytest.raises(IndexError, match="state_id=4096"):
        svc.set_prefill_batch([4096])


def test_opcheck(device: str) -> None:
    """Schema, fake implementation and functionalisation agree with what the operator does."""
    svc = service(device, 2, 40)
    svc.admit(state_id=3, q_start=100, seqlen_q=30)
    operands = prepared(svc, [3, -1]).operands
    operator = torch.ops.zos.prepare_v4_prefill_metadata.default
    arguments = [operands[argument.name] for argument in operator._schema.arguments]
    torch.library.opcheck(operator, tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))


@pytest.mark.gpu
def test_capture() -> None:
    """A captured prefill step replays over whatever the batch and the table hold then."""
    svc = service("cuda")
    svc.warmup()
    svc.admit(state_id=3, prompt_end=1000, chunk_q=300)
    svc.set_prefill_batch([3])
    svc.prepare_prefill(full_index=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata = svc.prepare_prefill(full_index=True)
        svc.commit(metadata, metadata.seqlens_q)
    for expected in (300, 600, 900, 1000):
        svc.flush()
        graph.replay()
        svc.launched(1)
        assert svc.table.q_start[3].item() == expected
