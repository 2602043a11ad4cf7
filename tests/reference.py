"""What tests share: the oracle, the golden cases, assertions that name the first mismatch, random steps of sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zos
from host_fallback.table_edits import FORK, _apply_edit, _fork
from zos.cli.compare import POISON, block_view_tensors, first_mismatch, poison
from zos.cli.oracle import Oracle
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.oracle_views import expected_block_view
from zos.metadata import StepMetadata
from zos.step_checks import BATCH_STATE_WORDS, EDIT_WORDS

__all__ = [
    "DECODE_KEYS",
    "POISON",
    "PREFILL_KEYS",
    "Oracle",
    "PrefillOracle",
    "as_array",
    "assert_bitwise_equal",
    "assert_block_view",
    "assert_golden",
    "block_view_tensors",
    "edit_operands",
    "golden_cases",
    "kept_tokens",
    "poison",
    "positions_in_ring",
    "random_steps",
    "true_q_start",
]

GOLDEN = Path(__file__).parent / "golden"
BOTH_KEYS = {  # key of both golden files -> output
    "offset_len": "kv_swa_index_offset_len",
    "pivots": "kv_swa_full_index_pivots",
    "positions": "positions",
    "write_slot": "swa_write_slot",
    "lens": "swa_len",
    "token_row": "token_row",
    "token_state": "token_state_id",
    "cu": "cu_seqlens_q",
    "seqlen_q": "seqlens_q",
    "seqlen_k": "seqlens_k",
}
DECODE_KEYS = {**BOTH_KEYS, "index": "kv_swa_index"}
PREFILL_KEYS = {**BOTH_KEYS, "load_plan": "swa_load_plan"}
Array = torch.Tensor | np.ndarray


def assert_bitwise_equal(actual: Array, expected: Array, name: str) -> None:
    """Equal dtype, shape and values, or an error with the first mismatch, its coordinates and both values."""
    difference = first_mismatch(as_array(actual), as_array(expected))
    assert difference is None, f"{name}: {difference}"


def assert_block_view(view: zos.BlockView, oracle: Oracle, tickets: np.ndarray, num_kept: Sequence[int] | None) -> None:
    """Every output as the oracle has it, bit for bit."""
    for name, expected in expected_block_view(oracle, tickets.tolist(), num_kept).items():
        assert_bitwise_equal(getattr(view, name), expected, name)


def golden_cases(kind: str = "decode") -> list[dict[str, Any]]:
    """The decode or prefill cases, made by an oracle that this project shares no code with."""
    cases: list[dict[str, Any]] = json.loads((GOLDEN / f"{kind}_cases.json").read_text())
    return cases


def assert_golden(
    arrays: dict[str, np.ndarray], expected: dict[str, Any], keys: dict[str, str], left_out: tuple[str, ...] = ()
) -> None:
    """Every key of a golden case but those left out: the plain ones, and each row's pairs of write slot and index (r = 2)."""
    assert set(expected) == {*keys, *left_out, "compress2"}
    for key, name in keys.items():
        assert_bitwise_equal(
            arrays[name], np.array(expected[key], arrays[name].dtype).reshape(arrays[name].shape), name
        )
    for row, pairs in enumerate(expected["compress2"]):
        places = arrays["token_row"] == row
        actual = np.stack([arrays["compression_write_slot[2]"][places], arrays["compression_index[2]"][places]], 1)
        assert_bitwise_equal(actual, np.array(pairs, np.int64).reshape(-1, 2), f"compression of row {row}")


def edit_operands(
    edits: list[list[int]], batch_edits: list[list[int]], device: str, batch_rows: int = 2, max_batch: int = 4
) -> tuple[Any, ...]:
    """Arguments of apply_table_edits after the table, with one buffer of these rows (padded with zeros)."""
    rows = torch.zeros(32, EDIT_WORDS, dtype=torch.int32)
    rows[0, :2] = torch.tensor([len(edits), len(batch_edits)])
    for row, words in zip(rows[1:], edits + batch_edits, strict=False):
        row[: len(words)] = torch.tensor(words)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    return (
        torch.full((batch_rows, max_batch), -1, dtype=torch.int32, device=device),
        rows.reshape(1, -1).to(device),
        torch.zeros(batch_rows, BATCH_STATE_WORDS, dtype=torch.int64, device=device),
        torch.full((batch_rows, 8, 2), -1, dtype=torch.int32, device=device),
        *counts,
        6,
        8192,
    )


def true_q_start(svc: zos.MetadataService) -> np.ndarray:
    """q_start of every state once what is staged has been applied: int64 [capacity]."""
    records, nothing = as_array(svc.table.records).copy(), np.zeros(0, np.int64)
    for edit in svc._edits._edits:
        row = np.frombuffer(edit.row, np.int32)
        if edit.kind == FORK:
            _fork(records, nothing, row[0], row[2])
            continue
        _apply_edit(
            records[row[0]], nothing, row, nothing, np.zeros((0, 0, 2), np.int32), 6, svc.max_prefill_tokens,
            svc.snapshot_every,
        )  # fmt: skip
    return records[:, 2].astype(np.int64)


def positions_in_ring(head: int, ring: int) -> list[int]:
    """Position in each slot of a ring after positions 0 … head-1 were written; -1 in a slot never written."""
    held = [-1] * ring
    for position in range(max(0, head - ring), head):
        held[position % ring] = position
    return held


def random_steps(
    svc: zos.MetadataService, rounds: int, rng: np.random.Generator
) -> Iterator[tuple[StepMetadata, np.ndarray]]:
    """Drive a service's batches, which name the same states: a prefill step and a decode step a round.

    Yields each step's metadata and the tokens that each row keeps, int64 [B]: a random number of a decode step's, all of a chunk.
    The step is committed when the caller goes on. After each round a drafter on the device chooses the next steps' lengths.
    """
    table, step = svc.table, svc.geometry.tokens_per_step
    for _ in range(rounds):
        for prepare in (lambda: svc.prepare_prefill(full_index=True), svc.prepare):
            metadata = prepare()
            length, states = as_array(metadata.seqlens_q).astype(np.int64), as_array(metadata.state_ids)
            prefilling = as_array(table.q_start < table.prompt_end)[states]  # a padding row's length is 0 either way
            kept = np.where(prefilling, length, np.minimum(rng.integers(1, step + 1, len(length)), length))
            yield metadata, kept
            svc.commit(metadata, torch.from_numpy(kept.astype(np.int32)).to(svc.device))
        drafted = torch.from_numpy(rng.integers(1, step + 1, svc.capacity).astype(np.int32)).to(svc.device)
        table.seqlen_q.copy_(torch.where(table.q_start < table.prompt_end, table.seqlen_q, drafted))


def kept_tokens(metadata: StepMetadata, kept: np.ndarray) -> np.ndarray:
    """Which token places hold one of the tokens that their row keeps: bool [T]."""
    row = as_array(metadata.token_row)
    j = np.arange(len(row)) - as_array(metadata.cu_seqlens_q)[row]
    return (row >= 0) & (j < kept[row])


def as_array(value: Array) -> np.ndarray:
    """Return a tensor of any device as an array."""
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
