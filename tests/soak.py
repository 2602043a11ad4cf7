"""`make soak`: a decode loop under churn for long: no growth of memory, no drift from the model, no loss of throughput.

On the CPU it runs until so many rows were prepared (ZOS_SOAK_ROWS, default 10 million), on a GPU for so many seconds
(ZOS_SOAK_SECONDS, default 540). Every record is compared with a model that knows calls only, the whole table at every sample.
Exit code 1 where a bound is broken.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zos
from tests.test_churn import Churned
from zos.requests import RequestState

ROWS = 64
RECORDS = 32
LOADS = (96, 24, 60, 5, 40, 128)  # requests that are kept waiting or running, one after the other
REPLAYS_OF_A_LOAD = 50
SAMPLES = 60
WARM_UP = 1 / 6  # share of the samples that bounds do not judge: caches fill, graphs are captured
# Allowed over all samples after the warm-up, by least squares
GROWTH_BYTES = {"host": 8 << 20, "device": 2 << 20, "tensor": 64 << 10}
LEAST_RATIO = 0.8  # throughput of the last third of the samples by that of the first
PAGE_BYTES = resource.getpagesize()
OVER = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
PLANTED_LEAK_BYTES = 1 << 16  # a replay
PLANTED_DELAY_S = 2e-3  # a replay, from the middle on


class Soaked(Churned):
    """A loop under churn whose batch goes through small and large loads, again and again.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws what happens.
    device : str
        Where it runs.

    Attributes
    ----------
    seconds : float
        Spent in the library: CPU time on the CPU, which neighbours on the machine do not lengthen, else wall time.
    calls : Counter
        How often the host did what.
    plant : callable
        Called before each replay: a fault that must be found.
    """

    def __init__(self, rng: np.random.Generator, device: str) -> None:
        super().__init__(rng, ROWS, device, RECORDS)
        self.seconds = 0.0
        self.calls: Counter[str] = Counter()
        self.plant: Callable[[], None] = lambda: None
        self._clock = time.process_time if device == "cpu" else time.perf_counter
        self._loads = itertools.cycle(load for load in LOADS for _ in range(REPLAYS_OF_A_LOAD))

    def turn(self) -> None:
        """One replay with what goes before it."""
        self.requests = [request for request in self.requests if request.state not in OVER]
        load = next(self._loads)
        while self.loop.pending < load:
            self.submit()
        for name in ("cancel", "preempt", "resume", "reset"):
            if self.rng.random() < 0.5:
                getattr(self, name)()
        begin = self._clock()
        self.plant()
        try:
            self.launch()
        except zos.MailboxFullError:
            self.publish()
        records = self.loop.poll()
        self.seconds += self._clock() - begin
        self.check(records)

    def follow(self, name: str) -> None:
        """Also count the call."""
        super().follow(name)
        call = getattr(self.svc, name)

        def counted(*arguments: Any, **options: Any) -> None:
            self.calls[name] += 1
            call(*arguments, **options)

        setattr(self.svc, name, counted)


def planted(soaked: Soaked, fault: str, is_late: Callable[[], bool]) -> Callable[[], None]:
    """Make a fault: memory that is held, a table that drifts once, or time that is lost from the middle on."""
    held: list[torch.Tensor] = []

    def leak() -> None:
        held.append(torch.ones(PLANTED_LEAK_BYTES, dtype=torch.uint8, device=soaked.svc.device))

    def drift() -> None:
        if is_late() and not held:
            held.append(torch.empty(0))
            soaked.svc.table.head += 1

    def slow() -> None:
        until = soaked._clock() + (PLANTED_DELAY_S if is_late() else 0)
        while soaked._clock() < until:
            pass

    return {"leak": leak, "drift": drift, "slow": slow}[fault]


def memory_in_use(device: str) -> dict[str, int]:
    """Bytes by place: resident of this process; of the device, whoever uses it; of torch's tensors there."""
    used = {"host": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES}
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        used |= {"device": total - free, "tensor": torch.cuda.memory_allocated()}
    return used


def soak(device: str, rows: float, seconds: float, seed: int, fault: str | None = None) -> dict[str, Any]:
    """Run until so many rows were checked or so much time is over.

    Parameters
    ----------
    device : str
        Where it runs.
    rows, seconds : float
        Whichever comes first ends it; math.inf for no bound.
    seed : int
        Of everything that is drawn.
    fault : {"leak", "drift", "slow"}, optional
        What to plant.

    Returns
    -------
    dict
        Figures, samples, and what broke a bound: "faults", empty where all is well.
    """
    soaked = Soaked(np.random.default_rng(seed), device)
    begin = time.monotonic()

    def done() -> float:
        return max(soaked.rows_checked / rows, (time.monotonic() - begin) / seconds)

    if fault:
        soaked.plant = planted(soaked, fault, lambda: done() > 1 / 2)
    soaked.submit()
    if device != "cpu":
        soaked.loop.capture()
    gc.collect()
    gc.freeze()  # or each collection would look through all that torch has
    samples: list[dict[str, float]] = []
    faults = []
    try:
        while done() < 1:
            soaked.turn()
            if done() * SAMPLES >= len(samples) + 1:
                soaked.compare()
                gc.collect()
                samples.append(
                    {
                        "rows": soaked.rows_checked,
                        "library_s": round(soaked.seconds, 4),
                        **{f"{place}_bytes": used for place, used in memory_in_use(device).items()},
                    }
                )
        soaked.compare()
    except AssertionError as error:
        faults.append(f"drift: {error}")
    figures = judged(samples)
    faults += broken(figures) if samples[2:] else ["too few samples"]
    on_cuda = device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "planted": fault,
        "seed": seed,
        "rows": soaked.rows_checked,
        "steps": soaked.steps_checked,
        "wall_s": round(time.monotonic() - begin, 1),
        "records_compared": soaked.steps_checked,
        "tables_compared": len(samples),
        "calls": dict(soaked.calls),
        "counters": soaked.svc.counters(),
        **figures,
        "faults": faults,
        "samples": samples,
    }


def judged(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Slopes of memory and throughput by thirds of the samples after the warm-up."""
    after = samples[math.ceil(len(samples) * WARM_UP) :]
    if len(after) < 3:
        return {}
    rows = np.array([sample["rows"] for sample in after]) / 1e6
    figures: dict[str, Any] = {}
    for place in (place for place in GROWTH_BYTES if f"{place}_bytes" in after[0]):
        used = np.array([sample[f"{place}_bytes"] for sample in after])
        slope = float(np.polyfit(rows, used, 1)[0])
        figures[f"{place}_bytes_per_million_rows"] = round(slope)
        figures[f"{place}_growth_bytes"] = round(slope * float(rows[-1] - rows[0]))
    third = (len(after) - 1) // 3
    first, last = (
        (end["rows"] - begin["rows"]) / max(end["library_s"] - begin["library_s"], 1e-9)
        for begin, end in ((after[0], after[third]), (after[-1 - third], after[-1]))
    )
    return {
        **figures,
        "rows_per_s_first_third": round(first),
        "rows_per_s_last_third": round(last),
        "last_by_first": round(last / first, 4),
    }


def broken(figures: dict[str, Any]) -> list[str]:
    """Bounds that figures break."""
    faults = []
    for place, most in GROWTH_BYTES.items():
        growth = figures.get(f"{place}_growth_bytes", 0)
        if growth > most:
            slope = figures[f"{place}_bytes_per_million_rows"]
            faults.append(f"leak: {place} memory grew by {growth} B ({slope} B a million rows), more than {most}")
    if figures["last_by_first"] < LEAST_RATIO:
        faults.append(f"slow: the last third ran at {figures['last_by_first']} of the first, less than {LEAST_RATIO}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print all but the samples, write JSON; 1 where a bound is broken."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--rows", type=float, help="prepared rows (ZOS_SOAK_ROWS; on a CPU 10 million)")
    parser.add_argument("--seconds", type=float, help="time (ZOS_SOAK_SECONDS; on a GPU 540)")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--plant", choices=("leak", "drift", "slow"), help="a fault that must be found")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    arguments = parser.parse_args(argv)
    on_cpu = arguments.device == "cpu"
    rows = arguments.rows or float(os.environ.get("ZOS_SOAK_ROWS", "1e7" if on_cpu else "inf"))
    seconds = arguments.seconds or float(os.environ.get("ZOS_SOAK_SECONDS", "inf" if on_cpu else "540"))
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    found = soak(arguments.device, rows, seconds, seed, arguments.plant)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
