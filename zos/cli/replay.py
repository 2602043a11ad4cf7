"""`zos replay TRACE`: the command line of the replay."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from zos.cli import InputError
from zos.cli.options import check_output, chosen_device, real, whole
from zos.cli.prefix_hits import BLOCK_TOKENS
from zos.cli.replay_report import check_plot, write_plot
from zos.cli.replay_requests import replay_requests
from zos.cli.replay_run import DEFAULT_MAX_PREFILL_TOKENS, replay
from zos.cli.replay_store import check_place
from zos.cli.traces import read_trace
from zos.service import TOKEN_LAYOUTS

MISMATCH = 1  # exit code
LARGEST_MAX_BATCH = 65_536
LARGEST_MAX_PREFILL_TOKENS = 131_072
LONGEST_STEP_MS = 1e9
DEFAULT_CHURN = 0.1
MOST_STEPS_PER_REPLAY = 256
LONGEST_STALL_MS = 60_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="decode a request trace, checking every step",
        description="Decode a request trace with continuous batching on a simulated clock. Prompts count as prefilled, unless "
        "--chunk, --max-prefill-tokens or --ring is given or the trace has hash_ids: then they are prefilled in chunks, but for "
        "what a prefix hit saves. With --churn, --steps-per-replay, --device-loop or --host-stall-ms the loop schedules the "
        "requests itself, and a model follows its step records. Exit code 1: a checked step differs; 2: bad input.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Azure CSV or Mooncake JSON lines")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--max-batch", type=whole(1, LARGEST_MAX_BATCH), default=64, metavar="N", help="rows and states (64)"
    )
    parser.add_argument("--limit", type=whole(1), metavar="N", help="only the first N requests")
    parser.add_argument(
        "--step-ms", type=real(0, LONGEST_STEP_MS), default=30.0, metavar="MS", help="simulated time of a step (30)"
    )
    parser.add_argument("--acceptance", type=_probability, default=0.7, metavar="P", help="chance of each draft (0.7)")
    parser.add_argument("--seed", type=int, default=0, help="of the acceptance model (0)")
    parser.add_argument("--layout", choices=TOKEN_LAYOUTS, default="packed", help="token layout (packed)")
    tokens = whole(1, LARGEST_MAX_PREFILL_TOKENS)
    parser.add_argument("--chunk", type=tokens, metavar="N", help="prompt tokens of a row in a step (M)")
    parser.add_argument(
        "--max-prefill-tokens", type=tokens, metavar="M", help=f"prompt tokens of a step ({DEFAULT_MAX_PREFILL_TOKENS})"
    )
    parser.add_argument("--ring", action="store_true", help="store, load and check a latent of every token")
    parser.add_argument(
        "--store",
        metavar="PLACE",
        help="keep the state at the end of each chunk (then of 512 tokens, or a multiple) in local:DIRECTORY or "
        "mooncake:HOST[:PORT[:METADATA_PORT]], and start prefix hits from there; for traces with hash_ids",
    )
    parser.add_argument(
        "--churn",
        type=_probability,
        nargs="?",
        const=DEFAULT_CHURN,
        metavar="P",
        help=f"cancel, preempt, resume or reset a random request after a replay, with chance P ({DEFAULT_CHURN:g})",
    )
    parser.add_argument(
        "--steps-per-replay", type=whole(1, MOST_STEPS_PER_REPLAY), metavar="K", help="steps of each graph (1)"
    )
    parser.add_argument(
        "--device-loop", action="store_true", help="let the device run steps until it needs the host (a WHILE node)"
    )
    parser.add_argument(
        "--host-stall-ms", type=real(0, LONGEST_STALL_MS), metavar="MS", help="let the host sleep at every poll"
    )
    parser.add_argument(
        "--check",
        type=_check,
        default=1,
        metavar="every|N|off",
        help="check every step, every Nth, or none (every)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the run there (needs zos[bench])")


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the table, write the files; returns 1 on any mismatch."""
    largest_chunk = arguments.max_prefill_tokens or DEFAULT_MAX_PREFILL_TOKENS
    if arguments.chunk and arguments.chunk > largest_chunk:
        raise InputError(f"--chunk {arguments.chunk} exceeds --max-prefill-tokens {largest_chunk}")
    by_requests = any(_requests_options(arguments).values())
    if by_requests:
        _refuse(arguments)
    requests = read_trace(arguments.trace)[: arguments.limit]
    if arguments.store:
        _check_store(arguments, any(request.hash_ids for request in requests))
    arguments.device = chosen_device(arguments.device)
    if arguments.plot:
        check_plot(arguments.plot)
    for path in (arguments.json, arguments.plot):
        check_output(path, arguments.trace)
    report = (replay_requests if by_requests else replay)(requests, arguments)
    print(report.table())
    for example in report.checker.examples:
        print(f"mismatch: {example}", file=sys.stderr)
    if arguments.json:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        options = {name: value for name, value in options.items() if name not in ("command", "json", "plot")}
        arguments.json.write_text(json.dumps({"options": options, **report.summary()}, indent=1) + "\n")
    if arguments.plot:
        write_plot(report.curves(), arguments.plot)
    return MISMATCH if report.checker.mismatches else 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise InputError for options that do not go together."""
    given = next(option for option, value in _requests_options(arguments).items() if value)
    for option in ("chunk", "max_prefill_tokens", "ring", "store"):
        if getattr(arguments, option):
            raise InputError(f"--{option.replace('_', '-')} does not go with {given}: prompts count as prefilled there")
    if arguments.device_loop and arguments.steps_per_replay:
        raise InputError("--steps-per-replay does not go with --device-loop: a run takes as many steps as it needs")
    if arguments.device_loop and arguments.device == "cuda" and importlib.util.find_spec("cuda.core") is None:
        raise InputError("--device-loop needs cuda.core on a GPU: install cuda-core, or take --device cpu")


def _check_store(arguments: argparse.Namespace, has_blocks: bool) -> None:
    """Raise InputError where --store has nothing to do."""
    check_place(arguments.store)
    if not has_blocks:
        raise InputError(f"--store needs a trace with hash_ids, and {arguments.trace} has none")
    if (arguments.chunk or BLOCK_TOKENS) % BLOCK_TOKENS:
        raise InputError(
            f"--chunk {arguments.chunk} is no multiple of a block of {BLOCK_TOKENS} tokens, as --store needs"
        )
    if (arguments.max_prefill_tokens or DEFAULT_MAX_PREFILL_TOKENS) < BLOCK_TOKENS:
        raise InputError(f"--max-prefill-tokens {arguments.max_prefill_tokens} holds no block of {BLOCK_TOKENS} tokens")


def _requests_options(arguments: argparse.Namespace) -> dict[str, bool]:
    """Options that each ask for a replay by requests, and whether they are given."""
    return {
        "--churn": arguments.churn is not None,
        "--steps-per-replay": arguments.steps_per_replay is not None,
        "--device-loop": arguments.device_loop,
        "--host-stall-ms": arguments.host_stall_ms is not None,
    }


def _probability(text: str) -> float:
    try:
        value = real(-1, 1)(text)
    except argparse.ArgumentTypeError:
        value = -1.0
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 … 1")
    return value


def _check(text: str) -> int:
    """Return every how many steps to check, 0 for never."""
    if text in ("every", "off"):
        return int(text == "every")
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of every, off and a whole number of 1 or more") from None
