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
from zos.cli.prefix_hits import BLOCK_TOKENS
from zos.cli.replay_check import StepChecker
from zos.cli.replay_measure import ClockedService, HostClock, Meter, ProfiledSteps
from zos.cli.replay_prefill import PrefillSteps
from zos.cli.replay_report import Report
from zos.cli.replay_ring import ReplayRing, one_layer
from zos.cli.replay_ring_check import RingChecker
from zos.cli.replay_schedule import Scheduler
from zos.cli.replay_store import ReplayStore, open_store
from zos.cli.traces import Request
from zos.loop import DecodeLoop
from zos.metadata import DecodeMetadata, PrefillMetadata
from zos.service import MetadataService

DEFAULT_MAX_PREFILL_TOKENS = 8192


class TrackedModel:
    """What a step does between prepare and commit, and a trail that tells runs apart which kept anything else anywhere.

    Attributes
    ----------
    trail : torch.Tensor
        int64 [1]: sum of tokens kept * seqlens_k of all rows so far.
    """

    def __init__(self, acceptance: AcceptanceModel, device: torch.device, ring: ReplayRing | None = None) -> None:
        self._acceptance = acceptance
        self._ring = ring
        self.trail = torch.zeros(1, dtype=torch.int64, device=device)

    def decode(self, metadata: DecodeMetadata) -> torch.Tensor:
        """num_kept of a decode step."""
        num_kept = self._acceptance.step(metadata)
        if self._ring is not None:
            self._ring.decode(metadata, num_kept)
        self.trail += (num_kept.long() * metadata.seqlens_k).sum()
        return num_kept

    def prefill(self, metadata: PrefillMetadata) -> None:
        """Do what a prefill step does."""
        if self._ring is not None:
            self._ring.prefill(metadata)
        self.trail += (metadata.seqlens_q.long() * metadata.seqlens_k).sum()


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
    # A ring holds what was stored, so there a prompt cannot count as prefilled.
    asked = arguments.chunk or arguments.max_prefill_tokens or arguments.ring or arguments.store
    prefilling = bool(asked or any(request.hash_ids for request in requests))
    service = _service(arguments.device, arguments)
    on_cuda = service.device.type == "cuda"
    acceptance = AcceptanceModel(arguments.acceptance, arguments.seed, service.geometry.draft_tokens, service.device)
    most_rows = max(1, min(len(served), service.max_batch))
    ring = ReplayRing(service, most_rows) if arguments.ring else None
    model = TrackedModel(acceptance, service.device, ring)
    loop = DecodeLoop(service, model.decode)
    prefill = PrefillSteps(service, model.prefill, most_rows) if prefilling else None
    chunk_q = arguments.chunk or (BLOCK_TOKENS if arguments.store else service.max_prefill_tokens)
    ring_checker = RingChecker(service, ring) if ring is not None else None
    store = None
    if arguments.store:
        cache = ring.cache if ring is not None else one_layer(service)
        restored = ring_checker.restored if ring_checker is not None else None
        store = ReplayStore(open_store(arguments.store, service, cache), restored)
    scheduler = Scheduler(served, service, loop, acceptance, arguments.step_ms, prefill, chunk_q, store)
    other = "cpu" if on_cuda else "cuda"
    twin = _service(other, arguments) if arguments.check and usable(other) else None
    checker = StepChecker(service, loop, scheduler, acceptance, twin, prefill, ring_checker)

    service.warmup()
    largest = loop.bucket(most_rows)
    loop.capture([batch for batch in loop.buckets if batch <= largest])
    if prefill is not None:
        prefill.capture()
    meter: Meter = HostClock(service) if isinstance(service, ClockedService) else ProfiledSteps()
    allocated = _allocations() if on_cuda and not arguments.check else None  # checks copy to the host, and allocate
    begin = time.perf_counter()
    with progress(len(served)) as show, one_thread():
        while scheduler.begin_step():
            number = len(scheduler.batch_sizes)
            checked = arguments.check > 0 and number % arguments.check == 0
            meter.before_step(number, halfway=2 * scheduler.admitted >= len(served))
            if checked:
                checker.before_step()
            if scheduler.prefill_batch and prefill is not None:
                prefill.run()
            if scheduler.batch:
                loop.run()
            meter.after_step(bool(scheduler.prefill_batch) + bool(scheduler.batch))
            scheduler.end_step()
            if checked:
                checker.after_step()
            show(scheduler.completed)
    if on_cuda:
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - begin
    allocations = None if allocated is None else _allocations() - allocated
    meter.finish(len(scheduler.batch_sizes))
    checker.finish(int(model.trail))
    if store is not None:
        store.close()
    return Report(
        device=f"{torch.cuda.get_device_name()}, CUDA graphs" if on_cuda else "CPU, Numba",
        on_gpu=on_cuda,
        judges=_judges(arguments, twin),
        ring_entries=ring_checker.entries if ring_checker is not None else None,
        store=store,
        store_place=arguments.store,
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
    return kind(
        capacity=rows,
        max_batch=rows,
        device=device,
        max_prefill_tokens=arguments.max_prefill_tokens or DEFAULT_MAX_PREFILL_TOKENS,
        token_layout=arguments.layout,
    )


def _judges(arguments: argparse.Namespace, twin: MetadataService | None) -> str:
    if not arguments.check:
        return "only the end of the run: table, counters and trail"
    dense = ", dense ring" if arguments.ring else ""
    if twin is None:
        return f"against oracle{dense} and prediction; without a CUDA device there is no second path"
    return f"against oracle{dense}, prediction and the {twin.device.type} path"


def _allocations() -> int:
    """Count what torch's allocator has handed out on the GPU so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's CPU operators on this thread: tensors are small, and a pool's barriers cost most where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many requests are complete: a bar on a terminal, where tqdm is installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda completed: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="request") as bar:

        def show(completed: int) -> None:
            bar.update(completed - bar.n)

        yield show
