"""What a profiler sees of a loop in its steady state: `run` is the workload for Nsight Systems, `read FILE.sqlite` the figures.

nsys profile -s none --cpuctxsw=none -t cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi \
        --capture-range-end=stop -o steps python -m tests.steady_state run
nsys export --type sqlite steps.nsys-rep
"""

from __future__ import annotations

import argparse
import bisect
import json
import sqlite3
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 1000
BATCH = 64
WARM_UP_STEPS = 24
BODY_CYCLES = 180_000  # about 100 µs of a step's body
LAST_KERNEL = "commit"  # of a step
UNTRACED_STEPS = 40  # fewer than the mailbox has records
HEAD_START_CYCLES = 20_000_000  # about 11 ms
READ_EVERY = 8  # steps between two looks into the mailbox


def run(steps_per_replay: int) -> None:
    """Run steps of a loop as an engine would, its mailbox read along the way; prints what the host and a step cost."""
    import torch

    import zos

    svc = zos.MetadataService(capacity=2 * BATCH, max_batch=BATCH, device="cuda", token_layout="strided")
    for state_id in range(BATCH):
        svc.admit(state_id, q_start=100 * state_id)

    def step(metadata: zos.DecodeMetadata) -> torch.Tensor:
        torch.cuda._sleep(BODY_CYCLES)
        return metadata.seqlens_q

    loop = zos.DecodeLoop(svc, step, buckets=[BATCH], steps_per_replay=steps_per_replay)
    loop.set_batch(range(BATCH))
    loop.run(WARM_UP_STEPS)
    loop.drain()
    bodies = torch.cuda.CUDAGraph()
    with torch.cuda.graph(bodies):
        for _ in range(UNTRACED_STEPS):
            torch.cuda._sleep(BODY_CYCLES)
    loop_us, bodies_us = queued_us(lambda: loop.run(UNTRACED_STEPS), loop.drain), queued_us(bodies.replay)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    host_us = []
    for number in range(STEPS // steps_per_replay):
        begin = time.perf_counter()
        loop.run()
        host_us.append((time.perf_counter() - begin) * 1e6)
        if number % READ_EVERY == 0:
            loop.poll()
        while loop.steps_launched - loop.last_step_read > READ_EVERY * 4:  # an engine has other work; so does this host
            time.sleep(50e-6)
            loop.poll()
    torch.cuda.profiler.stop()
    torch.cuda.synchronize()
    figures = {
        "steps_per_replay": steps_per_replay,
        "host_us_per_replay_profiled": round(statistics.median(host_us), 2),
        "us_per_step_over_body_untraced": round((loop_us - bodies_us) / UNTRACED_STEPS, 2),
    }
    print(json.dumps(figures))


def queued_us(launch: Callable[[], None], between: Callable[[], object] = lambda: None) -> float:
    """GPU time of what `launch` launches, least of three, queued behind other work so that no launch is waited for."""
    import torch

    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        between()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times)


def read(path: Path) -> dict[str, Any]:
    """Figures of an export: calls by name, copies, waits, and the GPU's idle time between two steps in µs.

    With --cuda-graph-trace=node each kernel is seen, which itself keeps graphs apart; with =graph each replay is one span.
    """
    with sqlite3.connect(path) as database:
        names = dict(database.execute("SELECT id, value FROM StringIds"))
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

        def count(table: str) -> int:
            return int(database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]) if table in tables else 0

        def spans(table: str, columns: str) -> list[tuple[int, ...]]:
            return sorted(database.execute(f"SELECT {columns} FROM {table}")) if table in tables else []

        kernels = spans("CUPTI_ACTIVITY_KIND_KERNEL", "start, end, shortName")
        graphs = spans("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "start, end")
        calls: dict[str, int] = {}
        for (name,) in database.execute("SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME"):
            call = names[name].split("_v")[0]
            calls[call] = calls.get(call, 0) + 1
        copies, waits = count("CUPTI_ACTIVITY_KIND_MEMCPY"), count("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION")
    ends = [end for _, end, *name in kernels if names[name[0]] == LAST_KERNEL] or [end for _, end in graphs]
    starts = [start for start, *_ in kernels or graphs]
    gaps = [(starts[bisect.bisect_left(starts, end)] - end) / 1e3 for end in ends[:-1] if end <= starts[-1]]
    return {
        "steps": len(ends),
        "seen": "kernels" if kernels else "graphs",
        "calls": dict(sorted(calls.items())),
        "memcpy": copies,
        "synchronisations": waits,
        "kernels_per_step": round(len(kernels) / len(ends), 3) if kernels else None,
        "gpu_idle_between_steps_us": {
            "median": round(statistics.median(gaps), 3),
            "p99": round(statistics.quantiles(gaps, n=100)[98], 3),
            "max": round(max(gaps), 3),
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("run", "read"))
    parser.add_argument("export", nargs="?", type=Path)
    parser.add_argument("--steps-per-replay", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.steps_per_replay)
    else:
        print(json.dumps(read(arguments.export), indent=1))
