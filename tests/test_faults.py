"""Test that a step that raises, a process that is killed, a full pool or a bad sequence harm nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal
from zos.cli.compare import metadata_arrays
from zos.edits import EDITS_PER_BUFFER, NUM_BUFFERS
from zos.loop import DEFAULT_RECORDS
from zos.requests import RequestState
from zos.steps import WARMUP_RUNS

STEPS = 6
ROWS = 256
BATCH_ERRORS = {"swa_valid_start": 10**6, "seqlen_q": 99, "q_start": -5}  # what prepare refuses


# ---- a step that raises --------------------------------------------------------------------------------------------------------


def run_with_a_failure(
    device: str, each: int, fails_at: int, by_requests: bool
) -> tuple[torch.Tensor, list[list[int]], int, int]:
    """Run STEPS replays, again where a step raised; the table, kept tokens of each record, calls of the step, failures."""
    calls = failures = 0

    def step(metadata: zos.DecodeMetadata) -> torch.Tensor:
        nonlocal calls
        calls += 1
        kept = (metadata.seqlens_q > 0).int() * (1 + metadata.seqlens_k % 3)
        if calls == fails_at:
            raise ArithmeticError("step failed")
        return kept.to(torch.int32)

    svc = zos.MetadataService(8, 4, device=device, compression_ratios=())
    loop = zos.DecodeLoop(svc, step, steps_per_replay=each, buckets=(4,))
    for state_id in range(4):
        if by_requests:
            loop.submit(q_start=10 * state_id)
        else:
            svc.admit(state_id, q_start=10 * state_id)
    if not by_requests:
        loop.set_batch(range(4))
    while loop.steps_launched < STEPS * each:
        try:
            loop.run()
        except ArithmeticError:
            failures += 1
            svc.check()
            if (
                each > 1 and device == "cpu"
            ):  # steps before it, of the same replay, have run: as many are missing at the end
                loop.steps_per_replay = each - loop.steps_launched % each
                loop.run()
                loop.steps_per_replay = each
    records = loop.drain()
    assert [record.step for record in records] == list(range(1, STEPS * each + 1))
    return svc.table.records, [record.kept.tolist() for record in records], calls, failures


@pytest.mark.parametrize("by_requests", [False, True])
@pytest.mark.parametrize("each", [1, 3])
def test_step_that_raises(device: str, each: int, by_requests: bool) -> None:
    """In its first call, later, while warming up or being captured: the same loop gives what it gives without the failure."""
    table, kept, calls, _ = run_with_a_failure(device, each, fails_at=0, by_requests=by_requests)
    assert calls == (STEPS * each if device == "cpu" else WARMUP_RUNS + 2 * each)
    for fails_at in range(1, calls + 1):
        found = run_with_a_failure(device, each, fails_at, by_requests)
        assert found[3] == 1
        assert_bitwise_equal(found[0], table, f"records after a failure in call {fails_at}")
        assert found[1] == kept


def test_commit_before_the_failure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above finds a loop that commits something for the step that failed."""
    prepare = zos.MetadataService.prepare

    def commits_ahead(svc: zos.MetadataService, slot: int = 0) -> zos.DecodeMetadata:
        metadata = prepare(svc, slot)
        svc.commit(metadata, (metadata.seqlens_q > 0).to(torch.int32))
        return metadata

    monkeypatch.setattr(zos.MetadataService, "prepare", commits_ahead)
    with pytest.raises(AssertionError):
        test_step_that_raises("cpu", 1, False)


# ---- a process that is killed --------------------------------------------------------------------------------------------------

LOOP_IN_A_PROCESS = """
import sys
import zos
svc = zos.MetadataService(16, 4, device=sys.argv[1])
loop = zos.DecodeLoop(svc, lambda metadata: metadata.seqlens_q)
requests = [loop.submit(q_start=n, stop_at=n + 100) for n in range(12)]
while loop.pending:
    loop.run()
    loop.drain()
print([request.q_start for request in requests], svc.table.phase.tolist(), flush=True)
while True:
    loop.submit(stop_at=50)
    loop.run()
    loop.drain()
    if len(sys.argv) == 2:
        break
"""


def test_process_killed_in_the_middle(device: str) -> None:
    """Nothing that outlives a process, a lock or a half-written cache, keeps the next one from starting clean."""
    command = [sys.executable, "-c", LOOP_IN_A_PROCESS, device]
    with subprocess.Popen([*command, "on"], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        first = killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
        killed.stdout.read()
    assert killed.returncode == -signal.SIGKILL
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert first.startswith(str([n + 100 for n in range(12)]))
    assert again.stdout == first


# ---- pools that are full -------------------------------------------------------------------------------------------------------


def test_full_pools(device: str) -> None:
    """No free state, no free row, more edits than a buffer holds, more flushes than there are buffers: all of it arrives."""
    svc = zos.MetadataService(4 * EDITS_PER_BUFFER, 4, device=device, compression_ratios=())
    loop = zos.DecodeLoop(svc, lambda metadata: metadata.seqlens_q)
    loop.use_states(range(2))
    requests = [loop.submit(q_start=number, stop_at=number + 9) for number in range(9)]
    for state_id in range(2, svc.capacity):
        svc.admit(state_id, q_start=state_id)
    for number in range(NUM_BUFFERS + 5):
        svc.set_seqlen_q(3, 1 + number % 6)
        svc.flush()
    assert svc.table.seqlen_q[3].item() == 1 + (NUM_BUFFERS + 4) % 6
    for _ in range(DEFAULT_RECORDS):
        if loop.pending:
            loop.run()
            loop.drain()
    assert [(request.state, request.q_start) for request in requests] == [
        (RequestState.FINISHED, number + 9) for number in range(9)
    ]
    assert svc.table.q_start[2:].tolist() == list(range(2, svc.capacity))


# ---- a bad sequence ------------------------------------------------------------------------------------------------------------


def outputs_of_others(
    device: str, layout: str, bad: str | None, rows: int = ROWS
) -> tuple[list[dict[str, np.ndarray]], list[str]]:
    """What the rows from 1 on get in every step while row 0 is bad, or padding; and what `check` says of row 0."""
    svc = zos.MetadataService(rows, rows, device=device, token_layout=layout)
    svc.attach_mailbox()
    for state_id in range(rows):
        svc.admit(state_id, q_start=7 * state_id, seqlen_q=1 + state_id % 6)
    svc.set_batch([0 if bad else -1, *range(1, rows)])
    svc.flush()
    if bad in BATCH_ERRORS:
        getattr(svc.table, bad)[0] = BATCH_ERRORS[bad]
    steps = []
    for _ in range(4):
        metadata = svc.prepare()
        arrays = metadata_arrays(metadata)
        others = arrays["token_row"] >= 1
        found = {name: array[others] for name, array in arrays.items() if len(array) == metadata.tokens}
        places = arrays["cu_seqlens_q"][found["token_row"]]  # section 2 begins with row 0's tokens
        found["kv_swa_full_index_pivots"][:, 2] -= places
        found |= {name: arrays[name][1:] for name in ("seqlens_q", "seqlens_k", "tickets")}
        kept = torch.where(metadata.seqlens_q > 0, 1 + metadata.seqlens_k % metadata.seqlens_q.clamp(min=1), 0)
        if bad == "num_kept":
            kept[0] = 99
        svc.commit(metadata, kept.to(torch.int32))
        (record,) = svc.drain()
        for name in ("state_ids", "generations", "q_start", "kept", "flags", "next_state_ids"):
            found[f"record.{name}"] = getattr(record, name)[1:]
        found["records"] = as_array(svc.table.records)[1:].copy()
        steps.append(found)
    try:
        svc.check()
    except zos.DeviceStateError as error:
        return steps, [fault.field for fault in error.faults if fault.state_id == 0]
    return steps, []


def assert_others_unchanged(device: str, layout: str, bad: str) -> None:
    expected, _ = outputs_of_others(device, layout, None)
    found, faults = outputs_of_others(device, layout, bad)
    assert faults == [bad], "row 0 was not in error: the test proves nothing"
    for number, (step, without) in enumerate(zip(found, expected, strict=True)):
        assert step.keys() == without.keys()
        for name, array in step.items():
            assert_bitwise_equal(array, without[name], f"{name} of step {number}")


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("bad", [*BATCH_ERRORS, "num_kept"])
def test_bad_sequence_in_row_0(device: str, layout: str, bad: str) -> None:
    """The other 255 sequences' outputs, records and table rows are those of a run without it, bit for bit."""
    assert_others_unchanged(device, layout, bad)


def test_a_bad_sequence_that_harms_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees one bit in one of 255 rows."""
    commit = zos.MetadataService.commit

    def harms(svc: zos.MetadataService, metadata: Any, num_kept: torch.Tensor) -> None:
        commit(svc, metadata, num_kept)
        if num_kept[0] == 99:
            svc.table.head[200] += 1

    monkeypatch.setattr(zos.MetadataService, "commit", harms)
    with pytest.raises(AssertionError, match="records of step 0"):
        assert_others_unchanged("cpu", "strided", "num_kept")
