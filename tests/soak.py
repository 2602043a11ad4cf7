"""`make soak`: a loop under churn for a long time: every kept token is the model's, memory does not grow, throughput stays.

Requests come, end, are cancelled, rest and go on; each row of each record is held against the acceptance model. On the CPU it runs
a number of rows, on a GPU a time.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import zos
from zos.cli.acceptance import AcceptanceModel
from zos.requests import RequestState

BATCH, CAPACITY, STEPS_PER_REPLAY, RECORDS = 64, 96, 4, 64
SHORTEST, LONGEST = 20, 400  # tokens of a request
CHURN = 0.05  # replays before which a request is disturbed
WARM_UP_SHARE = 0.3  # of the samples
SAMPLES = 300
MOST_GROWTH = 2 * 2**20  # bytes, in all that was measured
LEAST_THROUGHPUT = 0.8  # of the last third against the first, on machines with other work to do
PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Soaked:
    """What a run found."""

    device: str
    rows: int
    steps: int
    requests: int
    seconds: float
    wrong_rows: int  # rows of records that are not the model's
    host_slope: float  # bytes per million rows, by least squares
    device_slope: float
    million_rows: float  # measured, after the warm-up
    throughput: float  # rows a second in the last third, over those in the first

    def faults(self) -> list[str]:
        """What is wrong, in words."""
        found = [f"{self.wrong_rows} rows are not what the model says"] if self.wrong_rows else []
        for place, slope in (("host", self.host_slope), ("device", self.device_slope)):
            if slope * self.million_rows > MOST_GROWTH:
                found.append(f"{place} memory grows by {slope:,.0f} bytes per million rows")
        if self.throughput < LEAST_THROUGHPUT:
            found.append(f"the last third ran at {self.throughput:.2f} of the first one's rate")
        return found


class Soak:
    """A loop and its churn."""

    def __init__(self, device: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.svc = zos.MetadataService(CAPACITY, BATCH, device=device, token_layout="strided")
        self.tokens_per_step = self.svc.geometry.tokens_per_step
        draft_tokens = self.tokens_per_step - 1
        self.acceptance = AcceptanceModel(0.6, seed, draft_tokens, self.svc.device)
        self.loop = zos.DecodeLoop(
            self.svc, self.acceptance.step, buckets=[BATCH], steps_per_replay=STEPS_PER_REPLAY, records=RECORDS
        )
        self.live: list[zos.Request] = []
        self.seen = np.zeros((CAPACITY, 2), np.int64)  # by state: generation and length, as of its last record
        self.requests = self.rows = self.steps = self.wrong_rows = 0

    def replay(self) -> None:
        """Bring requests, disturb one now and then, run, and judge what has come."""
        while len(self.live) < CAPACITY:
            begin = int(self.rng.integers(0, 10_000))
            end = begin + int(self.rng.integers(SHORTEST, LONGEST))
            self.live.append(self.loop.submit(q_start=begin, stop_at=end))
            self.requests += 1
        if self.rng.random() < CHURN:
            self.disturb(self.live[self.rng.integers(len(self.live))])
        if self.loop.room < STEPS_PER_REPLAY:
            self.judge(self.loop.wait(self.loop.last_step_read + STEPS_PER_REPLAY))
        self.loop.run()
        self.judge(self.loop.poll())
        over = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)
        for request in self.live:
            if request.state is RequestState.FINISHED:
                self.wrong_rows += request.q_start != request.columns["stop_at"]
            self.wrong_rows += request.state is RequestState.FAILED
        self.live = [request for request in self.live if request.state not in over]

    def disturb(self, request: zos.Request) -> None:
        """Cancel it, let it rest, or let it go on."""
        if request.state is RequestState.PREEMPTED:
            self.loop.resume(request)
        elif request.state is RequestState.RUNNING and self.rng.random() < 0.7:
            self.loop.preempt(request)
        else:
            self.loop.cancel(request)

    def judge(self, records: list[zos.StepRecord]) -> None:
        """Count the rows, and those that begin elsewhere than the one before ended, or kept another number than the model's.

        A stop may cut that.
        """
        for record in records:
            self.steps += 1
            served = record.kept > 0
            state_ids, generations, kept = record.state_ids[served], record.generations[served], record.kept[served]
            before = record.q_start[served].astype(np.int64) - kept
            lengths = np.full(len(kept), self.tokens_per_step)
            expected = self.acceptance.num_kept(np.stack([state_ids, generations, before, lengths], 1))
            cut = record.finished[served]
            known = self.seen[state_ids]
            self.wrong_rows += int(((known[:, 0] == generations) & (known[:, 1] != before)).sum())
            self.seen[state_ids] = np.stack([generations, before + kept], 1)
            self.wrong_rows += int(((kept != expected) & ~(cut & (kept < expected))).sum())
            self.wrong_rows += int((record.errors > 0) + (record.stale > 0) + (record.duplicate > 0))
            self.rows += len(kept)


def host_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def device_bytes(device: str) -> int:
    """Device memory that torch has taken for this process: all that the library uses."""
    return 0 if device == "cpu" else torch.cuda.memory_reserved()


def soak(
    device: str, rows: int, seconds: float, seed: int = 0, after_replay: Callable[[Soak], None] = lambda run: None
) -> Soaked:
    """Run until so many rows or seconds, whichever comes first. `after_replay` is for tests, which plant faults with it."""
    run, begin = Soak(device, seed), time.monotonic()
    samples: list[tuple[float, int, int, int]] = []  # seconds, rows, bytes on the host, bytes on the device
    while run.rows < rows and (passed := time.monotonic() - begin) < seconds:
        run.replay()
        after_replay(run)
        share = max(run.rows / rows, passed / seconds)
        if share * SAMPLES >= len(samples):
            samples.append((time.monotonic() - begin, run.rows, host_bytes(), device_bytes(device)))
    run.judge(run.loop.drain())
    run.svc.check()
    found = np.array(samples[int(len(samples) * WARM_UP_SHARE) :], np.float64)
    third = len(found) // 3
    rates = [(part[-1, 1] - part[0, 1]) / (part[-1, 0] - part[0, 0]) for part in (found[:third], found[-third:])]
    return Soaked(
        device=device,
        rows=run.rows,
        steps=run.steps,
        requests=run.requests,
        seconds=round(time.monotonic() - begin, 1),
        wrong_rows=run.wrong_rows,
        host_slope=round(slope_of(found[:, 1], found[:, 2]) * 1e6),
        device_slope=round(slope_of(found[:, 1], found[:, 3]) * 1e6),
        million_rows=round(float(found[-1, 1] - found[0, 1]) / 1e6, 3),
        throughput=round(rates[1] / rates[0], 3),
    )


def slope_of(x: np.ndarray, y: np.ndarray) -> float:
    """Of the line through the points, by least squares."""
    return float(np.polyfit(x - x.mean(), y, 1)[0])


def main() -> int:
    """Run, print and write what was found; exit code 1 for a fault."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--rows", type=int, default=10**9 if gpu else 10**7)
    parser.add_argument("--seconds", type=float, default=540.0 if gpu else 7200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = soak(arguments.device, arguments.rows, arguments.seconds, arguments.seed)
    report = {**asdict(found), "faults": found.faults()}
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if found.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
