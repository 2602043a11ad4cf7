"""`zos audit`: where a decode loop waits, from the Nsight Systems export of any engine."""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zos.cli import InputError, plain
from zos.cli.nsys_export import Activity, Call, Export, read_export
from zos.cli.options import check_output

STEP = "zos.step"
WORST = 3  # gaps that are told apart
TOP_KERNELS = 8
NAME = 44  # characters of a name in messages and reports
GRAPH_LAUNCH = re.compile(r"(cuda|cu)GraphLaunch")
# What a call is, by its name. The synchronisation table is not used: the kinds that it gives are not those of its calls.
KINDS = (
    ("graph launch", GRAPH_LAUNCH),
    ("kernel launch", re.compile(r"(cuda|cu)Launch(Cooperative)?(Kernel|HostFunc)")),
    ("device synchronise", re.compile(r"cudaDeviceSynchronize|cudaThreadSynchronize|cuCtxSynchronize")),
    ("stream synchronise", re.compile(r"(cuda|cu)StreamSynchronize")),
    ("event synchronise", re.compile(r"(cuda|cu)EventSynchronize")),
    ("event query", re.compile(r"(cuda|cu)(Event|Stream)Query")),
    ("blocking copy", re.compile(r"(cuda|cu)Mem(cpy|set)(?!.*Async)")),
    ("allocation", re.compile(r"cudaMalloc|cudaFree|cudaHostAlloc|cuMem(Alloc|Free|Create|Release|HostAlloc)")),
)
OFFENCES = tuple(kind for kind, _ in KINDS if kind != "graph launch")


@dataclass
class Step:
    """A step: what the host called, and what the GPU did for it."""

    start: int  # ns, on the host
    end: int
    calls: list[Call]
    work: list[Activity] = field(default_factory=list)

    @property
    def host_us(self) -> float:
        """Time that the host spent on it."""
        return (self.end - self.start) / 1e3

    @property
    def gpu_span(self) -> tuple[int, int] | None:
        """Beginning and end of its work on the GPU, ns; None where it has none."""
        return (self.work[0].start, max(activity.end for activity in self.work)) if self.work else None

    def counts(self) -> Counter[str]:
        """Calls by kind; copies and memsets by what and size, whoever launched them."""
        found = Counter(kind for call in self.calls for kind, name in KINDS if name.match(call.name))
        found.update(_transfer(activity) for activity in self.work if _is_transfer(activity))
        return found


def find_steps(export: Export, name: str | None) -> tuple[list[Step], str]:
    """Steps, and how they were found: by NVTX ranges of a name (default: zos.step, if there are any), or by graph launches."""
    wanted = name or STEP
    ranges = [span for span in export.ranges if span.name == wanted]
    launches = [call for call in export.calls if GRAPH_LAUNCH.match(call.name)]
    if ranges:
        bounds = [(span.start, span.end, span.thread) for span in ranges]
        how = f"NVTX ranges {wanted}"
    elif name is not None or not launches:
        names = ", ".join(plain(name, NAME) for name in sorted({span.name for span in export.ranges})[:10]) or "none"
        raise InputError(f"no NVTX range {wanted} and no graph launch to tell steps by (--step NAME); ranges: {names}")
    else:
        # From one launch to the next of the thread; the last step has its launch alone.
        starts_of = defaultdict[int, list[int]](list)
        for launch in launches:
            starts_of[launch.thread].append(launch.start)
        bounds = []
        for launch in launches:
            its = starts_of[launch.thread]
            after = bisect.bisect_right(its, launch.start)
            bounds.append((launch.start, its[after] if after < len(its) else launch.end, launch.thread))
        how = "graph launches"
    starts = [call.start for call in export.calls]
    steps, of_call = [], {}
    for start, end, thread in bounds:
        within = export.calls[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]
        calls = [call for call in within if call.thread == thread]
        steps.append(Step(start, end, calls))
        of_call.update({call.correlation: steps[-1] for call in calls if call.correlation >= 0})
    for activity in export.work:
        if activity.correlation in of_call:
            of_call[activity.correlation].work.append(activity)
    return steps, how


def audit(export: Export, name: str | None = None) -> dict[str, Any]:
    """All figures of an export, as `--json` writes them; InputError where no step is found."""
    steps, how = find_steps(export, name)
    counts = [step.counts() for step in steps]
    kinds = sorted({kind for of_step in counts for kind in of_step})
    busy, idle = [], []
    for step in steps:
        if step.gpu_span:
            busy.append(_covered(step.work) / 1e3)
            idle.append((step.gpu_span[1] - step.gpu_span[0]) / 1e3 - busy[-1])
    gaps = _gaps(steps)
    return {
        "steps": len(steps),
        "found_by": how,
        "per_step": {kind: _summary([of_step[kind] for of_step in counts]) for kind in kinds},
        "host_us": _summary([step.host_us for step in steps]),
        "gpu_busy_us": _summary(busy),
        "gpu_idle_within_us": _summary(idle),
        "gap_to_next_us": _summary([gap for gap, _, _ in gaps]),
        "worst_gaps": [
            {"after_step": number, "us": round(gap, 3), "host": _host_during(export, steps, number, begin, gap)}
            for gap, number, begin in sorted(gaps, reverse=True)[:WORST]
        ],
        "kernels": _kernels(steps),
        "offences": _offences(counts),
    }


def _transfer(activity: Activity) -> str:
    return f"{activity.what}, {activity.size} B"


def _is_transfer(activity: Activity) -> bool:
    return activity.what.startswith(("memcpy", "memset"))


def _covered(work: Iterable[Activity]) -> int:
    """Time, ns, in which at least one of the activities (by start) runs."""
    covered, until = 0, 0
    for activity in work:
        covered += max(0, activity.end - max(activity.start, until))
        until = max(until, activity.end)
    return covered


def _gaps(steps: Sequence[Step]) -> list[tuple[float, int, int]]:
    """(µs, number of the step before, its end in ns) of the time from a step's last GPU work to the next one's first."""
    spans = [(step.gpu_span, number) for number, step in enumerate(steps) if step.gpu_span]
    found = []
    for (before, number), (after, _) in itertools.pairwise(spans):
        assert before is not None and after is not None
        found.append((max(0, after[0] - before[1]) / 1e3, number, before[1]))
    return found


def _host_during(export: Export, steps: Sequence[Step], number: int, begin: int, gap_us: float) -> str:
    """What the host was doing in a gap: the calls that fill most of it, or that it was outside of CUDA."""
    end = begin + int(gap_us * 1e3)
    overlaps: Counter[str] = Counter()
    for call in export.calls:
        if call.start >= end:
            break
        overlaps[call.name] += max(0, min(call.end, end) - max(call.start, begin))
    inside = [f"{plain(name, NAME)} {time / 1e3:.1f} µs" for name, time in overlaps.most_common(2) if time > 0]
    outside = (end - begin - sum(overlaps.values())) / 1e3
    next_call = next((call for call in steps[number + 1].calls if GRAPH_LAUNCH.match(call.name)), None)
    late = (
        f"; its next launch came {(next_call.start - begin) / 1e3:.1f} µs after"
        if next_call and next_call.start > begin
        else ""
    )
    return ", ".join([*inside, f"outside of CUDA {max(outside, 0):.1f} µs"]) + late


def _summary(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 99th percentile and largest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    figures = {"median": statistics.median(ordered), "p99": ordered[at], "max": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


def _kernels(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The kernels that take most time."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for activity in step.work:
            if not _is_transfer(activity):
                times.setdefault(activity.what, []).append((activity.end - activity.start) / 1e3)
    rows = [
        {"name": name, "count": len(us), "median_us": round(statistics.median(us), 3), "max_us": round(max(us), 3)}
        for name, us in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
    return rows[:TOP_KERNELS]


def _offences(counts: Sequence[Counter[str]]) -> list[str]:
    """What a loop without overhead does not do."""
    found = []
    extra = [number for number, of_step in enumerate(counts) if of_step["graph launch"] > 1]
    if extra:
        found.append(f"more than one graph launch in {len(extra)} steps, first in step {extra[0]}")
    kinds = [kind for of_step in counts for kind in of_step]
    for kind in dict.fromkeys([*OFFENCES, *(kind for kind in kinds if kind.startswith(("memcpy", "memset")))]):
        numbers = [number for number, of_step in enumerate(counts) if of_step[kind]]
        if numbers:
            total = sum(of_step[kind] for of_step in counts)
            found.append(f"{kind}: {total} in {len(numbers)} steps, first in step {numbers[0]}")
    return found


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos audit`."""
    parser = subparsers.add_parser(
        "audit",
        help="read from a profile where a decode loop waits",
        description="Read the sqlite export of an Nsight Systems report (`nsys export --type sqlite`), of any engine, and say what "
        "each step launched, copied and waited for, and how long the GPU was idle.",
    )
    parser.add_argument("export", type=Path, metavar="FILE.sqlite")
    parser.add_argument("--step", metavar="NAME", help=f"NVTX range of a step (default: {STEP}, else graph launches)")
    parser.add_argument(
        "--assert-zero-overhead", action="store_true", help="exit code 1 if steps do more than launch one graph"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of an export; 1 for an offence under --assert-zero-overhead."""
    check_output(arguments.json, arguments.export)
    found = audit(read_export(arguments.export), arguments.step)
    print("\n".join(report(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(arguments.assert_zero_overhead and bool(found["offences"]))


def report(found: dict[str, Any]) -> list[str]:
    """Lines of a report for people."""
    lines = [f"{'steps':<34}{found['steps']}   (by {found['found_by']})"]
    lines.append(f"{'':<34}{'median':>10}{'p99':>10}{'max':>10}")
    named = {
        "host µs": found["host_us"],
        "GPU busy µs": found["gpu_busy_us"],
        "GPU idle within a step µs": found["gpu_idle_within_us"],
        "GPU gap to the next step µs": found["gap_to_next_us"],
        **{f"{kind} a step": figures for kind, figures in found["per_step"].items()},
    }
    for name, figures in named.items():
        if figures is not None:
            lines.append(f"{name:<34}" + "".join(f"{figures[key]:>10.6g}" for key in ("median", "p99", "max")))
    for gap in found["worst_gaps"]:
        lines.append(f"gap of {gap['us']:.1f} µs after step {gap['after_step']}: {gap['host']}")
    for kernel in found["kernels"]:
        name, times = (
            plain(kernel["name"][:NAME], NAME),
            f"x{kernel['median_us']:>9.2f} µs, most {kernel['max_us']:.2f}",
        )
        lines.append(f"{name:<46}{kernel['count']:>7} {times}")
    lines += [f"offence: {offence}" for offence in found["offences"]] or [
        "no offence: one graph launch a step, nothing else"
    ]
    return lines
