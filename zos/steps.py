"""What a loop runs: prepare, the caller's step, commit; warmed up on padding, and captured with the publication beside the step."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zos import nvtx
from zos.metadata import DecodeMetadata
from zos.service import MetadataService

WARMUP_RUNS = 2  # eager runs of a step before it is captured: lazy initialisation must not fall into the capture
ONE_CAPTURE = threading.Lock()  # torch's random state can be in one capture at a time


class StepResult(NamedTuple):
    """What a step found out about its rows; all on the device."""

    num_kept: torch.Tensor  # int32 [B]: tokens kept, the bonus token included; 0 for no result
    finished: torch.Tensor | None = None  # bool [B]: sequences that end here
    next_tokens: torch.Tensor | None = None  # int64 [B, tokens per step]: input ids of the next step
    kept_tokens: torch.Tensor | None = None  # int64 [B, tokens per step]: ids of the tokens kept, for the step's record


Step = Callable[[DecodeMetadata], "torch.Tensor | tuple[torch.Tensor, ...] | StepResult"]


@dataclass
class CapturedSteps:
    """A captured run of steps, and what its kernels write to: kept alive as long as the graphs."""

    plain: torch.cuda.CUDAGraph
    draining: torch.cuda.CUDAGraph  # the same steps, with the staged edits applied before the first
    metadata: DecodeMetadata
    results: list[StepResult]


class StepRunner:
    """Runs steps of a slot.

    Parameters
    ----------
    service : MetadataService
        Prepares and commits.
    slot : int
        Metadata slot.
    step : callable
        The caller's (`zos.DecodeLoop`).
    """

    def __init__(self, service: MetadataService, slot: int, step: Step) -> None:
        if not callable(step):
            raise ValueError(f"step={step!r} is not callable")
        self._service = service
        self._slot = slot
        self._step = step

    def run_eagerly(self) -> None:
        """Run one step of the slot's batch; staged edits take effect before it."""
        metadata = self._service.prepare(self._slot)
        self._service.commit(metadata, *as_result(self._step(metadata)))

    def launch(self, metadata: DecodeMetadata, branch: torch.cuda.Stream | None) -> StepResult:
        """Launch a step; on `branch`, beside its body, the publication of the records of the steps before it."""
        main = torch.cuda.current_stream()
        self._service.launch_prepare(metadata)
        try:
            if (
                branch is not None
            ):  # not before prepare: a graph with a single root begins sooner after the one before it
                branch.wait_stream(main)
                with torch.cuda.stream(branch):
                    self._service.publish(self._slot)
            result = as_result(self._step(metadata))
        finally:  # also when step raises: a capture whose branch does not come back would end with an error of its own
            if branch is not None:
                main.wait_stream(branch)  # commit must not write a record while one is copied
        self._service.commit(metadata, *result)
        return result

    def warm_up(self, batch: int, tokens: int) -> torch.cuda.Stream:
        """Run the step on an all-padding batch with buffers of its own; returns the side stream that it ran on."""
        self._service.warmup()
        metadata = self._service.private_metadata(batch, tokens)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARMUP_RUNS):
                    self.launch(metadata, None)
        finally:  # also when step raises: the private buffers are freed, and nothing may still write to them
            current.wait_stream(side)
            current.synchronize()
        return side

    @nvtx.marked("zos.capture")
    def capture(self, batch: int, tokens: int, steps: int, pool: Any) -> CapturedSteps:
        """Capture `steps` steps of a batch shape, with and without the edits before them, on the current device."""
        service = self._service
        side = self.warm_up(batch, tokens)
        metadata = service.slot_metadata(self._slot, batch, tokens)
        branch = torch.cuda.Stream() if service.slot(self._slot).mailbox is not None else None
        graphs: list[torch.cuda.CUDAGraph] = []
        results: list[StepResult] = []
        for drains in (False, True):
            graph = torch.cuda.CUDAGraph()
            # The default stream may be another device's; another thread may run what is forbidden here.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                if drains:
                    service.drain_edits()
                results += [self.launch(metadata, branch) for _ in range(steps)]
            pool = graph.pool()
            graphs.append(graph)
        return CapturedSteps(graphs[0], graphs[1], metadata, results)


def as_result(returned: torch.Tensor | tuple[torch.Tensor, ...] | StepResult) -> StepResult:
    """Return what a step returned as a StepResult; raises TypeError for anything else."""
    if isinstance(returned, torch.Tensor):
        return StepResult(returned)
    if isinstance(returned, tuple) and 1 <= len(returned) <= len(StepResult._fields):
        return StepResult(*returned)
    raise TypeError(f"step returned {type(returned).__name__}: expected num_kept or (num_kept, finished, next_tokens)")


def with_progress(sizes: list[int], device: torch.device) -> Iterator[int]:
    """Yield the sizes of graphs to capture; on a terminal behind a bar that shows the memory taken since the first."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield from sizes
        return
    from tqdm import tqdm

    free, _ = torch.cuda.mem_get_info(device)
    with tqdm(sizes, unit="graph", desc="capture") as bar:
        for size in bar:
            yield size
            bar.set_postfix_str(f"{(free - torch.cuda.mem_get_info(device)[0]) / 2**20:.0f} MiB")
