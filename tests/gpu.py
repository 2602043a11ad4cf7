"""`make gpu`: everything that only a GPU can show, in one run on its own python3; writes the evidence as JSON.

The parts run as separate processes, so that one which fails leaves the others' results standing. The JSON goes to
docs/evidence/h200.json, or to $OUT/h200.json where OUT is set.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.steady_state import read

ROOT = Path(__file__).parent.parent
NSIGHT = Path("/opt/nvidia")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# What they watch (tests/sanitize.py). Without torch's cache every tensor ends where its memory does; a capture needs the cache.
SANITIZED: dict[str, dict[str, str]] = {"exercise": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "loop": {}}
# A WHILE node under these, before the GPU gets crowded: there they end in faults of their own. racecheck ends with a segmentation
# fault on every WHILE node, also without programmatic launches.
DEVICE_LOOP_TOOLS = ("memcheck", "initcheck", "synccheck")
BENCHES = ("numba,threads,prepare,commit,loop,prefill,ring,attention,alternatives,end to end", "batches,operators")
SOAK_SECONDS = os.environ.get("ZOS_GPU_SOAK_SECONDS", "45")
TEST_PROCESSES = 8
LONGEST_PART_S = 330  # a part that takes longer is given up, so that the others' results stand
PARITY_CASES = int(os.environ.get("ZOS_GPU_PARITY_CASES", "1000000"))
FULL_GENERATION = "-k=generates_what_dense"
FULL_TRACE = os.environ.get("ZOS_FULL_TRACE", "")  # a whole trace to replay, where one lies at hand
SAMPLE_TRACE = "examples/traces/azure_llm_2023_conv_sample.csv"
MOONCAKE_TRACE = "examples/traces/mooncake_fast25_conversation_sample.jsonl"
RING = ("--chunk", "512", "--max-prefill-tokens", "2048", "--ring")


def kernels_sha256() -> str:
    """Hash of all kernel sources in the order of `LC_ALL=C ls *.cu *.cuh`."""
    folder = ROOT / "device_kernels"
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".cu", ".cuh"))
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def run(name: str, command: list[str], **environment: str) -> tuple[int, str]:
    """Run one part; returns (exit code, output). What it prints is shown when it fails."""
    begin = time.monotonic()
    given_up = ["timeout", str(LONGEST_PART_S)]  # exits with 124
    found = subprocess.run(
        [*given_up, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"{name}: exit {found.returncode} after {time.monotonic() - begin:.0f} s", flush=True)
    if found.returncode:
        print(found.stdout[-4000:], flush=True)
    return found.returncode, found.stdout


def tests(scratch: Path, name: str, chosen: list[str], **environment: str) -> dict[str, Any]:
    """Run the tests that touch a GPU of some files, or of all that options choose."""
    report = scratch / f"{name.replace(' ', '_')}.xml"
    options = ["-q", "-m", "gpu", "--tb=short", f"--junitxml={report}", *chosen]
    code, _ = run(name, [sys.executable, "-m", "pytest", *options], **environment)
    if not report.exists():
        return {"passed": 0, "failed": -1, "skipped": 0, "exit_code": code}
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped, "exit_code": code}


def all_tests(scratch: Path) -> dict[str, Any]:
    """Every test that touches a GPU, the files dealt out to several processes; the sums, and the worst exit code."""
    files = sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    hands = [[str(path) for path in files[first::TEST_PROCESSES]] for first in range(TEST_PROCESSES)]
    with ThreadPoolExecutor(TEST_PROCESSES) as pool:
        found = list(pool.map(lambda hand: tests(scratch, f"tests {hand[0]}", hand[1]), enumerate(hands)))
    sums = {key: sum(part[key] for part in found) for key in ("passed", "failed", "skipped")}
    return {**sums, "exit_code": max(part["exit_code"] for part in found)}


def watched(tool: str, what: list[str], **environment: str) -> tuple[int, int]:
    """(exit code, findings) of a part of tests/sanitize.py under a compute-sanitizer tool.

    The exit code is that of what ran under the tool: not 0 where a comparison failed.
    """
    watch = [
        "/usr/local/cuda/bin/compute-sanitizer",
        f"--tool={tool}",
        "--report-api-errors=no",  # cuda.core asks the driver for functions that it may lack
        "--kernel-name-exclude",
        "kernel_substring=at::native",
    ]
    name = " ".join((tool, *what[:1]))
    code, output = run(name, [*watch, sys.executable, "-m", "tests.sanitize", *what], **environment)
    return code, findings(output)


def sanitizer(tool: str, device_loop: tuple[int, int] | None) -> dict[str, Any]:
    """Findings of a compute-sanitizer tool in each part that it watches, and its planted fault, which must be found."""
    parts = {part: watched(tool, [part], **settings) for part, settings in SANITIZED.items()}
    if device_loop is not None:
        parts["device_loop"] = device_loop
    return {
        "findings": {part: found for part, (_, found) in parts.items()},
        "planted_findings": watched(tool, ["plant", tool])[1],
        "exit_codes": {part: code for part, (code, _) in parts.items()},
    }


def findings(output: str) -> int:
    """Number in the tool's closing line; -1 where it has none."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    return int(summary[1]) if summary else -1


def parity() -> dict[str, Any]:
    """Random cases, device against host; the oracle, the slowest, in one round of twenty."""
    arguments = ["--device", "cuda", "--cases", str(PARITY_CASES), "--oracle-every", "20"]
    code, output = run("parity", [sys.executable, "-m", "zos", "parity", *arguments])
    closing = re.search(r"([\d,]+) cases .*?; (\d+) mismatches", output)
    cases, mismatches = (int(number.replace(",", "")) for number in closing.groups()) if closing else (0, -1)
    return {"cases": cases, "mismatches": mismatches, "summary": output.splitlines()[-1:], "exit_code": code}


def command(name: str, scratch: Path, *arguments: str) -> dict[str, Any]:
    """Run a zos command that writes JSON."""
    report = scratch / f"{re.sub(r'[ ,]', '_', name)}.json"
    code, _ = run(name, [sys.executable, "-m", "zos", *arguments, "--json", str(report)])
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    if "trace" in found.get("options", {}):
        found["options"]["trace"] = Path(found["options"]["trace"]).name  # no path of any machine in the evidence
    return {"exit_code": code, **found}


def soak(scratch: Path) -> dict[str, Any]:
    """A loop under churn: what was wrong, and how memory and throughput went."""
    report = scratch / "soak.json"
    code, _ = run("soak", [sys.executable, "-m", "tests.soak", "--seconds", SOAK_SECONDS, "--json", str(report)])
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return {"exit_code": code, **found}


def steady_state(scratch: Path, trace: str, steps_per_replay: int) -> dict[str, Any]:
    """What Nsight Systems, which comes with Nsight Compute, sees of 1,000 steps; it needs libdw (a folder in ZOS_NSYS_LIBS).

    `trace`: node, which sees each kernel, or graph, which disturbs the replays least.
    """
    found = sorted(NSIGHT.glob("nsight-compute/*/host/target-linux-x64/nsys")) or [Path("nsys")]
    libraries = os.pathsep.join(filter(None, (os.environ.get("ZOS_NSYS_LIBS"), os.environ.get("LD_LIBRARY_PATH"))))
    report, export = scratch / f"{trace}{steps_per_replay}.nsys-rep", scratch / f"{trace}{steps_per_replay}.sqlite"
    flags = f"-s none --cpuctxsw=none -t cuda,nvtx --cuda-graph-trace={trace} --capture-range=cudaProfilerApi".split()
    workload = [sys.executable, "-m", "tests.steady_state", "run", "--steps-per-replay", str(steps_per_replay)]
    profile = [str(found[-1]), "profile", *flags, "--capture-range-end=stop", "-o", str(report), *workload]
    code, output = run(f"nsys {trace}", profile, LD_LIBRARY_PATH=libraries)
    arguments = ["export", "--type", "sqlite", "-o", str(export), str(report)]
    if code == 0:
        code, _ = run("nsys export", [str(found[-1]), *arguments], LD_LIBRARY_PATH=libraries)
    if code:
        return {"exit_code": code}
    host = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return {"exit_code": 0, **read(export), **host}


def write(evidence: dict[str, Any]) -> None:
    """Write the evidence, as far as it goes."""
    target = Path(os.environ.get("OUT", ROOT / "docs" / "evidence")) / "h200.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(evidence, indent=1) + "\n")


def main() -> int:
    """Run all parts and write the evidence; exit code 1 if any failed."""
    import torch

    evidence: dict[str, Any] = {
        "kernels_sha256": kernels_sha256(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": sys.version.split()[0],
            "cuda": torch.version.cuda,
            **{name: importlib.metadata.version(name) for name in ("torch", "cupy-cuda13x", "numba", "numpy")},
        },
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        scratch = Path(folder)
        benches = [command(f"bench {names}", scratch, "bench", "--filter", names) for names in BENCHES]  # alone
        evidence["benchmarks"] = [row for bench in benches for row in bench.get("rows", [])]
        for trace, each in (("node", 1), ("node", 4), ("graph", 1)):  # alone too
            evidence[f"steady_state_by_{trace}_{each}_steps_per_replay"] = steady_state(scratch, trace, each)
        write(evidence)
        loops = {tool: pool.submit(watched, tool, ["device_loop"]) for tool in DEVICE_LOOP_TOOLS}
        device_loops = {tool: loop.result() for tool, loop in loops.items()}
        replay, trace = ("replay", "--device", "cuda"), FULL_TRACE or SAMPLE_TRACE
        parts = {
            "tests": pool.submit(all_tests, scratch),
            # 64 prompts of 1 to 2,000 tokens, 512 generated each, against the dense twin
            "generation_full_size": pool.submit(
                tests, scratch, "generation", [FULL_GENERATION, "tests/test_v4_generation.py"], ZOS_V4_FULL="1"
            ),
            "parity": pool.submit(parity),
            "replay_checked": pool.submit(
                command, "replay checked", scratch, *replay, SAMPLE_TRACE, "--check", "every"
            ),
            "replay": pool.submit(command, "replay", scratch, *replay, trace, "--check", "off"),
            "replay_ring_checked": pool.submit(
                command, "replay ring checked", scratch, *replay, SAMPLE_TRACE, *RING, "--check", "4"
            ),
            "replay_churn": pool.submit(
                command,
                "replay churn",
                scratch,
                *replay,
                trace,
                "--max-batch",
                "2",
                "--churn",
                "0.02",
                "--check",
                "500",
            ),
            "replay_device_loop": pool.submit(
                command, "replay device loop", scratch, *replay, trace, "--max-batch", "16", "--churn", "--device-loop"
            ),
            "replay_steps": pool.submit(
                command,
                "replay steps",
                scratch,
                *replay,
                SAMPLE_TRACE,
                "--steps-per-replay",
                "8",
                "--host-stall-ms",
                "2",
            ),
            "replay_ring": pool.submit(
                command, "replay ring", scratch, *replay, MOONCAKE_TRACE, *RING, "--check", "off"
            ),
            **{f"sanitizer_{tool}": pool.submit(sanitizer, tool, device_loops.get(tool)) for tool in TOOLS},
        }
        evidence.update({name: part.result() for name, part in parts.items()})
        write(evidence)  # what stands should the time run out
        evidence["soak"] = soak(scratch)  # alone: its rate must stay
    good = (
        evidence["tests"]["exit_code"]
        == evidence["generation_full_size"]["exit_code"]
        == max(bench["exit_code"] for bench in benches)
        == evidence["parity"]["exit_code"]
        == evidence["soak"]["exit_code"]
        == 0
        and all(evidence[name]["exit_code"] == 0 for name in parts if name.startswith("replay"))
        and all(part["exit_code"] == 0 for name, part in evidence.items() if name.startswith("steady_state"))
        and evidence["tests"]["skipped"] == 0
        and all(
            not any(part["findings"].values()) and not any(part["exit_codes"].values()) and part["planted_findings"] > 0
            for name, part in evidence.items()
            if name.startswith("sanitizer")
        )
    )
    write(evidence)
    for r in evidence["benchmarks"]:
        print(
            f"{r['bench']:28} {r['variant']:22} {r['size']:6} {r['median_us']:8.2f} {r['reference']:14} {r['ratio']:6.2f}"
        )
    print(json.dumps({key: value for key, value in evidence.items() if key != "benchmarks"}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
