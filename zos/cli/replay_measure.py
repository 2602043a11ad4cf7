"""The replay's meters of time, launches and waits: the host's clock on the CPU, torch's profiler on a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import device_kernels.ring_load
import device_kernels.ring_store
import zos.ops
from zos.metadata import DecodeMetadata, PrefillMetadata
from zos.service import MetadataService

STEPS_SPARED = 8  # steps never profiled: what a first step loads is over by then
STEPS_PROFILED = 256  # a profiler slows the host, so the rest of the run is spared
SPAN = "zos replay"
WAIT = "Synchronize"  # in the name of every CUDA call that waits: for a device, a stream, an event
REPLAY = "cudaGraphLaunch"  # one for each of a step's batches
LAUNCH = "LaunchKernel"  # outside a graph: edits
PUBLICATION = "publish_results"  # of a step's record: beside the next step's body, off its way
LAST_KERNEL = "commit"  # of the metadata kernels of a batch
RING_KERNELS = {*device_kernels.ring_store.KERNELS, *device_kernels.ring_load.KERNELS}
METADATA_KERNELS = {kernel.name for kernel in zos.ops.KERNELS if kernel not in RING_KERNELS}


class Meter:
    """What a replay measures of its steps; None or empty where nothing was measured.

    Attributes
    ----------
    what : str
        What `metadata_us` is the time of.
    first : int
        Step that the first of `metadata_us` belongs to.
    metadata_us : list of float
        Time that the metadata of a step took, by step.
    launches_per_step : float or None
        Launches of prepare, commit and edits.
    other_launches_per_step : float or None
        Everything else on the device: kernels of the acceptance model and of the ring, copies of the checks.
    waits_per_step : float or None
        Calls in which the host waits for the device.
    waits_per_plain_step : float or None
        The same, in steps without edits; a step's second batch counts as a step of its own.
    """

    what = ""

    def __init__(self) -> None:
        self.first = 0
        self.metadata_us: list[float] = []
        self.launches_per_step: float | None = None
        self.other_launches_per_step: float | None = None
        self.waits_per_step: float | None = None
        self.waits_per_plain_step: float | None = None

    def before_step(self, step: int, halfway: bool) -> None:
        """Call it before everything that belongs to step `step` (from 0); `halfway` once half of the requests are admitted."""

    def after_step(self, batches: int) -> None:
        """Call it when the step is launched: 1 batch, or 2 with a prefill batch beside the decode batch."""

    def finish(self, steps: int) -> None:
        """Call it when all steps are over; `steps` is their number."""


class ClockedService(MetadataService):
    """A service on the CPU that clocks and counts its operators, with all that the service does around them."""

    launches = 0  # operators run so far
    metadata_us = 0.0  # time spent in them

    def flush(self) -> None:
        """Clocked when there is anything to apply."""
        if self._edits:
            begin = time.perf_counter()
            super().flush()
            self._count(begin)

    def prepare(self, slot: int = 0) -> DecodeMetadata:
        """Clocked; the flush counts on its own."""
        self.flush()
        begin = time.perf_counter()
        metadata: DecodeMetadata = super().prepare(slot)
        self._count(begin)
        return metadata

    def prepare_prefill(self, slot: int = 0, full_index: bool = False, tail: bool = False) -> PrefillMetadata:
        """Clocked like prepare."""
        self.flush()
        begin = time.perf_counter()
        metadata: PrefillMetadata = super().prepare_prefill(slot, full_index, tail)
        self._count(begin)
        return metadata

    def commit(self, *arguments: Any, **named: Any) -> None:
        """Clocked."""
        begin = time.perf_counter()
        super().commit(*arguments, **named)
        self._count(begin)

    def _count(self, begin: float) -> None:
        self.metadata_us += (time.perf_counter() - begin) * 1e6
        self.launches += 1


class HostClock(Meter):
    """Reads a ClockedService around each step."""

    what = "host time of edits, prepare and commit"

    def __init__(self, service: ClockedService) -> None:
        super().__init__()
        self._service = service
        self._us = 0.0
        self._launches = service.launches

    def before_step(self, step: int, halfway: bool) -> None:
        """Remember the clock."""
        self._us = self._service.metadata_us

    def after_step(self, batches: int) -> None:
        """Read it."""
        self.metadata_us.append(self._service.metadata_us - self._us)

    def finish(self, steps: int) -> None:
        """Divide."""
        if steps:
            self.launches_per_step = (self._service.launches - self._launches) / steps


class ProfiledSteps(Meter):
    """Lets torch's profiler watch a window of the run, from its middle on; the other steps run unobserved."""

    what = "kernel time of edits, prepare and commit, by torch's profiler"

    def __init__(self) -> None:
        super().__init__()
        self._profile: Any = None
        self._span: Any = None
        self._steps = 0  # in the closed window
        self._batches: list[int] = []  # by step of the window: commits that end it

    def before_step(self, step: int, halfway: bool) -> None:
        """Open or close the window when it is time to."""
        if self._profile is None and halfway and step >= STEPS_SPARED:
            self.first = step
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
            self._profile.start()
            self._span = record_function(SPAN)
            self._span.__enter__()
        elif step == self.first + STEPS_PROFILED:
            self._close(step)

    def after_step(self, batches: int) -> None:
        """Remember how many commits the step has."""
        if self._profile is not None and not self._steps:
            self._batches.append(batches)

    def finish(self, steps: int) -> None:
        """Close the window, if it is still open, and read what was seen."""
        self._close(steps)
        if self._steps:
            events = sorted(self._profile.events(), key=lambda event: event.time_range.start)
            self._read_kernels([e for e in events if e.device_type.name == "CUDA" and e.name != SPAN])
            host = [e for e in events if e.device_type.name == "CPU"]
            span = next(e.time_range for e in host if e.name == SPAN)
            self._read_calls([e.name for e in host if span.start <= e.time_range.start < span.end])

    def _close(self, step: int) -> None:
        if self._profile is None or self._steps:
            return
        self._span.__exit__(None, None, None)
        torch.cuda.synchronize()
        self._profile.stop()
        self._steps = step - self.first

    def _read_kernels(self, kernels: list[Any]) -> None:
        own = [kernel for kernel in kernels if kernel.name in METADATA_KERNELS]
        self.launches_per_step = len(own) / self._steps
        self.other_launches_per_step = (len(kernels) - len(own)) / self._steps
        left = iter(own)
        for commits in self._batches:
            total = 0.0
            for kernel in left:
                if kernel.name != PUBLICATION:
                    total += kernel.time_range.elapsed_us()
                commits -= kernel.name == LAST_KERNEL
                if not commits:
                    self.metadata_us.append(total)
                    break

    def _read_calls(self, names: list[str]) -> None:
        """Count waits in the host's calls, given in order: a step's edits are launched before its graph."""
        waits = plain_waits = plain_steps = 0
        since, edits = 0, False  # of the step so far
        for name in names:
            since += WAIT in name
            edits |= LAUNCH in name
            if name == REPLAY:
                waits += since
                if not edits:
                    plain_waits += since
                    plain_steps += 1
                since, edits = 0, False
        self.waits_per_step = (waits + since) / self._steps
        self.waits_per_plain_step = plain_waits / plain_steps if plain_steps else None
