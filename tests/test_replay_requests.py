"""Test that a replay by requests serves a trace whatever disturbs it, and that its model finds a fault wherever it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.replays import AZURE, MOONCAKE, mooncake_trace, replay_figures
from zos.bounds import SequenceBounds
from zos.cli.acceptance import AcceptanceModel
from zos.cli.main import main
from zos.cli.replay_log import LoggedService
from zos.cli.replay_records import RecordChecker
from zos.errors import MailboxFullError
from zos.loop import DecodeLoop
from zos.mailbox import Mailbox, StepRecord
from zos.requests import Request, RequestScheduler, RequestState
from zos.sequences import SequenceEdits
from zos.service import MetadataService

TIMED = ("wall_s", "steps_per_s", "host_us_per_replay", "options")  # what differs from run to run
MODES = [
    ("--steps-per-replay=1",),
    ("--steps-per-replay=4",),
    ("--device-loop",),
    ("--host-stall-ms=0.1",),
    ("--churn",),
    ("--churn=1", "--check=5"),
    ("--churn=0.5", "--steps-per-replay=3", "--host-stall-ms=0.1"),
    ("--churn=0.5", "--device-loop", "--host-stall-ms=0.1"),
    ("--churn=0.5", "--steps-per-replay=2", "--check=off"),
]


def queueing_trace(folder: Path, seed: int, requests: int = 60) -> Path:
    """More requests at once than a batch of 4 holds, so that some wait on the device and some on the host."""
    rng = random.Random(seed)
    arrivals = sorted(rng.randrange(2000) for _ in range(requests))
    return mooncake_trace(folder, [(at, rng.randrange(3000), rng.randrange(1, 60)) for at in arrivals])


def deliver_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[StepRecord], StepRecord | None]) -> None:
    """Let `change` replace every record that the loop delivers; None loses it. The loop itself has learnt from it by then."""
    delivered = RequestScheduler._delivered

    def changed(self: RequestScheduler) -> list[StepRecord]:
        return [record for record in map(change, delivered(self)) if record is not None]

    monkeypatch.setattr(RequestScheduler, "_delivered", changed)


# ---- runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES, ids=" ".join)
@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_every_request_runs_to_its_end(
    device: str, tmp_path: Path, seed: int, options: Sequence[str], layout: str
) -> None:
    """Each option and all together, with a full batch: nothing differs from the model, and no request is lost."""
    trace = queueing_trace(tmp_path, seed)
    everywhere = ("--device", device, "--max-batch=4", "--seed", str(seed), "--layout", layout)
    found = replay_figures(tmp_path, trace, *everywhere, *options)
    assert found["mismatch_examples"] == [] and found["mismatches"] == 0
    assert found["requests"] + found["cancelled"] == 60
    # Where the host knows at once how far the device is, nothing that it preempts has ended already.
    assert found["resumed"] == found["preempted"] or (device == "cuda" and found["resumed"] < found["preempted"])
    assert found["steps_checked"] == found["steps"] >= found["replays"] > 0
    assert found["largest_batch"] == 4
    churned = found["cancelled"] + found["preempted"] + found["reset"]
    assert (churned > 0) == any(option.startswith("--churn") for option in options)
    if not churned:  # a churn may leave no sequence long enough to end by itself
        assert found["rows_refilled_on_device"] > 20


def test_all_disturbances_happen(tmp_path: Path, seed: int) -> None:
    """A churn that never resets, say, would prove nothing of resets."""
    found = replay_figures(tmp_path, AZURE, "--device=cpu", "--churn=0.5", "--steps-per-replay=4", f"--seed={seed}")
    assert min(found[name] for name in ("cancelled", "preempted", "resumed", "reset")) > 0
    assert found["mismatches"] == 0


def test_requests_keep_as_much_as_without_the_loop(tmp_path: Path, seed: int) -> None:
    """Undisturbed, every request generates its output, no token more: as the replay that sets its batches itself says."""
    options = ("--device=cpu", "--limit=40", f"--seed={seed}", "--check=off")
    plain = replay_figures(tmp_path, AZURE, *options)
    for mode in ("--steps-per-replay=1", "--steps-per-replay=5", "--device-loop"):
        found = replay_figures(tmp_path, AZURE, *options, mode)
        assert (found["requests"], found["generated_tokens"]) == (40, plain["generated_tokens"])


def test_hash_ids_are_ignored(tmp_path: Path) -> None:
    """Prompts count as prefilled, also those of a trace that would be prefilled otherwise."""
    found = replay_figures(tmp_path, MOONCAKE, "--device=cpu", "--limit=5", "--churn=0")
    assert (found["requests"], found["mismatches"], found["cancelled"]) == (5, 0, 0)


def test_seed_decides(tmp_path: Path) -> None:
    """On the CPU the same seed gives the same run, churn included, another one another."""
    options = ("--device=cpu", "--limit=30", "--churn=0.5", "--check=off")
    runs = [replay_figures(tmp_path, AZURE, *options, f"--seed={seed}") for seed in (5, 5, 6)]
    for run in runs:
        for name in TIMED:
            run.pop(name)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_clock_and_steps(tmp_path: Path) -> None:
    """The clock moves by every step of a replay, and jumps where no request is there."""
    trace = mooncake_trace(tmp_path, [(0, 9, 10), (600_000, 9, 10)])
    found = replay_figures(tmp_path, trace, "--device=cpu", "--acceptance=0", "--steps-per-replay=4")
    assert (found["steps"], found["replays"], found["steps_per_replay"]) == (24, 6, 4)
    assert found["simulated_s"] == 600 + 12 * 0.03
    found = replay_figures(tmp_path, trace, "--device=cpu", "--acceptance=0", "--device-loop")
    assert (found["steps"], found["replays"], found["steps_per_replay"]) == (20, 2, None)


@pytest.mark.parametrize(("check", "looked"), [("every", 10), ("4", 3), ("off", 0)])
def test_outputs_are_checked_where_the_host_can_look(tmp_path: Path, check: str, looked: int) -> None:
    """With one step a replay against the oracle, else not; records always."""
    trace = mooncake_trace(tmp_path, [(0, 9, 10)])
    options = ("--device=cpu", "--acceptance=0", f"--check={check}")
    found = replay_figures(tmp_path, trace, *options, "--churn=0")
    assert (found["outputs_checked"], found["steps_checked"]) == (looked, 10)
    for mode in ("--steps-per-replay=2", "--device-loop"):
        assert replay_figures(tmp_path, trace, *options, mode)["outputs_checked"] == 0


def test_host_sleeps_once_a_poll(tmp_path: Path) -> None:
    """The stall asked for happens, and is no host time of the loop."""
    trace = mooncake_trace(tmp_path, [(0, 9, 10)])
    found = replay_figures(tmp_path, trace, "--device=cpu", "--acceptance=0", "--host-stall-ms=50", "--check=off")
    assert found["wall_s"] >= found["replays"] * 0.05
    assert found["host_us_per_replay"]["median"] < 50_000


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was asked for and what was counted stands in both; a trace without output is no error."""
    found = replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=30", "--churn=0.5", "--steps-per-replay=2")
    out = capsys.readouterr().out
    assert f"steps per replay            2\nreplays                     {found['replays']}\n" in out
    assert f"cancelled / preempted       {found['cancelled']} / {found['preempted']}\n" in out
    assert f"resumed / reset             {found['resumed']} / {found['reset']}\n" in out
    assert found["steps"] == 2 * found["replays"]
    assert 0 < found["host_us_per_replay"]["median"] <= found["host_us_per_replay"]["p99"]
    assert found["options"]["churn"] == 0.5
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, [(0, 9, 0)]), "--device=cpu", "--churn")
    assert (found["requests"], found["skipped_requests"], found["steps"], found["replays"]) == (0, 1, 0, 0)
    assert "not measured" in capsys.readouterr().out


def test_plot(tmp_path: Path) -> None:
    """A PNG is written."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    replay_figures(tmp_path, AZURE, "--device=cpu", "--limit=5", "--churn", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- records that come late -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--steps-per-replay=1", "--check=off"),
        ("--steps-per-replay=4",),
        ("--steps-per-replay=16",),
        ("--device-loop",),
    ],
    ids=" ".join,
)
def test_records_that_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, options: Sequence[str]
) -> None:
    """As on a GPU the host acts on what it has read so far: set_batch comes too late, the mailbox fills up, bounds are apart."""
    rng, read, check_room, full = random.Random(seed), Mailbox.read, DecodeLoop._check_room, [0]

    def counted(self: DecodeLoop) -> None:
        try:
            check_room(self)
        except MailboxFullError:
            full[0] += 1
            raise

    monkeypatch.setattr(Mailbox, "read", lambda self: read(self) if rng.random() < 0.5 else None)
    monkeypatch.setattr(DecodeLoop, "_check_room", counted)
    everywhere = ("--device=cpu", "--max-batch=4", "--churn=0.5", f"--seed={seed}")
    found = replay_figures(tmp_path, queueing_trace(tmp_path, seed), *everywhere, *options)
    assert found["mismatch_examples"] == []
    assert found["requests"] + found["cancelled"] == 60
    assert found["resumed"] <= found["preempted"]
    if "--steps-per-replay=16" in options:
        assert full[0] > 0 and found["set_batch_refused"] > 0


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--churn", "--ring"), "--ring does not go with --churn: prompts count as prefilled there"),
        (("--device-loop", "--chunk=8"), "--chunk does not go with --device-loop: prompts count as prefilled there"),
        (
            ("--host-stall-ms=1", "--max-prefill-tokens=8"),
            "--max-prefill-tokens does not go with --host-stall-ms: prompts count as prefilled there",
        ),
        (
            ("--steps-per-replay=2", "--device-loop"),
            "--steps-per-replay does not go with --device-loop: a run takes as many steps as it needs",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], options: Sequence[str], message: str
) -> None:
    """Named, before the run."""
    assert main(["replay", str(AZURE), "--device=cpu", *options]) == 2
    assert capsys.readouterr() == ("", f"zos replay: error: {message}\n")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--churn=1.5", "is no number of 0 … 1"),
        ("--steps-per-replay=0", "is no whole number of 1 … 256"),
        ("--host-stall-ms=0", "is no number above 0"),
        ("--host-stall-ms=nan", "is no number above 0"),
    ],
)
def test_bad_values(capsys: pytest.CaptureFixture[str], option: str, words: str) -> None:
    """Refused with the option's name and the value's rule."""
    with pytest.raises(SystemExit) as stopped:
        main(["replay", str(AZURE), option])
    assert stopped.value.code == 2
    name, value = option.split("=")
    error = capsys.readouterr().err
    assert f"argument {name}" in error and f"'{value}' {words}" in error


# ---- faults -----------------------------------------------------------------------------------------------------


def faulty_run(tmp_path: Path, *options: str, queueing: bool = True) -> list[str]:
    """Run a trace that must not pass; returns what is said of it."""
    trace = queueing_trace(tmp_path, 1) if queueing else mooncake_trace(tmp_path, [(0, 9, 100), (0, 9, 50)])
    found = replay_figures(tmp_path, trace, "--device=cpu", "--max-batch=4", *(options or ("--churn=0",)), code=1)
    assert found["mismatches"] > 0
    examples: list[str] = found["mismatch_examples"]
    return examples


@pytest.mark.parametrize("check", ["every", "7", "off"])
@pytest.mark.parametrize("name", ["kept", "q_start", "generations", "flags", "state_ids", "next_state_ids"])
def test_wrong_word_of_a_record_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, check: str
) -> None:
    """One wrong row of one record: named with step, field, place and both values, whether or not steps are checked."""

    def wrong(record: StepRecord) -> StepRecord:
        if record.step != 5:
            return record
        array = getattr(record, name).copy()
        array[1] ^= 16
        return record._replace(**{name: array})

    deliver_with(monkeypatch, wrong)
    examples = faulty_run(tmp_path, "--steps-per-replay=1", f"--check={check}", queueing=False)
    assert examples[0].startswith(f"step 5: {name} against the model: 1 of 2 differ, first at [1]")
    assert f"mismatch: step 5: {name}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["errors", "deferred", "stale", "duplicate", "batch_version", "ready_taken"])
def test_wrong_count_of_a_record_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A result dropped, a row deferred or a batch changed that nobody asked for."""

    def wrong(record: StepRecord) -> StepRecord:
        return record._replace(**{name: getattr(record, name) + 1}) if record.step == last else record

    last = replay_figures(tmp_path, queueing_trace(tmp_path, 1), "--device=cpu", "--max-batch=4", "--churn=0")["steps"]
    deliver_with(monkeypatch, wrong)
    examples = faulty_run(tmp_path)
    assert len(examples) == 1 and examples[0].startswith(f"step {last}: ")


def test_lost_record_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has a number too high, and what it says is another step's."""
    deliver_with(monkeypatch, lambda record: None if record.step == 5 else record)
    examples = faulty_run(tmp_path, "--steps-per-replay=3", queueing=False)
    assert "step against the model: 1 of 1 differ, first at []: 6, expected 5" in examples[0]


@pytest.mark.parametrize("options", [("--steps-per-replay=1",), ("--steps-per-replay=4",), ("--device-loop",)])
def test_row_refilled_with_a_finished_state_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]
) -> None:
    """The device puts back into the row the sequence that has just ended: no step serves that row."""
    commit, planted = MetadataService.commit, list[int]()

    def faulty(self: MetadataService, metadata: Any, *rest: Any) -> None:
        before = metadata.state_ids.clone()
        commit(self, metadata, *rest)
        changed = torch.nonzero(metadata.state_ids != before)
        if metadata.slot == 0 and len(changed) and not planted:
            planted.append(int(changed[0]))
            metadata.state_ids[planted[0]] = before[planted[0]]

    monkeypatch.setattr(MetadataService, "commit", faulty)
    assert "state_ids against the model: 1 of 4 differ" in faulty_run(tmp_path, *options)[0]
    assert planted


@pytest.mark.parametrize("options", [("--steps-per-replay=1",), ("--steps-per-replay=4",), ("--device-loop",)])
def test_state_that_stands_twice_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]
) -> None:
    """A record tells of one sequence in two rows."""

    def wrong(record: StepRecord) -> StepRecord:
        return record._replace(next_state_ids=record.next_state_ids[[1, 1]]) if record.step == 5 else record

    deliver_with(monkeypatch, wrong)
    examples = faulty_run(tmp_path, *options, queueing=False)
    assert any("step 5: states that stand twice in the batch against the model" in example for example in examples)


def test_token_count_off_by_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop tells of a request that it is a token shorter than it is."""
    over = RequestScheduler._over

    def short(self: RequestScheduler, request: Request, state: RequestState) -> None:
        over(self, request, state)
        request._last_q_start -= request.number == 7

    monkeypatch.setattr(RequestScheduler, "_over", short)
    (example,) = faulty_run(tmp_path)
    assert "length past stop_at, by finished request against the requests: 1 of 60 differ, first at [7]: -1" in example


@pytest.mark.parametrize("more", [-1, 1])
def test_output_off_by_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """The device stops a request a token early or late: seen in its record, and in what the request generated."""
    admit = SequenceEdits.admit

    def other(self: SequenceEdits, state_id: int, q_start: int, stop_at: int) -> None:
        admit(self, state_id, q_start, stop_at=stop_at + more * (stop_at == 59))

    monkeypatch.setattr(SequenceEdits, "admit", other)
    examples = faulty_run(tmp_path, "--steps-per-replay=2", queueing=False)
    assert any("tokens, by finished request against the requests: 1 of 2" in example for example in examples)


@pytest.mark.parametrize("options", [("--steps-per-replay=1",), ("--steps-per-replay=4",), ("--device-loop",)])
@pytest.mark.parametrize("side", [0, 1])
def test_bound_that_is_violated_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str], side: int
) -> None:
    """A lower bound too high by one, or an upper bound too low by one: a block allocator would run out of blocks."""
    bounds = SequenceBounds.bounds

    def tight(self: SequenceBounds, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = bounds(self, states)
        exact = (found[0] == found[1]).all()
        found[side][:] += (1 - 2 * side) * exact
        return found

    monkeypatch.setattr(SequenceBounds, "bounds", tight)
    examples = faulty_run(tmp_path, *options)
    assert any(f"{('lower', 'upper')[side]} q_start against the bounds" in example for example in examples)


def test_bounds_apart_though_all_is_read_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They must meet once every record is read."""
    bounds = SequenceBounds.bounds

    def wide(self: SequenceBounds, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lower, upper = bounds(self, states)
        return lower, upper + 1

    monkeypatch.setattr(SequenceBounds, "bounds", wide)
    assert "q_start known exactly against the bounds" in faulty_run(tmp_path)[0]


@pytest.mark.parametrize("options", [("--steps-per-replay=4",), ("--device-loop",), ("--churn=0", "--check=off")])
def test_wrong_num_kept_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]) -> None:
    """The device keeps one token too many, once."""
    step, calls = AcceptanceModel.step, [0]

    def faulty(self: AcceptanceModel, metadata: Any) -> torch.Tensor:
        kept = step(self, metadata)
        calls[0] += 1
        return (kept + 1).clamp(max=6) if calls[0] == 3 else kept

    monkeypatch.setattr(AcceptanceModel, "step", faulty)
    examples = faulty_run(tmp_path, "--acceptance=0", *options, queueing=False)
    assert "step 3: q_start against the model" in examples[0] and "step 3: kept against" in examples[1]


def test_wrong_output_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one step a replay every output is held against the oracle."""
    prepare, calls = MetadataService.prepare, [0]

    def faulty(self: MetadataService, slot: int = 0) -> Any:
        metadata = prepare(self, slot)
        calls[0] += 1
        if calls[0] == 5:
            metadata.kv_swa_index[2, 7] += 1
        return metadata

    monkeypatch.setattr(MetadataService, "prepare", faulty)
    (example,) = faulty_run(tmp_path)
    assert example.startswith("step 5: kv_swa_index against the oracle: 1 of") and "first at [2, 7]" in example


def test_request_that_is_never_over_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the loop forgot would not run to its end, and nobody would wait for it."""
    over = RequestScheduler._over

    def forgetful(self: RequestScheduler, request: Request, state: RequestState) -> None:
        over(self, request, RequestState.RUNNING if request.number == 7 else state)

    monkeypatch.setattr(RequestScheduler, "_over", forgetful)
    (example,) = faulty_run(tmp_path)
    assert "requests that are over against the requests: 1 of 60 differ, first at [7]: False" in example


def test_device_error_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state in error: its record and the counters say so."""
    step, calls = AcceptanceModel.step, [0]

    def faulty(self: AcceptanceModel, metadata: Any) -> torch.Tensor:
        calls[0] += 1
        return step(self, metadata) + 100 * (calls[0] == 3)

    monkeypatch.setattr(AcceptanceModel, "step", faulty)
    examples = faulty_run(tmp_path, "--check=off", "--churn=0", queueing=False)
    assert any("rows in error or deferred against the model" in example for example in examples)


# ---- states of requests -----------------------------------------------------------------------------------------


def checker_of(requests: int) -> tuple[RecordChecker, LoggedService, DecodeLoop]:
    """A checker of a small service, and a loop that keeps everything."""
    svc = LoggedService(capacity=4, max_batch=2, device="cpu")
    acceptance = AcceptanceModel(1.0, 0, 5)
    loop = DecodeLoop(svc, acceptance.step)
    return RecordChecker(svc, loop, acceptance, requests), svc, loop


def test_state_shared_by_two_live_requests_is_found() -> None:
    """Two requests that the loop says are in one state, and an admission into a state that another request still has."""
    checker, svc, loop = checker_of(2)
    requests = [loop.submit(q_start=5, stop_at=50), loop.submit(q_start=7, stop_at=60)]
    svc.submitted.extend(requests)
    loop.run()
    checker.launched(1)
    checker.look_at_bounds(requests)
    checker.follow(loop.drain())
    assert checker.steps.mismatches == 0
    shared = Request(2, {}, RequestState.RUNNING, requests[0].state_id)
    checker.look_at_bounds([requests[0], shared])
    assert checker.steps.examples == [
        "step 1: states of two requests against the requests: 1 of 1 differ, first at []: 1, expected 0"
    ]
    svc.log.append(("admit", (requests[0].state_id, None, 5, 50)))
    checker.launched(2)
    loop.run()
    checker.follow(loop.drain())
    assert [example.split(" against")[0] for example in checker.steps.examples[1:3]] == [
        f"step 1: owner of state {requests[0].state_id}, admitted",
        f"step 1: phase of state {requests[0].state_id}, admitted",
    ]
