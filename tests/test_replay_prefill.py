"""Test that a replay prefills prompts in chunks, adopts prefix hits, and finds whatever a prefill step does wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zos.sequences
from tests.replays import AZURE, MOONCAKE, mooncake_trace, replay_figures
from zos.bounded_replay import ReplayPlan
from zos.cli.main import main
from zos.cli.replay_prediction import Prediction
from zos.cli.traces import read_trace
from zos.service import MetadataService

WINDOW = 128
SMALL = ("--device=cpu", "--chunk=100", "--max-prefill-tokens=256")
PROMPTS = [(40 * n, 37 * n, 1 + n % 9) for n in range(12)]  # of 0 to 407 tokens


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chunk", "0"), "argument --chunk: '0' is no whole number of 1 … 131072"),
        (("--chunk", "x"), "argument --chunk: 'x' is no whole number of 1 … 131072"),
        (("--max-prefill-tokens", "0"), "argument --max-prefill-tokens: '0' is no whole number of 1 … 131072"),
        (
            ("--max-prefill-tokens", "131073"),
            "argument --max-prefill-tokens: '131073' is no whole number of 1 … 131072",
        ),
        (("--chunk", "9000"), "--chunk 9000 exceeds --max-prefill-tokens 8192"),
        (("--chunk", "513", "--max-prefill-tokens", "512"), "--chunk 513 exceeds --max-prefill-tokens 512"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: Sequence[str], message: str) -> None:
    """One line and exit code 2, before the trace is read."""
    try:
        code = main(["replay", "no such file", "--device=cpu", *options])
    except SystemExit as exit:  # what argparse finds
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"zos replay: error: {message}") and err.count("\n") == 1


def test_prompts_count_as_prefilled_unless_asked(tmp_path: Path) -> None:
    """Without the options and without hash_ids nothing is prefilled; any one of them changes that."""
    trace = mooncake_trace(tmp_path, [(0, 300, 5)])
    assert replay_figures(tmp_path, trace, "--device=cpu")["prefill"] is None
    for option, steps in (("--chunk=200", 2), ("--max-prefill-tokens=200", 2), ("--ring", 1)):
        assert replay_figures(tmp_path, trace, "--device=cpu", option)["prefill"]["prefill_steps"] == steps
    trace = mooncake_trace(tmp_path, [(0, 300, 5, [1])])
    assert replay_figures(tmp_path, trace, "--device=cpu")["prefill"]["prefill_steps"] == 1


# ---- schedule ---------------------------------------------------------------------------------------------------


def test_prefill_batch_is_staged_only_when_its_members_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunks, and rows that wait for their turn, cost no call: the device moves both on."""
    set_batch, batches = MetadataService.set_prefill_batch, []

    def noted(self: MetadataService, state_ids: Sequence[int], batch: int) -> None:
        batches.append((list(state_ids), batch))
        set_batch(self, state_ids, batch)

    monkeypatch.setattr(MetadataService, "set_prefill_batch", noted)
    trace = mooncake_trace(tmp_path, [(0, 300, 6), (0, 200, 6), (0, 100, 12), (100, 50, 1), (100, 0, 1)])
    found = replay_figures(tmp_path, trace, *SMALL, "--acceptance=1")
    # By step: 100, 100 and the third waits; 100, 100 (complete), waits; 100 (complete), 100 (complete). Then, in the state released
    # last, the fourth; the fifth has no prompt and decodes at once.
    assert batches[:4] == [([], 1), ([], 2), ([], 4), ([], 5)]
    assert batches[4:] == [([0, 1, 2], 4), ([0, 2], 2), ([0], 1)]
    assert found["prefill"] == {
        "prefix_hits": 0,
        "tokens_saved": 0,
        "tokens_replayed": 0,
        "prompt_tokens_prefilled": 650,
        "prefill_steps": 4,
        "deferred_rows": 2,
    }
    assert (found["mismatches"], found["requests"]) == (0, 5)
    assert "prompt tokens prefilled     650   (in 4 steps; rows deferred: 2)" in capsys.readouterr().out


@pytest.mark.parametrize(("chunk", "places"), [(1, 1), (5, 8), (64, 64), (300, 512), (2048, 2048)])
def test_chunks_of_any_length(device: str, tmp_path: Path, chunk: int, places: int) -> None:
    """Chunks below a decode step's length, above the ring's, and above every prompt; each step checked, every token counted."""
    trace = mooncake_trace(tmp_path, PROMPTS if chunk >= 64 else [(40 * n, 3 * n, 1 + n) for n in range(9)])
    options = ("--device", device, "--chunk", str(chunk), "--max-prefill-tokens", str(places), "--ring")
    found = replay_figures(tmp_path, trace, *options)
    requests = read_trace(trace)
    assert found["mismatches"] == 0 and found["steps_checked"] == found["steps"]
    assert found["requests"] == len(requests)
    assert found["generated_tokens"] == sum(request.output_tokens for request in requests)
    assert found["prefill"]["prompt_tokens_prefilled"] == sum(request.prompt_tokens for request in requests)


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_few_states_and_many_deferred_rows(device: str, tmp_path: Path, seed: int, layout: str) -> None:
    """Random prompts queue for states and for token places; counters, table and trail come out as predicted."""
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(0, 700, 30).tolist(), rng.integers(1, 12, 30).tolist(), strict=True)
    trace = mooncake_trace(tmp_path, [(0, prompt, output) for prompt, output in lengths])
    options = ("--device", device, "--chunk=150", "--max-prefill-tokens=300", "--max-batch=7", "--layout", layout)
    found = replay_figures(tmp_path, trace, *options, "--ring")
    assert (found["mismatches"], found["requests"]) == (0, 30)
    assert found["prefill"]["deferred_rows"] > 30
    unchecked = replay_figures(tmp_path, trace, *options, "--check=off")
    assert unchecked["mismatches"] == 0
    assert unchecked["prefill"] == found["prefill"]


# ---- prefix hits ------------------------------------------------------------------------------------------------


def test_hits_are_adopted_and_counted(device: str, tmp_path: Path) -> None:
    """A hit saves all but its last window; one no longer than the window saves nothing; a whole prompt may be hit."""
    shared = [(0, 1000, 9, [1, 2]), (300, 1300, 9, [1, 2, 3]), (600, 1300, 9, [1, 2, 3]), (600, 100, 9, [1])]
    trace = mooncake_trace(tmp_path, [*shared, (900, 700, 9, [7, 1])])
    found = replay_figures(tmp_path, trace, "--device", device, "--chunk=500", "--ring")
    saved = (1024 - WINDOW) + (1300 - WINDOW)
    assert found["mismatches"] == 0
    assert found["prefill"] == {
        "prefix_hits": 2,
        "tokens_saved": saved,
        "tokens_replayed": 2 * WINDOW,
        "prompt_tokens_prefilled": 1000 + 1300 + 1300 + 100 + 700 - saved,
        "prefill_steps": 2 + 1 + 1 + 2,
        "deferred_rows": 0,
    }


@pytest.mark.parametrize("trace", [AZURE, MOONCAKE], ids=["azure", "mooncake"])
def test_samples_prefill_without_a_mismatch(device: str, tmp_path: Path, trace: Path) -> None:
    """Real prompts in chunks, with the ring: every output, record and entry of every step."""
    options = ("--device", device, "--limit=10", "--chunk=1024", "--max-prefill-tokens=4096", "--ring")
    found = replay_figures(tmp_path, trace, *options)
    prompts = sum(request.prompt_tokens for request in read_trace(trace)[:10])
    prefill = found["prefill"]
    assert found["mismatches"] == 0 and found["steps_checked"] == found["steps"] > 100
    assert prefill["prompt_tokens_prefilled"] + prefill["tokens_saved"] == prompts
    assert prefill["prefix_hits"] == (9 if trace == MOONCAKE else 0)  # all its prompts begin with the same block
    assert found["ring_entries_compared"] > 100_000


# ---- faults -----------------------------------------------------------------------------------------------------


def spoil_prefill(monkeypatch: pytest.MonkeyPatch, call: int, spoil: Any) -> None:
    """Let one prefill step, counted without the warm-up's, come out with other metadata."""
    prepare, calls = MetadataService.prepare_prefill, [0]

    def faulty(self: MetadataService, slot: int = 0, full_index: bool = False, tail: bool = False) -> Any:
        metadata = prepare(self, slot, full_index, tail)
        calls[0] += int(metadata.num_tokens) > 0
        if calls[0] == call:
            spoil(metadata)
        return metadata

    monkeypatch.setattr(MetadataService, "prepare_prefill", faulty)


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ("swa_load_plan", (0, 0, 1)),
        ("kv_swa_full_index_pivots", (3, 1)),
        ("kv_swa_full_index", (5, 4)),
        ("last_token_index", (0,)),
        ("swa_write_slot", (2,)),
        ("seqlens_k", (0,)),
    ],
)
def test_wrong_prefill_output_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, place: tuple[int, ...]
) -> None:
    """One wrong element of one prefill step, a row of the load plan among them, is named with step and place."""

    def spoil(metadata: Any) -> None:
        getattr(metadata, output)[place] += 1

    spoil_prefill(monkeypatch, 3, spoil)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, PROMPTS[5:]), *SMALL, code=1)
    example = found["mismatch_examples"][0]
    assert f": {output} against the oracle: 1 of" in example and f"first at {list(place)}:" in example


def test_unwritten_prefill_output_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element left as it was may hold the right value by chance; poison makes it show."""
    launch, calls = MetadataService.launch_prepare, [0]

    def faulty(self: MetadataService, metadata: Any) -> None:
        third_segment = metadata.swa_load_plan[0, 2].clone() if hasattr(metadata, "swa_load_plan") else None
        launch(self, metadata)
        if third_segment is not None:
            calls[0] += int(metadata.num_tokens) > 0
            if calls[0] > 1:
                metadata.swa_load_plan[0, 2] = third_segment  # hardly ever used: (-1, 0, 0, 0) step after step

    monkeypatch.setattr(MetadataService, "launch_prepare", faulty)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, PROMPTS[5:]), *SMALL, code=1)
    assert "swa_load_plan against the oracle: 4 of" in found["mismatch_examples"][0]


def test_misprediction_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that thinks deferred rows were served is told so in the very step."""
    monkeypatch.setattr(Prediction, "served", lambda self, rows: np.ones(len(rows), bool))
    trace = mooncake_trace(tmp_path, [(0, 300, 6), (0, 200, 6), (0, 100, 12)])
    found = replay_figures(tmp_path, trace, *SMALL, code=1)
    assert found["mismatch_examples"][0].startswith("step 1: seqlen_q against the prediction: 1 of")


def test_chunk_of_another_length_is_found_without_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check off, a prompt prefilled in other chunks than asked for still shows at the end."""
    admit, calls = MetadataService.admit, [0]

    def faulty(self: MetadataService, *arguments: Any, **named: Any) -> None:
        calls[0] += 1
        admit(self, *arguments, **{**named, "chunk_q": 90 if calls[0] == 2 else named["chunk_q"]})

    monkeypatch.setattr(MetadataService, "admit", faulty)
    trace = mooncake_trace(tmp_path, [(0, 300, 6), (0, 250, 40), (60, 250, 6), (60, 250, 1)])
    found = replay_figures(tmp_path, trace, *SMALL, "--check=off", code=1)
    assert any("trail, summed up by the device" in example for example in found["mismatch_examples"])


def test_deferred_counter_is_held_against_the_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that says another number of deferred rows than were predicted is a mismatch at the end."""
    counters = MetadataService.counters
    monkeypatch.setattr(MetadataService, "counters", lambda self: {**counters(self), "deferred": 0})
    trace = mooncake_trace(tmp_path, [(0, 300, 6), (0, 200, 6), (0, 100, 12)])
    found = replay_figures(tmp_path, trace, *SMALL, code=1)
    assert found["prefill"]["deferred_rows"] == 2
    assert [example.split(": ", 1)[1] for example in found["mismatch_examples"]] == [
        "counter deferred against the end of the run: 1 of 1 differ, first at []: 0, expected 2"
    ]


def test_hit_below_the_window_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit no longer than the window must not be adopted: its compressed entries would never be emitted."""

    def eager(hit_length: int, prompt_end: int, window: int) -> ReplayPlan:
        hit = min(hit_length, prompt_end)
        return ReplayPlan(max(0, hit - window), max(0, hit - window), hit)

    monkeypatch.setattr(zos.sequences, "plan_bounded_replay", eager)
    trace = mooncake_trace(tmp_path, [(0, 600, 6, [1, 2]), (0, 1000, 6, [1, 2]), (0, 100, 6, [1])])
    found = replay_figures(tmp_path, trace, "--device=cpu", code=1)
    (example,) = {example.split(": ", 1)[1] for example in found["mismatch_examples"]}
    assert example.startswith("kv_cached_end against the prediction: 1 of") and "100, expected 0" in example


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [(), ("--ring",)], ids=["metadata", "ring"])
def test_prefill_steps_wait_for_nothing(tmp_path: Path, ring: tuple[str, ...]) -> None:
    """Captured, without checks: no allocation after capture, no wait in a step without edits."""
    options = ("--device=cuda", "--check=off", "--chunk=512", "--max-prefill-tokens=2048")
    found = replay_figures(tmp_path, AZURE, *options, *ring)
    assert found["mismatches"] == 0
    assert found["allocations_after_capture"] == 0
    assert found["waits_per_step_without_edits"] == 0


@pytest.mark.gpu
def test_both_devices_prefill_alike(tmp_path: Path) -> None:
    """Steps, tokens, chunks and deferred rows do not depend on the device."""
    names = ("requests", "steps", "generated_tokens", "simulated_s", "prefill", "mismatches")
    options = ("--limit=30", "--check=off", "--chunk=1024", "--max-prefill-tokens=2048", "--ring")
    runs = [replay_figures(tmp_path, MOONCAKE, f"--device={device}", *options) for device in ("cpu", "cuda")]
    assert [runs[0][name] for name in names] == [runs[1][name] for name in names]
