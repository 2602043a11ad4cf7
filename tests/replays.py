"""What tests of `zos replay` share: the trace samples, small traces, and runs of the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zos.cli.main import main

SAMPLES = Path(__file__).parents[1] / "examples" / "traces"
AZURE = SAMPLES / "azure_llm_2023_conv_sample.csv"
MOONCAKE = SAMPLES / "mooncake_fast25_conversation_sample.jsonl"


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
