"""`zos profile`: runs a command under Nsight Systems and audits what it did."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zos.cli import InputError
from zos.cli.audit import audit, find_steps, report
from zos.cli.nsys_export import Export, read_export

NO_NSYS = 3
FLAGS = ("-s", "none", "--cpuctxsw=none", "-t", "cuda,nvtx", "--cuda-graph-trace=node", "--force-overwrite=true")
BY_PROFILER_API = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")
ROOTS = ("/opt/nvidia", "/usr/local", "/usr/lib/nsight-systems")
PATTERNS = (
    "nsight-systems/*/bin/nsys",
    "nsight-systems/*/target-linux-x64/nsys",
    "nsight-compute/*/host/target-linux-x64/nsys",
    "cuda*/bin/nsys",
    "bin/nsys",
)
INSTALL = (
    "install Nsight Systems (Debian, Ubuntu: nsight-systems-cli of NVIDIA's repository), or name it with --nsys PATH"
)
LIBRARIES = "libdw1 libelf1 libbz2-1.0"
STEPS_DRAWN = 12


def find_nsys(chosen: Path | None, roots: Sequence[str] = ROOTS) -> Path | None:
    """Path of nsys: the one chosen, on PATH, or the newest in CUDA's and Nsight's folders; None where there is none."""
    if chosen is not None:
        return chosen if chosen.is_file() else None
    on_path = shutil.which("nsys")
    if on_path:
        return Path(on_path)
    found = [path for root in roots for pattern in PATTERNS for path in sorted(Path(root).glob(pattern), reverse=True)]
    return found[0] if found else None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos profile`."""
    parser = subparsers.add_parser(
        "profile",
        help="profile a command with Nsight Systems and audit it",
        description="Run a command under Nsight Systems, export the report, and say where its steps wait (as zos audit). Leaves "
        "report, export, summary.md and timeline.png in --out. Exit code 3 without nsys, else that of the command.",
    )
    parser.add_argument("--out", type=Path, default=Path("zos-profile"), metavar="DIR", help="where to (zos-profile)")
    parser.add_argument("--nsys", type=Path, metavar="PATH", help="nsys to use")
    parser.add_argument("--step", metavar="NAME", help="NVTX range of a step, as for zos audit")
    parser.add_argument("--profiler-api", action="store_true", help="from cudaProfilerStart to cudaProfilerStop only")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND …")


def run(arguments: argparse.Namespace) -> int:
    """Profile, export, audit; exit code of the command, 3 without nsys."""
    command = arguments.command_line[arguments.command_line[:1] == ["--"] :]
    if not command:
        raise InputError("no command: zos profile -- python my_engine.py")
    nsys = find_nsys(arguments.nsys)
    if nsys is None:
        print(f"zos profile: no nsys found: {INSTALL}", file=sys.stderr)
        return NO_NSYS
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    trace, export = out / "report.nsys-rep", out / "report.sqlite"
    flags = [*FLAGS, *(BY_PROFILER_API if arguments.profiler_api else ())]
    profiled = subprocess.run(
        [str(nsys), "profile", *flags, "-o", str(trace), *command], check=False, env={**os.environ, "ZOS_NVTX": "1"}
    )
    if not trace.exists():
        raise InputError(
            f"nsys ended with {profiled.returncode} and left no report; if it names a missing library, install {LIBRARIES}"
        )
    exported = subprocess.run(
        [str(nsys), "export", "--type", "sqlite", "--force-overwrite=true", "-o", str(export), str(trace)],
        check=False,
        capture_output=True,
        text=True,
    )
    if exported.returncode or not export.exists():
        raise InputError(f"nsys export failed ({exported.stderr.strip()[-300:]}); it may lack {LIBRARIES}")
    found, data = _audited(export, arguments.step)
    lines = report(found)
    print("\n".join(lines))
    (out / "summary.md").write_text(_summary(command, lines), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(data, arguments.step, out / "timeline.png")
    if profiled.returncode:
        print(f"zos profile: the command ended with exit code {profiled.returncode}", file=sys.stderr)
    return profiled.returncode


def _audited(export: Path, step: str | None) -> tuple[dict[str, Any], Export]:
    data = read_export(export)
    return audit(data, step), data


def _summary(command: Sequence[str], lines: Sequence[str]) -> str:
    """The report as a markdown file."""
    return "\n".join(["# Profile", "", f"`{' '.join(command)}`", "", "```", *lines, "```", ""])


def draw(data: Export, step: str | None, path: Path) -> None:
    """Draw the first steps: host calls above, GPU work below; says so where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no timeline: matplotlib is not installed", file=sys.stderr)
        return
    steps = [one for one in find_steps(data, step)[0] if one.work][:STEPS_DRAWN]
    if not steps:
        print("no timeline: no step has work on the GPU", file=sys.stderr)
        return
    begin = min(steps[0].start, steps[0].work[0].start)
    figure, axes = pyplot.subplots(figsize=(12, 2.4), layout="constrained")
    for number, one in enumerate(steps):
        colour = f"C{number % 10}"
        host = [((call.start - begin) / 1e3, (call.end - call.start) / 1e3) for call in one.calls]
        device = [((work.start - begin) / 1e3, (work.end - work.start) / 1e3) for work in one.work]
        axes.broken_barh(host, (1.1, 0.8), color=colour)
        axes.broken_barh(device, (0.1, 0.8), color=colour)
    axes.set_yticks((0.5, 1.5), ("GPU", "host calls"))
    axes.set_xlabel("µs")
    axes.set_title(f"the first {len(steps)} steps", fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
