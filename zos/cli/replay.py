"""`zos replay TRACE`: decodes a request trace with continuous batching, checks its steps, prints what it measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zos.cli import InputError
from zos.cli.acceptance import AcceptanceModel
from zos.cli.replay_check import StepChecker
from zos.cli.replay_measure import ClockedService, HostClock, Meter, ProfiledSteps
from zos.cli.replay_report import Report, check_plot, write_plot
from zos.cli.replay_schedule import Scheduler
from zos.cli.traces import Request, read_trace
from zos.loop import DecodeLoop
from zos.metadata import DecodeMetadata
from zos.service import TOKEN_LAYOUTS, MetadataService

MISMATCH = 1  # exit code
LARGEST_MAX_BATCH = 65_536


class _SummedStep:
    """The loop's step: the acceptance model, and on the device the sum of all that it kept."""

    def __init__(self, acceptance: AcceptanceModel, device: torch.device) -> None:
        self._acceptance = acceptance
        self.kept = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, metadata: DecodeMetadata) -> torch.Tensor:
        num_kept = self._acceptance.step(metadata)
        self.kept += num_kept.sum()
        return num_kept


def replay(requests: list[Request], arguments: argparse.Namespace) -> Report:
    """Run requests to their end.

    Parameters
    ----------
    requests : list of Request
        In order of arrival; those without output are skipped.
    arguments : argparse.Namespace
        The command's options.
    """
    served = [request for request in requests if request.output_tokens > 0]
    service = _service(arguments.device, arguments)
    on_cuda = service.device.type == "cuda"
    acceptance = AcceptanceModel(
        arguments.acceptance, arguments.seed, service.geometry.draft_tokens, service.device
    )
    step = _SummedStep(acceptance, service.device)
    loop = DecodeLoop(service, step)
    scheduler = Scheduler(served, service, loop, acceptance, arguments.step_ms)
    other = "cpu" if on_cuda else "cuda"
    twin = _service(other, arguments) if arguments.check and _usable(other) else None
    checker = StepChecker(service, loop, scheduler, acceptance, twin)

    service.warmup()
    largest = loop.bucket(min(len(served), service.max_batch))
    loop.capture([batch for batch in loop.buckets if batch <= largest])
    meter: Meter = HostClock(service) if isinstance(service, ClockedService) else ProfiledSteps()
    allocated = (
        _allocations() if on_cuda and not arguments.check else None
    )  # checks copy to the host, and allocate
    begin = time.perf_counter()
    with _progress(len(served)) as show:
        while scheduler.begin_step():
            number = len(scheduler.batch_sizes)
            checked = arguments.check > 0 and number % arguments.check == 0
            meter.before_step(number)
            if checked:
                checker.before_step()
            loop.run()
            meter.after_step()
            scheduler.end_step()
            if checked:
                checker.after_step()
            show(scheduler.completed)
    if on_cuda:
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - begin
    allocations = None if allocated is None else _allocations() - allocated
    meter.finish(len(scheduler.batch_sizes))
    checker.finish(int(step.kept))
    return Report(
        device=f"{torch.cuda.get_device_name()}, CUDA graphs" if on_cuda else "CPU, Numba",
        judges=_judges(arguments, twin),
        requests=scheduler.completed,
        skipped=len(requests) - len(served),
        scheduler=scheduler,
        checker=checker,
        meter=meter,
        wall_s=wall_s,
        allocations_after_capture=allocations,
    )


def _service(device: str, arguments: argparse.Namespace) -> MetadataService:
    """Make a service with a state for each row."""
    kind = ClockedService if device == "cpu" else MetadataService
    rows = arguments.max_batch
    return kind(capacity=rows, max_batch=rows, device=device, token_layout=arguments.layout)


def _judges(arguments: argparse.Namespace, twin: MetadataService | None) -> str:
    if not arguments.check:
        return "only the end of the run, against the prediction"
    if twin is None:
        return "against oracle and prediction; no CUDA device, so no second path"
    return f"against oracle, prediction and the {twin.device.type} path"


def _usable(device: str) -> bool:
    return device == "cpu" or (torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None)


def _allocations() -> int:
    """Count what torch's allocator has handed out on the GPU so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many requests are complete: a bar on a terminal, where tqdm is installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda completed: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="request") as bar:
        yield lambda completed: bar.update(completed - bar.n) and None


# ---- command line -----------------------------------------------------------------------------------------------


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="decode a request trace, checking every step",
        description="Decode a request trace with continuous batching on a simulated clock; prompts count as prefilled. "
        "Exit code 1: a checked step differs; 2: bad input.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Azure CSV or Mooncake JSON lines")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--max-batch", type=_whole(1, LARGEST_MAX_BATCH), default=64, metavar="N", help="rows and states (64)"
    )
    parser.add_argument("--limit", type=_whole(1), metavar="N", help="only the first N requests")
    parser.add_argument(
        "--step-ms", type=_step_ms, default=30.0, metavar="MS", help="simulated time of a step (30)"
    )
    parser.add_argument(
        "--acceptance", type=_probability, default=0.7, metavar="P", help="chance of each draft (0.7)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the acceptance model (0)")
    parser.add_argument("--layout", choices=TOKEN_LAYOUTS, default="packed", help="token layout (packed)")
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
    requests = read_trace(arguments.trace)[: arguments.limit]
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device")
    if not _usable(arguments.device):
        raise InputError("--device cuda needs CuPy: install zos[cu13] or zos[cu12], or take --device cpu")
    if arguments.plot:
        check_plot(arguments.plot)
    for path in (arguments.json, arguments.plot):
        if path and not path.parent.is_dir():
            raise InputError(f"{path}: its folder does not exist")  # said before the run, not after
    report = replay(requests, arguments)
    print(report.table())
    for example in report.checker.examples:
        print(f"mismatch: {example}", file=sys.stderr)
    if arguments.json:
        options = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
        }
        options = {name: value for name, value in options.items() if name not in ("command", "json", "plot")}
        arguments.json.write_text(json.dumps({"options": options, **report.summary()}, indent=1) + "\n")
    if arguments.plot:
        write_plot(report, arguments.plot)
    return MISMATCH if report.checker.mismatches else 0


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.lstrip("+-").isdecimal() else None
        if value is None or value < least or (most is not None and value > most):
            upper = "or more" if most is None else f"… {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} {upper}")
        return value

    return parse


def _step_ms(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 … 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check(text: str) -> int:
    """Return every how many steps to check, 0 for never."""
    if text in ("every", "off"):
        return int(text == "every")
    try:
        return _whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of every, off and a whole number of 1 or more"
        ) from None
