"""`zos parity`: random cases through the oracle and every path that this machine has, bit for bit."""

from __future__ import annotations

import argparse
import itertools
import math
import secrets
import time

import numpy as np

from zos.cli import InputError
from zos.cli.options import chosen_device, real, whole
from zos.cli.parity_round import Mismatch, Rig, Round
from zos.cli.setups import Setup, random_setup

LONGEST_SECONDS = 1e9
DEFAULT_CASES = 20_000
MISMATCHES_SHOWN = 10


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos parity`."""
    parser = subparsers.add_parser(
        "parity",
        help="compare the paths of the service with the oracle and each other on random cases",
        description="Compare every path that this machine has with the oracle and each other, bit for bit, "
        "on random tables, decode and prefill batches, results and edits. A case is a batch row. Exit code 1 if any "
        "differs.",
    )
    parser.add_argument("--cases", type=whole(1), help=f"stop after so many cases (default {DEFAULT_CASES:,})")
    parser.add_argument("--seconds", type=real(0, LONGEST_SECONDS), help="stop after so many seconds")
    parser.add_argument(
        "--seed", type=whole(0), help="repeat a run; its first line names its seed (default: a new one)"
    )
    parser.add_argument("--round", type=whole(0), help="run this round of the seed alone")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="paths beside Numba (default auto)"
    )
    parser.add_argument(
        "--oracle-every",
        type=whole(1),
        default=1,
        metavar="N",
        help="ask the oracle, the slowest, in about one round of N; the others hold the GPU against Numba",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run rounds up to a limit; print the seed, mismatches and totals; return 1 on any mismatch."""
    devices = ("cpu",) if chosen_device(arguments.device) == "cpu" else ("cpu", "cuda")
    if arguments.oracle_every > 1 and len(devices) == 1:
        raise InputError("--oracle-every needs a second path: without a GPU only the oracle can judge")
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}; paths: oracle{', '.join(['', *devices])}", flush=True)
    rigs: dict[Setup, Rig] = {}
    cases = judged = mismatches = 0
    begin = time.perf_counter()
    for number in itertools.count() if arguments.round is None else (arguments.round,):
        rng = np.random.default_rng([seed, number])
        setup = random_setup(rng)
        if setup not in rigs:
            rigs[setup] = Rig.make(setup, devices)
        asks_oracle = int(rng.integers(0, 2**31)) % arguments.oracle_every == 0 or arguments.round is not None
        this = Round(rigs[setup], rng, asks_oracle)
        try:
            this.run()
        except Mismatch as mismatch:
            mismatches += 1
            del rigs[setup]  # its paths may have parted in what a round does not load
            if mismatches <= MISMATCHES_SHOWN:
                print(f"mismatch (--seed {seed} --round {number}): {mismatch}", flush=True)
        except Exception as error:
            error.add_note(f"zos parity --seed {seed} --round {number}")
            raise
        cases += this.cases
        judged += this.cases if asks_oracle else 0
        seconds = time.perf_counter() - begin
        if _enough(arguments, cases, seconds):
            break
    print(
        f"{cases:,} cases in {seconds:.1f} s ({cases / seconds:,.0f} cases/s), "
        f"{judged:,} of them against the oracle; {mismatches} mismatches"
    )
    return 1 if mismatches else 0


def _enough(arguments: argparse.Namespace, cases: int, seconds: float) -> bool:
    if arguments.seconds is not None and seconds >= arguments.seconds:
        return True
    limit = arguments.cases or (math.inf if arguments.seconds is not None else DEFAULT_CASES)
    return bool(cases >= limit)
