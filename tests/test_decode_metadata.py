"""Test that a prepare writes the seed's values into every output element, in both layouts and at every kind of row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import host_fallback.decode_metadata
import zos
from tests.reference import (
    DECODE_KEYS,
    POISON,
    assert_bitwise_equal,
    assert_golden,
    golden_cases,
    poison,
    positions_in_ring,
)
from zos.cli.bench import ragged_service
from zos.cli.compare import metadata_arrays


def prepared(device: str, rows: list[dict[str, int]], layout: str = "packed", **options: Any) -> zos.DecodeMetadata:
    """Prepare a batch of these rows into poisoned buffers."""
    svc = zos.MetadataService(capacity=4096, max_batch=len(rows), device=device, token_layout=layout, **options)
    for row in rows:
        if row["state_id"] >= 0:
            svc.admit(**row)
    svc.set_batch([row["state_id"] for row in rows])
    poison(svc.slot_metadata(0, len(rows), len(rows) * svc.geometry.tokens_per_step))
    return svc.prepare()


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: f"{case['token_layout']}-{len(case['rows'])}rows")
def test_golden(device: str, case: dict[str, Any]) -> None:
    """Every key of every golden case but load_plan, which a prefill makes."""
    metadata = prepared(device, case["rows"], case["token_layout"])
    assert_golden(metadata_arrays(metadata), case["expect"], DECODE_KEYS, left_out=("load_plan",))


def test_seed_figures(device: str) -> None:
    """State 3 at position 1000: offset 471, columns 0…64 = 471…535, then 402…464, the query's own slot 464."""
    metadata = prepared(device, [{"state_id": 3, "q_start": 1000, "seqlen_q": 1}])
    assert metadata.kv_swa_index_offset_len[0].tolist() == [471, 128]
    assert metadata.kv_swa_index[0].tolist() == [*range(471, 536), *range(402, 465)]
    assert metadata.swa_write_slot[0].item() == 464


def test_short_sequence(device: str) -> None:
    """Position 50 sees 51 keys; columns 51 … 127 are -1."""
    metadata = prepared(device, [{"state_id": 0, "q_start": 50, "seqlen_q": 1}])
    assert metadata.swa_len[0].item() == 51
    assert metadata.kv_swa_index[0].tolist() == [*range(51)] + [-1] * 77


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_every_element_is_written(device: str, layout: str) -> None:
    """A batch of padding, short and full rows leaves no poison in any output: a stale value would reach a consumer."""
    rows = [
        {"state_id": -1, "q_start": 0, "seqlen_q": 0},
        {"state_id": 4, "q_start": 7, "seqlen_q": 2},
        {"state_id": 9, "q_start": 700, "seqlen_q": 6},
        {"state_id": -1, "q_start": 0, "seqlen_q": 0},
    ]
    for name, array in metadata_arrays(prepared(device, rows, layout, compression_ratios=(2, 128))).items():
        assert not (array == POISON).any(), f"{name} has unwritten elements"


@pytest.mark.parametrize(
    ("window", "drafts", "ring"), [(1, 0, 1), (7, 3, 12), (128, 5, 133), (130, 16, 200), (4096, 1, 4097)]
)
def test_visible_positions(device: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """Map each slot back to the position it holds: every query sees max(p-W+1, valid_start, 0) … p and nothing else."""
    rng = np.random.default_rng(seed)
    geometry = zos.RingGeometry(window, drafts, ring)
    svc = zos.MetadataService(capacity=3, max_batch=1, geometry=geometry, device=device)
    for q_start in {0, 1, window - 1, window, ring, 5 * ring, int(rng.integers(0, 9 * ring))}:
        valid_start = int(rng.integers(0, q_start + 1))
        svc.admit(state_id=2, q_start=q_start, swa_valid_start=valid_start)
        svc.set_batch([2])
        metadata = svc.prepare()
        held = positions_in_ring(q_start + geometry.tokens_per_step, ring)
        for j in range(geometry.tokens_per_step):
            position = q_start + j
            seen = [held[slot - 2 * ring] for slot in metadata.kv_swa_index[j].tolist() if slot >= 0]
            assert seen == list(range(max(position - window + 1, valid_start, 0), position + 1)), (
                q_start,
                j,
                valid_start,
            )
        svc.release(2)


def test_largest_position(device: str) -> None:
    """The last step that int32 lengths allow is right; one token more is an error of that row, in its own places."""
    svc = zos.MetadataService(capacity=4, max_batch=2, device=device)
    svc.admit(state_id=0, q_start=2**31 - 7, seqlen_q=6)
    svc.admit(state_id=1, q_start=5, seqlen_q=2)
    svc.set_batch([0, 1])
    metadata = svc.prepare()
    last = 2**31 - 2
    assert metadata.positions[5].item() == last
    assert metadata.seqlens_k.tolist() == [2**31 - 1, 7]
    assert metadata.kv_swa_index_offset_len[5].tolist() == [(last - 127) % 134, 128]
    svc.table.q_start[0] = 2**31 - 6
    metadata = svc.prepare()
    assert metadata.cu_seqlens_q.tolist() == [0, 6, 8]
    assert metadata.token_row.tolist() == [-1] * 6 + [1] * 2 + [-1] * 4
    with pytest.raises(zos.DeviceStateError, match="state_id 0: q_start=2147483642"):
        svc.check()


@pytest.mark.parametrize(
    ("column", "value", "code", "keeps_places"),
    [
        ("seqlen_q", -1, zos.ErrorCode.SEQLEN_Q_RANGE, False),
        ("seqlen_q", 7, zos.ErrorCode.SEQLEN_Q_RANGE, False),
        ("q_start", -5, zos.ErrorCode.Q_START_NEGATIVE, True),
        ("swa_valid_start", -1, zos.ErrorCode.VALID_START_NEGATIVE, True),
        ("swa_valid_start", 101, zos.ErrorCode.VALID_START_PAST_Q_START, True),
        ("prompt_end", 103, zos.ErrorCode.CHUNK_PAST_PROMPT_END, True),
    ],
)
@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_row_in_error(
    device: str, layout: str, column: str, value: int, code: zos.ErrorCode, keeps_places: bool
) -> None:
    """A row that would read or write nonsense is PAD in its places, recorded once, and its neighbours do not change."""
    svc = zos.MetadataService(capacity=8, max_batch=3, device=device, token_layout=layout)
    for state_id in (2, 5, 7):
        svc.admit(state_id=state_id, q_start=100, seqlen_q=4)
    svc.set_batch([2, 5, 7])
    svc.flush()
    getattr(svc.table, column)[5] = value
    first, again = metadata_arrays(svc.prepare()), metadata_arrays(svc.prepare())
    for name in first:
        assert_bitwise_equal(again[name], first[name], f"{name} of the second prepare")
    assert first["seqlens_q"].tolist() == [4, 0, 4]
    assert first["num_tokens"].tolist() == [8]
    assert first["tickets"][1].tolist() == [-1, 1, 5, 0]  # why it has no tokens, and whose they would be
    places = 4 if keeps_places else 0
    assert first["cu_seqlens_q"].tolist() == ([0, 4, 4 + places, 8 + places] if layout == "packed" else [0, 6, 12, 18])
    assert (svc.table.error[5].item(), svc.table.error_value[5].item()) == (
        code,
        value if column != "prompt_end" else 4,
    )
    assert svc.counters()["errors"] == 1
    assert svc.table.phase[5].item() == zos.Phase.LIVE


def test_prefilling_row_in_a_decode_batch(device: str) -> None:
    """A chunk longer than a step is padding without an error; a short one is prepared, with input ids left to the caller."""
    svc = zos.MetadataService(capacity=8, max_batch=2, device=device, carry_tokens=True)
    svc.admit(state_id=0, q_start=0, prompt_end=100, chunk_q=50)
    svc.admit(state_id=1, q_start=0, prompt_end=4, chunk_q=50, tokens=[9])
    svc.set_batch([0, 1])
    metadata = svc.prepare()
    assert metadata.seqlens_q.tolist() == [0, 4]
    assert metadata.input_ids is not None and metadata.input_ids.tolist() == [0] * 12
    svc.check()


def test_input_ids(device: str) -> None:
    """Decode rows take their tokens from the table, zeros past those given."""
    svc = zos.MetadataService(capacity=8, max_batch=2, device=device, carry_tokens=True)
    svc.admit(state_id=4, q_start=30, seqlen_q=4, tokens=[11, 12, 13])
    svc.set_batch([-1, 4])
    metadata = svc.prepare()
    assert metadata.input_ids is not None and metadata.input_ids.tolist() == [11, 12, 13, 0] + [0] * 8


@pytest.mark.parametrize("budget", range(6, 25))
def test_budget_defers_whole_rows(device: str, budget: int) -> None:
    """A row that does not fit whole waits, and so do all after it; nothing is half prepared."""
    lengths = [5, 0, 6, 3, 6]
    svc = zos.MetadataService(capacity=8, max_batch=5, device=device)
    for state_id, length in enumerate(lengths):
        svc.admit(state_id=state_id, q_start=10, seqlen_q=length)
    svc.set_batch(range(5), max_tokens=budget)
    poison(svc.slot_metadata(0, 5, budget))
    metadata = svc.prepare()
    ends = np.cumsum(lengths)
    served = [length if end <= budget else 0 for length, end in zip(lengths, ends, strict=True)]
    assert metadata.seqlens_q.tolist() == served
    assert metadata.cu_seqlens_q.tolist() == [0, *np.minimum(ends, budget).tolist()]
    assert metadata.num_tokens.item() == sum(served)
    rows = [row for row, length in enumerate(served) for _ in range(length)]
    assert metadata.token_row.tolist() == rows + [-1] * (budget - len(rows))
    assert svc.counters()["deferred"] == sum(1 for a, b in zip(lengths, served, strict=True) if a != b)
    assert svc.counters()["errors"] == 0


@pytest.mark.parametrize("rows", [1, 255, 1024, 1025, 4099])
@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_both_paths_agree_on_long_batches(rows: int, layout: str, seed: int) -> None:
    """Sizes at which the kernel changes its grid or takes a second launch, against the CPU path (and that against sums)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, rows)
    records = torch.zeros(rows, 16, dtype=torch.int32)
    records[:, 0], records[:, 1] = 1, torch.from_numpy(lengths)
    records[:, 2] = torch.from_numpy(rng.integers(0, 1000, rows))
    results = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        svc = zos.MetadataService(capacity=rows, max_batch=rows, device=device, token_layout=layout)
        svc.table.records.copy_(records)
        svc.set_batch(range(rows))
        poison(svc.slot_metadata(0, rows, rows * 6))
        results.append(metadata_arrays(svc.prepare()))
    starts = np.concatenate([[0], np.cumsum(lengths)]) if layout == "packed" else np.arange(rows + 1) * 6
    assert_bitwise_equal(results[0]["cu_seqlens_q"], starts.astype(np.int32), "cu_seqlens_q")
    assert results[0]["num_tokens"].item() == lengths.sum()
    for name, array in results[-1].items():
        assert_bitwise_equal(array, results[0][name], name)


@pytest.mark.gpu
def test_long_batches_ran_on_the_gpu(seed: int) -> None:
    """The comparison above includes the device when there is one; this makes its absence a skip that shows."""
    for layout in ("packed", "strided"):
        test_both_paths_agree_on_long_batches(5000, layout, seed)


def test_compression_of_any_kind(device: str) -> None:
    """Write slots and entry indices of several rings, overlapping or not; cached entries are not emitted again."""
    rings = (2, zos.CompressionRing(4, overlap=True), 128, zos.CompressionRing(3, entries=50))
    svc = zos.MetadataService(capacity=8, max_batch=1, device=device, compression_ratios=rings)
    svc.admit(state_id=5, q_start=125, seqlen_q=6, kv_cached_end=128)
    svc.set_batch([5])
    metadata = svc.prepare()
    for ratio, entries in ((2, 7), (4, 13), (128, 133), (3, 50)):
        positions = range(125, 131)
        assert metadata.compression_write_slot[ratio].tolist() == [5 * entries + p % entries for p in positions]
        emitted = [p // ratio if (p + 1) % ratio == 0 and p >= 128 else -1 for p in positions]
        assert metadata.compression_index[ratio].tolist() == emitted


@pytest.mark.parametrize("token_layout", ["packed", "strided"])
def test_threads_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch, token_layout: str) -> None:
    """Rows that several threads share out, error rows, deferred ones and a budget's tail included, are those of one thread."""
    monkeypatch.setattr(host_fallback.decode_metadata, "PARALLEL_ROWS", 1)
    svc, _ = ragged_service(97, "cpu", token_layout)
    svc.table.q_start[::5] = -1
    ids = svc.slot_metadata(0, 97, 97 * 6).state_ids.tolist()
    for budget in (None, 200) if token_layout == "packed" else (None,):
        svc.set_batch(ids, max_tokens=budget)
        metadata = svc.prepare()
        assert (metadata.num_tokens > 0).all()
        expected = {name: array.copy() for name, array in metadata_arrays(metadata).items()}
        for threads in (2, 3, 200):
            poison(metadata)
            host_fallback.decode_metadata.bind_prepare_v4_decode_metadata(threads, **metadata.operands)()
            for name, array in metadata_arrays(metadata).items():
                assert_bitwise_equal(array, expected[name], f"{name}, {threads} threads, budget {budget}")
