"""What a profiler sees of a loop in its steady state: `run` is the workload for Nsight Systems, `read FILE.sqlite` the figures.

nsys profile -s none --cpuctxsw=none -t cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi \
        --capture-range-end=stop -o steps python -m tests.steady_state run && nsys export --type sqlite steps.nsys-rep
"""

from __future__ import annotations

import bisect
import json
import sqlite3
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 1000
BATCH = 64
BODY_CYCLES = 180_000  # about 100 µs of a step's body
LAST_KERNEL = "commit"  # of a step
READ_EVERY = 8  # steps between two looks into the mailbox


def run() -> None:
    """Run steps of a loop as an engine would, its mailbox read along the way; prints the host's time per replay."""
    import torch

    import zos

    svc = zos.MetadataService(capacity=2 * BATCH, max_batch=BATCH, device="cuda", token_layout="strided")
    for state_id in range(BATCH):
        svc.admit(state_id, q_start=100 * state_id)

    def step(metadata: zos.DecodeMetadata) -> torch.Tensor:
        torch.cuda._sleep(BODY_CYCLES)
        return metadata.seqlens_q

    loop = zos.DecodeLoop(svc, step, buckets=[BATCH])
    loop.set_batch(range(BATCH))
    loop.run(20)
    loop.drain()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    host_us = []
    for number in range(STEPS):
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
    print(json.dumps({"host_us_per_replay_profiled": round(statistics.median(host_us), 2)}))


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
    if sys.argv[1] == "run":
        run()
    else:
        print(json.dumps(read(Path(sys.argv[2])), indent=1))
