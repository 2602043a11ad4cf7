"""Test that requests get slots and rows in order and end for every reason there is, and that each record is delivered once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import zos
from host_fallback.commit import APPENDED, TAKEN
from tests.reference import as_array, assert_bitwise_equal
from zos.mailbox import IS_DUPLICATE, IS_ERROR, IS_FINISHED, IS_REFILLED, IS_STALE, Mailbox
from zos.requests import NEVER, NO_RESULT, Request, RequestState, StateLengths
from zos.table import Phase

WAITING, RUNNING, PREEMPTED, FINISHED, FAILED, CANCELLED = RequestState
MOST_REPLAYS = 3000  # within which what these tests submit must be over


def keep_all(metadata: zos.DecodeMetadata) -> torch.Tensor:
    return metadata.seqlens_q


def keep_by_position(metadata: zos.DecodeMetadata) -> zos.StepResult:
    """Keep 1 … seqlen_q tokens by position; end at every multiple of 50 that is passed exactly."""
    kept = torch.where(metadata.seqlens_q > 0, 1 + metadata.seqlens_k % metadata.seqlens_q.clamp(min=1), 0).to(
        torch.int32
    )
    return zos.StepResult(kept, (metadata.seqlens_k - metadata.seqlens_q + kept) % 50 == 0)


def loop_of(device: str, capacity: int, rows: int, step: Any = keep_all, **options: Any) -> zos.DecodeLoop:
    svc = zos.MetadataService(capacity, rows, device=device, max_prefill_tokens=16, compression_ratios=())
    return zos.DecodeLoop(svc, step, **options)


def run_to_the_end(loop: zos.DecodeLoop) -> list[zos.StepRecord]:
    """Run until no request is pending; the records of all steps."""
    records = loop.poll()
    for _ in range(MOST_REPLAYS):
        if not loop.pending:
            return records + loop.drain()
        loop.run()
        records += loop.drain() if loop._service.device.type == "cuda" else loop.poll()
    raise AssertionError(f"{loop.pending} requests are never over")


def withhold_records(loop: zos.DecodeLoop) -> Callable[[], None]:
    """Let steps run without a word to the host, as on a device that is slow to say so; returns what makes it speak."""
    mailbox = loop._service.slot(0).mailbox
    assert mailbox is not None
    publish = mailbox.publish
    mailbox.publish = lambda: None
    return publish


# ---- what a record tells -------------------------------------------------------------------------------------------------------


def test_rows_of_a_record_all_at_once(seed: int) -> None:
    """Read row by row in Python the same: padding, stale rows, another's steps and rows without tokens say nothing of a length."""
    rng = np.random.default_rng(seed)
    loop = loop_of("cpu", capacity=4, rows=4)
    loop.submit(q_start=0)
    loop.run()
    (form,) = loop.drain()
    lengths, nothing_yet = StateLengths(40), np.full(41, -1)
    for _ in range(300):
        lengths.q_start[:] = nothing_yet
        lengths.after_step[:40] = rng.choice([4, 5, 6, NEVER], 40)
        flags = rng.choice([0, 0, IS_FINISHED, IS_ERROR, IS_STALE, IS_DUPLICATE, IS_REFILLED], 30)
        flags |= rng.choice([0, 0, IS_FINISHED, IS_REFILLED], 30)
        record = form._replace(
            step=6,
            state_ids=np.where(rng.random(30) < 0.2, -1, rng.permutation(40)[:30]).astype(np.int32),
            q_start=rng.choice([0, 7, 90], 30).astype(np.int32),
            flags=flags.astype(np.int32),
        )
        expected, ended = nothing_yet.copy(), []
        rows = zip(record.state_ids.tolist(), record.q_start.tolist(), record.flags.tolist(), strict=True)
        for row, (state_id, q_start, flag) in enumerate(rows):
            if state_id == -1 or lengths.after_step[state_id] >= 6 or flag & NO_RESULT:
                continue
            if flag & (IS_FINISHED | IS_ERROR):
                ended.append(row)
            elif q_start:
                expected[state_id] = q_start
        assert lengths.learn(record).tolist() == ended
        assert_bitwise_equal(lengths.q_start, expected, "q_start")


def test_a_record_of_a_state_that_was_given_back() -> None:
    """A step in flight ends the sequence of a request that was cancelled: its record must neither fail nor change the request."""
    loop = loop_of("cpu", capacity=2, rows=2)
    gone, stays = loop.submit(q_start=5, stop_at=11), loop.submit(q_start=50, stop_at=62)
    speak = withhold_records(loop)
    loop.run()
    loop.cancel(gone)
    loop.run()
    speak()
    loop.poll()
    assert (gone.state, gone.q_start) == (CANCELLED, 5)
    assert (stays.state, stays.q_start) == (FINISHED, 62)


# ---- order and slots -----------------------------------------------------------------------------------------------------------


def test_arrival_order(device: str) -> None:
    """A request overtaken by later ones waits for ever under load."""
    loop = loop_of(device, capacity=2, rows=1)
    requests = [loop.submit(q_start=10 * number, stop_at=10 * number + 12) for number in range(6)]
    ends = []
    for _ in range(MOST_REPLAYS):
        if not loop.pending:
            break
        loop.run()
        loop.drain()
        ends += [request.number for request in requests if request.state is FINISHED and request.number not in ends]
        started = [request.state is not WAITING for request in requests]
        assert started == sorted(started, reverse=True), "a later request has a slot, an earlier one has none"
    assert ends == list(range(6))
    assert [request.q_start for request in requests] == [10 * number + 12 for number in range(6)]


def test_slot_rests_until_its_last_step_is_seen() -> None:
    """A slot handed on while steps are in flight: their kernels would write into the new sequence's ring."""
    loop = loop_of("cpu", capacity=1, rows=1)
    first, second = loop.submit(), loop.submit()
    loop.run()
    publish = withhold_records(loop)
    loop.run(steps=2)
    loop.cancel(first)
    for _ in range(2):
        loop.run()
        assert second.state is WAITING, "the records of steps 2 and 3 were not read"
    publish()
    loop.run()
    assert (second.state, second.state_id) == (RUNNING, 0)


def test_slot_is_free_at_once_when_all_steps_were_seen() -> None:
    """With nothing in flight there is no record to wait for: a request waited one step too many, and with no step for ever."""
    loop = loop_of("cpu", capacity=1, rows=1)
    first = loop.submit()
    loop.run()
    loop.drain()
    loop.cancel(first)
    second = loop.submit(q_start=30)
    loop.run()
    assert second.state is RUNNING
    assert loop._service.table.q_start[0].item() == 36


def test_state_admitted_by_somebody_else() -> None:
    """The request keeps its place, and runs once the state is free; the ones in use at first are left alone."""
    svc = zos.MetadataService(3, 2, device="cpu")
    svc.admit(0, q_start=7)
    loop = zos.DecodeLoop(svc, keep_all)
    first = loop.submit()
    svc.admit(1, q_start=5)
    with pytest.raises(ValueError, match="state_id=1 is in use"):
        loop.run()
    assert (first.state, loop.pending) == (WAITING, 1)
    svc.release(1)
    loop.run()
    assert (first.state, first.state_id) == (RUNNING, 1)
    assert svc.table.q_start.tolist() == [7, 6, 0]


# ---- calls in every state ------------------------------------------------------------------------------------------------------


def request_in(loop: zos.DecodeLoop, state: RequestState) -> Request:
    """Make a request that is in this state, beside another one that runs."""
    request = loop.submit(q_start=7, stop_at=8 if state is FINISHED else 0)
    if state is WAITING:
        return request
    loop.run()
    if state is FAILED:
        loop._service.set_valid_start(request.state_id, 10**6)  # type: ignore[arg-type]
    if state in (FINISHED, FAILED):
        loop.run()
        loop.drain()
        loop.run()
    if state is PREEMPTED:
        loop.preempt(request)
    if state is CANCELLED:
        loop.cancel(request)
    loop.drain()
    assert request.state is state
    return request


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize(
    ("call", "allowed", "leads_to"),
    [("cancel", (WAITING, RUNNING, PREEMPTED), CANCELLED), ("preempt", (RUNNING,), PREEMPTED), ("resume", (PREEMPTED,), RUNNING)],
)  # fmt: skip
def test_calls_in_every_state(
    call: str, allowed: tuple[RequestState, ...], leads_to: RequestState, state: RequestState, device: str
) -> None:
    """A call that comes too late is refused, or does nothing; it must never reach the next tenant of the state."""
    loop = loop_of(device, capacity=2, rows=2)
    other = loop.submit(q_start=100)
    request = request_in(loop, state)
    if state in allowed or call == "cancel":
        getattr(loop, call)(request)
        assert request.state is (leads_to if state in allowed else state)
    else:
        with pytest.raises(ValueError, match=f"request 1 is {state.value}, not"):
            getattr(loop, call)(request)
        assert request.state is state
    before = loop.steps_launched
    loop.run(steps=3)
    loop.drain()
    assert other.q_start == 100 + 6 * (before + 3)
    assert (request.state_id is not None) == (request.state in (RUNNING, PREEMPTED))


@pytest.mark.parametrize("state", [RUNNING, PREEMPTED])
def test_reset_of_a_request(device: str, state: RequestState) -> None:
    """A request that starts over is still the same request, also where it is told of while steps are in flight."""
    loop = loop_of(device, capacity=2, rows=2)
    request = request_in(loop, state)
    loop._service.reset(request.state_id)  # type: ignore[arg-type]
    loop.run(steps=2)
    loop.drain()
    assert loop._service.table.q_start[request.state_id].item() == 12
    assert (request.state, request.q_start) == (RUNNING if state is RUNNING else PREEMPTED, 12)


def test_reset_of_one_that_had_finished_and_the_next_tenant() -> None:
    """The reset had no effect, so the host's count of generations was wrong from then on, and the next request never over."""
    loop = loop_of("cpu", capacity=1, rows=1)
    request = loop.submit(q_start=7, stop_at=13)
    publish = withhold_records(loop)
    loop.run()
    loop._service.reset(request.state_id)  # type: ignore[arg-type]
    loop.run()
    publish()
    loop.drain()
    assert (request.state, request.q_start) == (FINISHED, 13)
    following = loop.submit(q_start=20, stop_at=30)
    loop._service.slot(0).mailbox.publish = publish  # type: ignore[union-attr]
    run_to_the_end(loop)
    assert (following.state, following.q_start) == (FINISHED, 30)


def test_preempted_request_waits_and_goes_on(device: str) -> None:
    """Its row goes to another one, it keeps its slot and length, and gets a row again."""
    loop = loop_of(device, capacity=3, rows=1)
    first, second = loop.submit(q_start=0), loop.submit(q_start=100)
    loop.run()
    loop.drain()
    assert [first.q_start, second.q_start] == [6, 100]
    loop.preempt(first)
    loop.run(steps=2)
    loop.drain()
    assert [first.q_start, second.q_start] == [6, 112]
    loop.resume(first)
    loop.cancel(second)
    loop.run(steps=3)
    loop.drain()
    assert (first.state, first.q_start) == (RUNNING, 24)


def test_preempting_for_long_does_not_fill_the_queue() -> None:
    """Entries of requests that left the ready queue stand in it until they are taken; run raised once it was full of them."""
    loop = loop_of("cpu", capacity=3, rows=1)
    _, second = loop.submit(), loop.submit()
    for _ in range(20):
        loop.run()
        loop.poll()
        loop.preempt(second)
        loop._service.reset(second.state_id)  # type: ignore[arg-type]
        loop.run()
        loop.poll()
        loop.resume(second)
    assert second.state is RUNNING


# ---- how requests end ----------------------------------------------------------------------------------------------------------


def test_ends_of_every_kind(device: str) -> None:
    """At stop_at, by the step's `finished`, by a count out of range, by a row that cannot be prepared; others go on."""

    def step(metadata: zos.DecodeMetadata) -> zos.StepResult:
        start = metadata.seqlens_k - metadata.seqlens_q
        kept = torch.where(start == 206, 9, metadata.seqlens_q)  # more than there are
        return zos.StepResult(kept.to(torch.int32), metadata.seqlens_k == 312)

    loop = loop_of(device, capacity=5, rows=5, step=step)
    stops, fails, ends, breaks, stays = (
        loop.submit(q_start=100 * number, stop_at=110 if number == 1 else 0) for number in range(1, 6)
    )
    loop.run()
    loop._service.set_valid_start(breaks.state_id, 10**6)  # type: ignore[arg-type]
    loop.run(steps=3)
    loop.drain()
    assert (stops.state, stops.q_start) == (FINISHED, 110)
    assert (fails.state, fails.q_start) == (FAILED, 206)
    assert (ends.state, ends.q_start) == (FINISHED, 312)
    assert (breaks.state, breaks.q_start) == (FAILED, 406)
    assert (stays.state, stays.q_start) == (RUNNING, 500 + 6 * 4)
    later = [loop.submit(q_start=1000) for _ in range(4)]
    loop.run(steps=2)
    loop.drain()
    loop.run(steps=2)
    loop.drain()
    assert all(request.state is RUNNING for request in later), "a request that is over kept its slot"
    loop._service.check()


# ---- rows and the ready queue --------------------------------------------------------------------------------------------------


def check_no_row_is_free_while_one_waits(loop: zos.DecodeLoop, count: int, rng: np.random.Generator) -> None:
    """After every replay: a row of the batch without a live sequence means that the ready queue has none left."""
    svc = loop._service
    for _ in range(count):
        start = int(rng.integers(0, 100))
        loop.submit(q_start=start, stop_at=start + int(rng.integers(1, 90)))
    for _ in range(MOST_REPLAYS):
        if not loop.pending:
            return
        loop.run()
        phases, (batch, _) = as_array(svc.table.phase), loop._batch_shape()
        rows = as_array(svc.slot_metadata(0, batch, 6 * batch).state_ids)
        state = as_array(svc._edits.batch_states[0])
        queue = as_array(svc._edits.ready[0])[:, 0]
        entries = [int(queue[number % len(queue)]) for number in range(state[TAKEN], state[APPENDED])]
        waiting = [state_id for state_id in entries if phases[state_id] == Phase.LIVE and state_id not in rows]
        free = [state_id for state_id in rows.tolist() if state_id >= 0 and phases[state_id] != Phase.LIVE]
        assert not (free and waiting), f"rows {rows}, of which {free} are free, while {waiting} wait"
        live = {state_id for state_id in range(svc.capacity) if phases[state_id] == Phase.LIVE}
        if (
            svc.device.type == "cpu"
        ):  # records come at once: no set_batch was refused, which the host would not know yet
            assert live - set(rows.tolist()) == set(waiting), (
                "a live sequence has neither a row nor a place in the queue"
            )
    raise AssertionError(f"{loop.pending} requests are never over")


@pytest.mark.parametrize("each", [1, 3, 8])
@pytest.mark.parametrize(("capacity", "rows"), [(12, 4), (4, 4), (9, 1), (1, 1)])
def test_batch_stays_full(device: str, capacity: int, rows: int, each: int, seed: int) -> None:
    """The device refills rows itself: no step runs with a free row while a sequence waits for one."""
    loop = loop_of(device, capacity, rows, keep_by_position, steps_per_replay=each)
    check_no_row_is_free_while_one_waits(loop, 40, np.random.default_rng(seed))


def test_batch_without_a_queue_does_not_stay_full(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees rows that wait for the host."""
    loop = loop_of("cpu", 12, 4, keep_by_position)
    commit = loop._service.commit

    def commit_without_queue(*arguments: Any) -> None:
        loop._service.slot(0).has_queue = False
        commit(*arguments)
        loop._service.slot(0).has_queue = True

    monkeypatch.setattr(loop._service, "commit", commit_without_queue)
    with pytest.raises(AssertionError, match="are free"):
        check_no_row_is_free_while_one_waits(loop, 40, np.random.default_rng(seed))


def test_buckets_follow_the_load(device: str) -> None:
    """A batch that shrinks runs the smaller graph, one that grows the larger, and both move whom they should."""
    loop = loop_of(device, capacity=8, rows=8, buckets=(1, 2, 4, 8))
    requests = [loop.submit(q_start=100 * number) for number in range(6)]
    sizes = []
    for request in [None, *requests[:5]]:
        if request is not None:
            loop.cancel(request)
        loop.run()
        loop.drain()
        sizes.append(loop.metadata.batch)
    assert sizes == [8, 8, 4, 4, 2, 1]
    requests += [loop.submit(q_start=1000) for _ in range(2)]
    loop.run()
    loop.drain()
    assert loop.metadata.batch == 4
    assert [request.q_start for request in requests[5:]] == [500 + 6 * 7, 1006, 1006]


@pytest.mark.parametrize("each", [3, 8])
def test_steps_per_replay_change_nothing(device: str, each: int) -> None:
    """Requests end as they do with one step a replay."""
    ends = []
    for steps in (1, each):
        loop = loop_of(device, 5, 3, keep_by_position, steps_per_replay=steps)
        requests = [loop.submit(q_start=7 * number, stop_at=60 + 11 * number) for number in range(14)]
        run_to_the_end(loop)
        ends.append([(request.state, request.q_start) for request in requests])
    assert ends[0] == ends[1]


# ---- several at once -----------------------------------------------------------------------------------------------------------


def test_two_loops_of_one_service(device: str) -> None:
    """Loops on two slots share the table: each moves its own requests, exactly as it would alone."""
    together, alone = [], []
    svc = zos.MetadataService(12, 3, device=device, metadata_slots=2)
    loops = [zos.DecodeLoop(svc, keep_by_position, slot=slot) for slot in range(2)]
    for loop, states in zip(loops, (range(0, 4), range(4, 12)), strict=True):
        loop.use_states(states)
        together.append([loop.submit(q_start=3 * number, stop_at=80 + number) for number in range(9)])
    while any(loop.pending for loop in loops):
        assert loops[0].steps_launched < MOST_REPLAYS
        for loop in loops:
            loop.run()
            loop.drain()
    for capacity in (4, 8):
        loop = loop_of(device, capacity, 3, keep_by_position)
        alone.append([loop.submit(q_start=3 * number, stop_at=80 + number) for number in range(9)])
        run_to_the_end(loop)
    for ours, theirs in zip(together, alone, strict=True):
        assert [(r.state, r.q_start) for r in ours] == [(r.state, r.q_start) for r in theirs]


def run_requests(device: str, number: int) -> tuple[np.ndarray, list[int]]:
    """The table, and how every request ended, of a service of one's own."""
    stream = torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None)
    with stream:
        loop = loop_of(device, 5, 3, keep_by_position)
        requests = [loop.submit(q_start=number + 5 * n, stop_at=90 + 3 * n) for n in range(12)]
        run_to_the_end(loop)
        loop._service.flush()
        return as_array(loop._service.table.records).copy(), [request.q_start for request in requests]


def test_services_in_threads(device: str) -> None:
    """Loops in threads share no state: each gives what it gives alone."""
    alone = [run_requests(device, number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda number: run_requests(device, number), range(4)))
    for number in range(4):
        assert_bitwise_equal(together[number][0], alone[number][0], f"records of service {number}")
        assert together[number][1] == alone[number][1]


# ---- records -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [1, 3])
def test_full_mailbox_launches_nothing(device: str, each: int) -> None:
    """A loop that ran on would overwrite records that its reader waits for; after a poll it goes on."""
    loop = loop_of(device, 2, 1, steps_per_replay=each, records=7)
    loop.submit()
    loop.run()
    assert [record.step for record in loop.drain()] == list(range(1, each + 1))
    replays = 7 // each
    loop.run(steps=replays * each)
    launched = loop.steps_launched
    with pytest.raises(zos.MailboxFullError, match="has 7 records: poll first"):
        loop.run()
    assert loop.steps_launched == launched
    assert [record.step for record in loop.drain()] == list(range(each + 1, launched + 1))
    assert loop._service.table.q_start[0].item() == 6 * launched
    loop.run()
    loop.drain()
    assert loop._service.table.q_start[0].item() == 6 * (launched + each)


@pytest.mark.parametrize("by_requests", [False, True])
def test_a_loop_that_nobody_reads(device: str, by_requests: bool) -> None:
    """It runs on and keeps no more than a mailbox full; who asks late is told what is gone, once, and gets the rest."""
    loop = loop_of(device, 4, 2, records=4)
    svc = loop._service
    if by_requests:
        loop.submit()
    else:
        svc.admit(0)
    for number in range(30):
        if not by_requests:
            loop.set_batch([0, 1 + number % 2])
        loop.run()
        if device == "cuda":
            torch.cuda.synchronize()  # else the loop refuses to run ahead of its own reading
    assert len(loop._inbox) <= 4
    assert len(svc.slot(0).sets_launched) <= 5
    if device == "cuda":
        svc.publish()
        torch.cuda.synchronize()
    with pytest.raises(zos.MailboxOverrunError):
        loop.poll()
    assert [record.step for record in loop.drain()] == [27, 28, 29, 30]
    assert svc.table.q_start[0].item() == 6 * 30


def test_polling_alone_keeps_nothing() -> None:
    """Records that a caller has got must not pile up where the service would learn from them some day."""
    loop = loop_of("cpu", 4, 2)
    loop._service.admit(0)
    loop.set_batch([0])
    for _ in range(500):
        loop.run()
        loop.poll()
    assert len(loop._service._unlearned) <= 100
    assert sum(map(len, loop._service._bounds._epochs)) <= 2


def test_every_record_comes_once_and_in_order(device: str, seed: int) -> None:
    """Also those that run read itself, and whether asked for by poll, wait or drain."""
    rng = np.random.default_rng(seed)
    loop = loop_of(device, 6, 3, keep_by_position, records=16)
    steps: list[int] = []
    for _ in range(300):
        if rng.random() < 0.3:
            loop.submit(q_start=int(rng.integers(100)), stop_at=120)
        if loop.steps_launched or loop.pending:
            if loop.steps_launched - len(steps) < 16:
                loop.run()
            call = rng.integers(5)
            if call == 0:
                steps += [record.step for record in loop.poll()]
            elif call == 1:
                steps += [record.step for record in loop.drain()]
            elif call == 2:
                step = int(rng.integers(1, loop.steps_launched + 1))
                steps += [record.step for record in loop.wait(step)]
                assert steps[-1] >= step
            assert steps == list(range(1, len(steps) + 1))
    steps += [record.step for record in loop.drain()]
    assert steps == list(range(1, loop.steps_launched + 1))


def test_wait_that_runs_out_of_time_loses_nothing() -> None:
    """What had come by then comes with the next call."""
    loop = loop_of("cpu", 4, 2)
    loop._service.admit(0)
    loop.set_batch([0])
    loop.run(steps=2)
    publish = withhold_records(loop)
    loop.run(steps=2)
    with pytest.raises(TimeoutError, match="record of step 4 did not come"):
        loop.wait(4, timeout_s=0.01)
    with pytest.raises(ValueError, match="step=5 is not launched"):
        loop.wait(5)
    assert [record.step for record in loop.poll()] == [1, 2]
    publish()
    assert [record.step for record in loop.drain()] == [3, 4]


def test_lost_records_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before fails where what had come is thrown away."""
    wait = Mailbox.wait

    def forgetful(mailbox: Mailbox, step: int, timeout_s: float) -> list[zos.StepRecord]:
        try:
            return wait(mailbox, step, timeout_s)
        except TimeoutError:
            mailbox._undelivered.clear()
            raise

    monkeypatch.setattr(Mailbox, "wait", forgetful)
    with pytest.raises(AssertionError):
        test_wait_that_runs_out_of_time_loses_nothing()


def test_bad_use(device: str) -> None:
    """Each is named before anything is submitted."""
    loop = loop_of(device, 4, 2)
    for columns, message in [
        ({"q_start": -1}, "q_start=-1"),
        ({"state_id": 3}, "state_id is no argument of admit"),
        ({"q_start": 5, "stop_at": 5}, "stop_at=5 must exceed q_start=5"),
    ]:
        with pytest.raises(ValueError, match=message):
            loop.submit(**columns)
    with pytest.raises(IndexError, match="state_id=4"):
        loop.use_states([4])
    loop._service.admit(2)
    with pytest.raises(ValueError, match="state_id=2 is in use"):
        loop.use_states([1, 2])
    loop.submit()
    with pytest.raises(ValueError, match="handed out"):
        loop.use_states([1])
    with pytest.raises(ValueError, match="no mailbox"):
        loop_of(device, 4, 2, records=0).submit()
    assert loop.pending == 1
