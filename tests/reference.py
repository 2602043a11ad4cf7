"""What tests hold results against: the oracle, golden cases, assertions that name the first mismatch; and runs of a replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zos.cli.compare import POISON, first_mismatch, poison
from zos.cli.main import main
from zos.cli.oracle import Oracle
from zos.cli.oracle_prefill import PrefillOracle

__all__ = [
    "AZURE",
    "DECODE_KEYS",
    "MOONCAKE",
    "POISON",
    "PREFILL_KEYS",
    "Oracle",
    "PrefillOracle",
    "assert_bitwise_equal",
    "assert_golden",
    "golden_cases",
    "mooncake_trace",
    "poison",
    "positions_in_ring",
    "replay_figures",
]

SAMPLES = Path(__file__).parents[1] / "examples" / "traces"
AZURE = SAMPLES / "azure_llm_2023_conv_sample.csv"
MOONCAKE = SAMPLES / "mooncake_fast25_conversation_sample.jsonl"
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
    difference = first_mismatch(_as_array(actual), _as_array(expected))
    assert difference is None, f"{name}: {difference}"


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


def positions_in_ring(head: int, ring: int) -> list[int]:
    """Position in each slot of a ring after positions 0 … head-1 were written; -1 in a slot never written."""
    held = [-1] * ring
    for position in range(max(0, head - ring), head):
        held[position % ring] = position
    return held


def replay_figures(folder: Path, trace: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run `zos replay`, expect the exit code, return the JSON it wrote."""
    target = folder / "figures.json"
    assert main(["replay", str(trace), "--json", str(target), *options]) == code
    written: dict[str, Any] = json.loads(target.read_text())
    return written


def mooncake_trace(folder: Path, requests: Sequence[tuple[Any, ...]]) -> Path:
    """Write a trace of (arrival_ms, prompt, output) or (arrival_ms, prompt, output, hash_ids)."""
    path = folder / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [dict(zip(keys, request, strict=False)) for request in requests]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def _as_array(value: Array) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
