"""Benches of the loop: host and GPU time of a replayed step, what staged edits add to it, and what a host that stalls costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from zos.loop import DecodeLoop
from zos.metadata import DecodeMetadata
from zos.service import MetadataService

EDITS = (3, 32)  # a step: what real traces bring to a batch of 256, and a burst
QUIET_STEPS = 8  # replays in flight before the host lets the GPU catch up
HOLD_CYCLES = 20_000_000  # a kernel that holds the stream back while replays are queued behind it
STALL_STEP_CYCLES = 360_000  # about 200 µs
STALL_S = 5e-3
STALL_STEPS_PER_REPLAY = 8
STALL_STEPS = 2048
STALL_RUNS = 3

Figure = tuple[str, str, int, float, str, float]  # bench, variant, size, µs, reference, its µs


def _loop(rows: int, body: Callable[[DecodeMetadata], object] | None = None, steps_per_replay: int = 1) -> DecodeLoop:
    """Make a loop over `rows` sequences that keep every token, one step run."""
    svc = MetadataService(capacity=2 * rows, max_batch=rows, device="cuda", token_layout="strided")
    for state_id in range(rows):
        svc.admit(state_id, q_start=100 * state_id)

    def step(metadata: DecodeMetadata) -> torch.Tensor:
        if body is not None:
            body(metadata)
        return metadata.seqlens_q

    loop = DecodeLoop(svc, step, buckets=[rows], steps_per_replay=steps_per_replay)
    loop.set_batch(range(rows))
    loop.run()
    loop.drain()
    return loop


def _stage(loop: DecodeLoop, edits: int) -> None:
    for state_id in range(edits):
        loop.service.set_seqlen_q(state_id, 6)


def bench_host(rows: int, replays: int) -> Iterator[Figure]:
    """Host time of a replay by edits staged before it, beside the bare replay of a graph; the mailbox is read."""
    nothing, bare = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(bare):
        nothing.add_(0)
    times: dict[object, list[float]] = {"bare": [], "poll": [], "stage": []}
    loop = _loop(rows)

    def clocked(name: object, call: Callable[[], object]) -> None:
        begin = time.perf_counter()
        call()
        times.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)

    for _ in range(replays):
        for edits in (0, *EDITS):
            for _ in range(QUIET_STEPS):
                _stage(loop, edits)
                clocked(edits, loop.run)
            torch.cuda.synchronize()
            loop.drain()
        for _ in range(QUIET_STEPS):
            clocked("bare", bare.replay)
            clocked("stage", lambda: _stage(loop, EDITS[0]))
            loop.run()
            torch.cuda.synchronize()
            loop.drain()
            loop.run()
            torch.cuda.synchronize()
            loop.run()  # publishes the record of the one before
            torch.cuda.synchronize()
            clocked("poll", loop.poll)
    median = {name: statistics.median(of_name) for name, of_name in times.items()}
    yield "DecodeLoop.run", "host time", rows, median[0], "graph replay alone", median["bare"]
    for edits in EDITS:
        yield "DecodeLoop.run", f"host time, {edits} edits", rows, median[edits], "without edits", median[0]
    yield "set_seqlen_q", f"host time, {EDITS[0]} edits staged", rows, median["stage"], "replay", median[0]
    yield "DecodeLoop.poll", "host time, two records", rows, median["poll"], "replay", median[0]


def bench_gpu(rows: int, replays: int) -> Iterator[Figure]:
    """GPU time of a step whose body is empty, by edits; the replays are queued behind a kernel that holds the stream back."""
    for each in (1, 8):
        loop = _loop(rows, steps_per_replay=each)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times: dict[int, list[float]] = {}
        for _ in range(max(5, replays // 4)):
            for edits in (0, *EDITS):
                torch.cuda._sleep(HOLD_CYCLES)
                begin.record()
                for _ in range(QUIET_STEPS // each + 1):
                    _stage(loop, edits)
                    loop.run()
                end.record()
                torch.cuda.synchronize()
                loop.drain()
                times.setdefault(edits, []).append(begin.elapsed_time(end) * 1e3 / (QUIET_STEPS // each + 1))
        median = {edits: statistics.median(of_edits) for edits, of_edits in times.items()}
        for edits in EDITS:
            variant = f"GPU time, {each} step(s) a replay, {edits} edits"
            yield "DecodeLoop.run", variant, rows, median[edits], "without edits", median[0]


def bench_stall(rows: int, replays: int) -> Iterator[Figure]:
    """Time of a step when the host sleeps 5 ms at every poll, beside one that does not; 8 steps of about 200 µs a replay."""
    found: dict[float, list[float]] = {0.0: [], STALL_S: []}
    for stall_s in (0.0, STALL_S) * STALL_RUNS:
        loop = _loop(
            rows, lambda metadata: torch.cuda._sleep(STALL_STEP_CYCLES), steps_per_replay=STALL_STEPS_PER_REPLAY
        )
        torch.cuda.synchronize()
        first, begin = loop.steps_launched, time.perf_counter()
        while loop.steps_launched - first < STALL_STEPS:
            loop.poll()
            while loop.room >= loop.steps_per_replay:
                loop.run()
            time.sleep(stall_s)
        loop.drain(timeout_s=60.0)
        found[stall_s].append((time.perf_counter() - begin) * 1e6 / (loop.steps_launched - first))
    stalled, plain = statistics.median(found[STALL_S]), statistics.median(found[0.0])
    yield "DecodeLoop", "200 µs step, host stalls 5 ms a poll", rows, stalled, "no stalls", plain
