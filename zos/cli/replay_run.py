"""The replay itself: service, loop, scheduler, checks and meter put together, and run step by step to the end."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zos.cli.acceptance import AcceptanceModel
from zos.cli.options import usable
from zos.cli.replay_check import StepChecker
from zos.cli.replay_measure import ClockedService, HostClock, Meter, ProfiledSteps
from zos.cli.replay_report import Report
from zos.cli.replay_schedule import Scheduler
from zos.cli.traces import Request
from zos.loop import DecodeLoop
from zos.metadata import DecodeMetadata
from zos.service import MetadataService


class _TrackedStep:
    """The loop's step: the acceptance model, and a trail that tells runs apart which kept anything else anywhere."""

    def __init__(self, acceptance: AcceptanceModel, device: torch.device) -> None:
        self._acceptance = acceptance
        self.trail = torch.zeros(1, dtype=torch.int64, device=device)  # sum of num_kept * seqlens_k of all rows so far

    def __call__(self, metadata: DecodeMetadata) -> torch.Tensor:
        num_kept = self._acceptance.step(metadata)
        self.trail += (num_kept.long() * metadata.seqlens_k).sum()
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
    acceptance = AcceptanceModel(arguments.acceptance, arguments.seed, service.geometry.draft_tokens, service.device)
    step = _TrackedStep(acceptance, service.device)
    loop = DecodeLoop(service, step)
    scheduler = Scheduler(served, service, loop, acceptance, arguments.step_ms)
    other = "cpu" if on_cuda else "cuda"
    twin = _service(other, arguments) if arguments.check and usable(other) else None
    checker = StepChecker(service, loop, scheduler, acceptance, twin)

    service.warmup()
    largest = loop.bucket(min(len(served), service.max_batch))
    loop.capture([batch for batch in loop.buckets if batch <= largest])
    meter: Meter = HostClock(service) if isinstance(service, ClockedService) else ProfiledSteps()
    allocated = _allocations() if on_cuda and not arguments.check else None  # checks copy to the host, and allocate
    begin = time.perf_counter()
    with _progress(len(served)) as show:
        while scheduler.begin_step():
            number = len(scheduler.batch_sizes)
            checked = arguments.check > 0 and number % arguments.check == 0
            meter.before_step(number, halfway=2 * scheduler.admitted >= len(served))
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
    checker.finish(int(step.trail))
    return Report(
        device=f"{torch.cuda.get_device_name()}, CUDA graphs" if on_cuda else "CPU, Numba",
        on_gpu=on_cuda,
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
        return "only the end of the run: table, counters and trail"
    if twin is None:
        return "against oracle and prediction; without a CUDA device there is no second path"
    return f"against oracle, prediction and the {twin.device.type} path"


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

        def show(completed: int) -> None:
            bar.update(completed - bar.n)

        yield show
