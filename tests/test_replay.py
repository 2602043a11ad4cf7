"""Test that a replay serves a whole trace, that host and device agree at every step, and that a fault is found."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference import assert_bitwise_equal
from tests.replays import AZURE, MOONCAKE, mooncake_trace, replay_figures
from zos.cli.acceptance import AcceptanceModel
from zos.cli.main import main
from zos.cli.oracle import Oracle
from zos.cli.replay_schedule import Scheduler
from zos.cli.traces import Request, read_trace
from zos.service import MetadataService

TIMED = ("wall_s", "metadata_us", "options")  # what differs from run to run


# ---- acceptance -------------------------------------------------------------------------------------------------


def random_tickets(seed: int, rows: int, drafts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tickets = np.stack(
        [rng.integers(0, 4096, rows), rng.integers(0, 1000, rows), rng.integers(0, 2**31 - 7, rows),
         rng.integers(0, drafts + 2, rows)], axis=1,
    )  # fmt: skip
    tickets[tickets[:, 3] == 0] = (-1, 0, 0, 0)  # padding
    return tickets.astype(np.int32)


def kept_in_plain_python(tickets: np.ndarray, probability: float, seed: int) -> list[int]:
    """The model from its description: splitmix64's finaliser over 64-bit words."""

    def mixed(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    kept = []
    for state_id, generation, q_start, q in tickets.tolist():
        count = 0
        while count < q:
            count += 1
            sequence = mixed(seed * 0x9E3779B97F4A7C15 % 2**64 ^ state_id << 32 ^ generation)
            if mixed(mixed(sequence ^ q_start) ^ count) >> 11 >= round(probability * 2**53):
                break
        kept.append(count)
    return kept


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("drafts", [1, 5, 9])
def test_host_predicts_what_the_device_keeps(device: str, seed: int, probability: float, drafts: int) -> None:
    """One bit of difference between torch and NumPy, and every later step is another one."""
    tickets = random_tickets(seed, 500, drafts)
    model = AcceptanceModel(probability, seed, drafts, device)
    on_device = model.step(SimpleNamespace(tickets=torch.from_numpy(tickets).to(device)))  # type: ignore[arg-type]
    assert on_device.dtype == torch.int32
    assert_bitwise_equal(model.num_kept(tickets), on_device, "num_kept")
    assert model.num_kept(tickets).tolist() == kept_in_plain_python(tickets, probability, seed)


def test_drafts_are_accepted_at_the_rate_asked_for() -> None:
    """The share of each number of leading drafts is p^k (1-p), and neither state, generation nor seed repeats another."""
    p, drafts = 0.7, 5
    tickets = random_tickets(1, 40_000, drafts)
    tickets = tickets[tickets[:, 0] >= 0]
    tickets[:, 3] = drafts + 1
    rows = len(tickets)
    kept = AcceptanceModel(p, 0, drafts).num_kept(tickets)
    for accepted in range(drafts + 1):
        share = p**accepted * (1 - p if accepted < drafts else 1)
        assert abs(np.mean(kept == accepted + 1) - share) < 5 * math.sqrt(share * (1 - share) / rows)
    for column in range(3):
        others = tickets.copy()
        others[:, column] += 1
        again = AcceptanceModel(p, 0, drafts).num_kept(others)
        assert abs(np.corrcoef(kept, again)[0, 1]) < 5 / math.sqrt(rows)
    assert abs(np.corrcoef(kept, AcceptanceModel(p, 1, drafts).num_kept(tickets))[0, 1]) < 5 / math.sqrt(rows)


def test_bad_probability() -> None:
    """Named with its value."""
    with pytest.raises(ValueError, match=r"probability=1.5 is outside 0 … 1"):
        AcceptanceModel(1.5, 0, 5)


# ---- schedule ---------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for service and loop; the scheduler's calls are noted, any other would fail."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.geometry = SimpleNamespace(window=128, tokens_per_step=6)
        self.max_prefill_tokens = 8192
        self.calls: list[tuple[Any, ...]] = []

    def admit(self, state_id: int, q_start: int, stop_at: int) -> None:  # noqa: D102
        self.calls.append(("admit", state_id, q_start, stop_at))

    def release(self, state_id: int) -> None:  # noqa: D102
        self.calls.append(("release", state_id))

    def set_batch(self, state_ids: Sequence[int]) -> None:  # noqa: D102
        self.calls.append(("set_batch", *state_ids))


def scheduler_of(requests: Sequence[Request], capacity: int) -> tuple[Scheduler, Recorder]:
    recorder = Recorder(capacity)
    model = AcceptanceModel(1.0, 0, 5)
    return Scheduler(requests, recorder, recorder, model, step_ms=30.0), recorder  # type: ignore[arg-type]


def test_batch_is_staged_only_when_it_changes() -> None:
    """A steady step needs no call at all: nothing staged, nothing launched, nothing asked."""
    scheduler, recorder = scheduler_of([Request(0.0, 100, 13), Request(31.0, 50, 6)], 4)
    expected = [
        [("admit", 0, 100, 113), ("set_batch", 0)],
        [],
        [("admit", 1, 50, 56), ("set_batch", 0, 1)],
        [("release", 0), ("release", 1)],
    ]
    for number, calls in enumerate(expected):
        recorder.calls.clear()
        assert scheduler.begin_step() == (number < 3)
        assert recorder.calls == calls
        if number < 3:
            scheduler.end_step()
    assert scheduler.step_tokens == [6, 6, 1 + 6]
    assert scheduler.batch_sizes == [1, 1, 2]


def test_requests_wait_for_a_state_in_order_of_arrival() -> None:
    """With one state, the second request enters when the first has left, in the very next step, and takes its state."""
    scheduler, recorder = scheduler_of([Request(0.0, 1, 12), Request(0.0, 2, 6), Request(0.0, 3, 6)], 1)
    while scheduler.begin_step():
        scheduler.end_step()
    assert [call for call in recorder.calls if call[0] == "admit"] == [
        ("admit", 0, 1, 13),
        ("admit", 0, 2, 8),
        ("admit", 0, 3, 9),
    ]
    assert scheduler.batch_sizes == [1, 1, 1, 1]
    assert scheduler.completed == 3


def test_idle_clock_jumps_to_the_next_arrival() -> None:
    """An hour without requests takes no steps."""
    scheduler, _ = scheduler_of([Request(0.0, 1, 6), Request(3_600_000.0, 1, 6)], 4)
    while scheduler.begin_step():
        scheduler.end_step()
    assert scheduler.batch_sizes == [1, 1]
    assert scheduler.clock_ms == 3_600_030.0


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trace", "limit"), [(AZURE, 60), (MOONCAKE, 10)], ids=["azure", "mooncake"])
@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_samples_replay_without_a_mismatch(device: str, tmp_path: Path, trace: Path, limit: int, layout: str) -> None:
    """Every step of both formats and layouts agrees with all there is to hold it against."""
    options = ("--device", device, "--limit", str(limit), "--layout", layout, "--check", "every")
    found = replay_figures(tmp_path, trace, *options)
    requests = read_trace(trace)[:limit]
    assert found["mismatches"] == 0 and found["mismatch_examples"] == []
    assert found["steps_checked"] == found["steps"] > 100
    assert found["requests"] == limit
    assert found["generated_tokens"] == sum(request.output_tokens for request in requests)
    assert found["tokens_per_step"] == pytest.approx(found["generated_tokens"] / found["steps"], abs=1e-3)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_few_states_are_reused(device: str, tmp_path: Path, rows: int) -> None:
    """With a queue before it, every state serves many sequences, and no one reads what another left."""
    trace = mooncake_trace(tmp_path, [(0, 10 * n, 1 + n % 17) for n in range(40)])
    found = replay_figures(tmp_path, trace, "--device", device, "--max-batch", str(rows))
    assert (found["requests"], found["largest_batch"]) == (40, rows)
    assert found["mismatches"] == 0


def test_extreme_acceptance(tmp_path: Path) -> None:
    """Nothing accepted: one token a step; everything: six, cut at the end of the output."""
    trace = mooncake_trace(tmp_path, [(0, 100, 50)])
    assert replay_figures(tmp_path, trace, "--device=cpu", "--acceptance", "0")["steps"] == 50
    assert replay_figures(tmp_path, trace, "--device=cpu", "--acceptance", "1")["steps"] == 9


def test_longest_positions(tmp_path: Path) -> None:
    """The longest sequence that a trace may hold ends without an error of the device."""
    trace = mooncake_trace(tmp_path, [(0, 2**31 - 1 - 6 - 20, 20), (0, 0, 20)])
    assert replay_figures(tmp_path, trace, "--device=cpu", "--acceptance", "0")["mismatches"] == 0


def test_seed_decides(tmp_path: Path) -> None:
    """The same seed gives the same run, another one another."""
    options = ("--device=cpu", "--limit=20", "--check=off")
    runs = [replay_figures(tmp_path, AZURE, *options, f"--seed={seed}") for seed in (5, 5, 6)]
    for run in runs:
        for name in TIMED:
            run.pop(name)
    assert runs[0] == runs[1]
    assert runs[0]["steps"] != runs[2]["steps"]


def test_check_every_nth_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the JSON say how many steps were checked."""
    for check, checked in (("7", 15), ("off", 0), ("every", 100)):
        found = replay_figures(
            tmp_path, mooncake_trace(tmp_path, [(0, 9, 100)]), "--device=cpu", "--acceptance=0", "--check", check
        )
        assert (found["steps"], found["steps_checked"]) == (100, checked)
        assert f"steps checked / mismatches  {checked} / 0 " in capsys.readouterr().out


def test_requests_without_output_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted, not served; a trace of nothing else is no error."""
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, [(0, 9, 0), (0, 9, 5), (1, 9, 0)]), "--device=cpu")
    assert (found["requests"], found["skipped_requests"], found["generated_tokens"]) == (1, 2, 5)
    assert "1   (2 without output skipped)" in capsys.readouterr().out
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, [(0, 9, 0)]), "--device=cpu")
    assert (found["requests"], found["steps"], found["tokens_per_step"]) == (0, 0, None)
    assert found["metadata_us"]["median"] is None
    assert "not measured" in capsys.readouterr().out


def test_json_holds_measured_replay_figures(tmp_path: Path) -> None:
    """On the CPU: two operators a step and one more where edits are applied; what only a GPU has is null."""
    found = replay_figures(
        tmp_path, mooncake_trace(tmp_path, [(0, 9, 100)]), "--device=cpu", "--acceptance=0", "--check=off"
    )
    assert found["options"]["acceptance"] == 0 and found["options"]["trace"].endswith("trace.jsonl")
    assert found["launches_per_step"] == 2.01  # the admission; the release comes after the last step
    assert 0 < found["metadata_us"]["median"] <= found["metadata_us"]["p99"]
    assert found["metadata_us"]["steps"] == 100
    assert found["waits_per_step"] is found["allocations_after_capture"] is None
    assert found["simulated_s"] == 3.0


def test_plot(tmp_path: Path) -> None:
    """A PNG is written."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=5", "--check=off", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to install, before the run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["replay", str(AZURE), "--device=cpu", "--plot", str(tmp_path / "run.png")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "zos replay: error: --plot needs matplotlib: install zos[bench]\n")


# ---- faults -----------------------------------------------------------------------------------------------------


def test_wrong_output_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong element of one step: exit code 1, and the message names step, output, place and both values."""
    prepare, calls = MetadataService.prepare, [0]

    def faulty(self: MetadataService, slot: int = 0) -> Any:
        metadata = prepare(self, slot)
        calls[0] += 1
        if calls[0] == 5:
            metadata.kv_swa_index[2, 7] += 1
        return metadata

    monkeypatch.setattr(MetadataService, "prepare", faulty)
    found = replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=10", code=1)
    assert found["mismatches"] == 1
    assert found["mismatch_examples"][0].startswith("step 5: kv_swa_index against the oracle: 1 of")
    assert "first at [2, 7]" in capsys.readouterr().err


def test_unwritten_output_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element left as it was may hold the right value by chance; poison makes it show."""
    commit = MetadataService.commit

    def faulty(self: MetadataService, metadata: Any, *rest: Any) -> None:
        commit(self, metadata, *rest)
        if metadata.slot == 0:
            metadata.num_tokens.fill_(-7)

    monkeypatch.setattr(MetadataService, "commit", faulty)
    found = replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=2", code=1)
    assert found["mismatches"] == found["steps"]


def test_missing_output_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that the oracle has and the service has not, or the other way round, is a mismatch as well."""
    prepare = Oracle.prepare

    def other(self: Oracle, *rest: Any) -> dict[str, np.ndarray]:
        arrays = prepare(self, *rest)
        arrays["swa_length"] = arrays.pop("swa_len")
        return arrays

    monkeypatch.setattr(Oracle, "prepare", other)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, [(0, 9, 1)]), "--device=cpu", code=1)
    assert [example.split(":")[1] for example in found["mismatch_examples"]] == [
        " swa_length against the oracle",
        " swa_len against the oracle",
    ]


def test_wrong_prediction_is_found_without_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check off one token too many on the device still shows at the end, though its state was reused since."""
    step, calls = AcceptanceModel.step, [0]

    def faulty(self: AcceptanceModel, metadata: Any) -> torch.Tensor:
        kept = step(self, metadata)
        calls[0] += 1
        return (kept + 1).clamp(max=6) if calls[0] == 3 else kept

    monkeypatch.setattr(AcceptanceModel, "step", faulty)
    found = replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=10", "--check=off", "--acceptance=0", code=1)
    assert any("trail, summed up by the device" in example for example in found["mismatch_examples"])


def test_device_error_is_found_without_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state in error shows in the counters at the end."""
    step, calls = AcceptanceModel.step, [0]

    def faulty(self: AcceptanceModel, metadata: Any) -> torch.Tensor:
        calls[0] += 1
        return step(self, metadata) + 100 * (calls[0] == 3)

    monkeypatch.setattr(AcceptanceModel, "step", faulty)
    found = replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=10", "--check=off", code=1)
    assert any("counter errors" in example for example in found["mismatch_examples"])


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_captured_replay_waits_for_nothing(tmp_path: Path) -> None:
    """Captured, without checks: no allocation, no wait in a step without edits, three launches and those of the edits."""
    found = replay_figures(tmp_path, AZURE, "--device=cuda", "--check=off")
    assert found["mismatches"] == 0
    assert found["allocations_after_capture"] == 0
    assert found["waits_per_step_without_edits"] == 0
    assert 3 <= found["launches_per_step"] < 4  # prepare, publication of the step before, commit
    assert 0 < found["metadata_us"]["median"] <= found["metadata_us"]["p99"]


@pytest.mark.gpu
def test_both_devices_run_the_same_replay(tmp_path: Path) -> None:
    """Steps, tokens and batches do not depend on the device."""
    names = ("requests", "steps", "generated_tokens", "mean_batch", "largest_batch", "simulated_s", "mismatches")
    runs = [
        replay_figures(tmp_path, MOONCAKE, f"--device={device}", "--limit=20", "--check=off")
        for device in ("cpu", "cuda")
    ]
    assert [runs[0][name] for name in names] == [runs[1][name] for name in names]
