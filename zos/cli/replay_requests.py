"""The replay by requests: they arrive on a simulated clock, the loop schedules them, and its records are what is checked."""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from zos.cli.acceptance import AcceptanceModel
from zos.cli.options import usable
from zos.cli.replay_churn import NOT_OVER, Churn
from zos.cli.replay_log import LoggedService
from zos.cli.replay_records import RecordChecker
from zos.cli.replay_requests_report import RequestsReport
from zos.cli.replay_run import TrackedModel, one_thread, progress
from zos.cli.traces import Request as TraceRequest
from zos.device_loop import DeviceLoop
from zos.errors import MailboxFullError
from zos.loop import DEFAULT_RECORDS, DecodeLoop
from zos.mailbox import StepRecord
from zos.requests import Request, RequestState
from zos.service import MetadataService

Service = TypeVar("Service", bound=MetadataService)

STATES_PER_ROW = 2  # so that sequences wait on the device, in the ready queue, while the batch is full
RECORDS_PER_STEP = 4  # of the mailbox at least, for each step of a replay
FULL_MAILBOX_S = 100e-6  # between looks at a full mailbox


class RequestsRun:
    """Runs the requests of a trace to their end, replay by replay.

    Parameters
    ----------
    served : list of TraceRequest
        In order of arrival, each with output.
    arguments : argparse.Namespace
        The command's options.
    """

    def __init__(self, served: list[TraceRequest], arguments: argparse.Namespace) -> None:
        device = arguments.device
        self.service = _service(LoggedService, device, arguments)
        acceptance = AcceptanceModel(
            arguments.acceptance, arguments.seed, self.service.geometry.draft_tokens, self.service.device
        )
        self.model = TrackedModel(acceptance, self.service.device)
        self.steps_per_replay: int = arguments.steps_per_replay or 1
        records = max(DEFAULT_RECORDS, RECORDS_PER_STEP * self.steps_per_replay)
        kind = DeviceLoop if arguments.device_loop else DecodeLoop
        self.loop = kind(self.service, self.model.decode, steps_per_replay=self.steps_per_replay, records=records)
        looks = self.steps_per_replay == 1 and not arguments.device_loop
        other = "cpu" if device == "cuda" else "cuda"
        self.twin = _service(MetadataService, other, arguments) if looks and arguments.check and usable(other) else None
        self.checker = RecordChecker(self.service, self.loop, acceptance, len(served), self.twin)
        self.churn = Churn(arguments.churn or 0.0, arguments.seed, self.loop, self.service)
        self.requests: list[Request] = []  # submitted so far
        self.host_us: list[float] = []  # time of run and poll, by replay
        self.first_steps: list[int] = []  # of each replay
        self._arrivals = deque(served)
        self._check: int = arguments.check
        self._looks = looks
        self._step_ms: float = arguments.step_ms
        self._idle_ms = 0.0  # in which no request was there
        self._stall_s = (arguments.host_stall_ms or 0.0) / 1e3
        self._live: list[Request] = []
        self._unchecked: list[StepRecord] = []  # with --check off: held against the model when the run is over

    @property
    def graphs(self) -> str:
        """What runs on a GPU."""
        return "CUDA graphs with a WHILE node" if isinstance(self.loop, DeviceLoop) else "CUDA graphs"

    @property
    def judges(self) -> str:
        """What the steps are held against."""
        if not (self._check and self._looks):
            return "records, bounds and table against a model" if self._check else "records and table against a model"
        twin = "" if self.twin is None else f" and the {self.twin.device.type} path"
        return f"records, bounds and table against a model, outputs of {self.checker.steps.steps} steps against oracle{twin}"

    @property
    def clock_ms(self) -> float:
        """Simulated time: of the steps launched, and idle."""
        return self.service.slot_steps_launched() * self._step_ms + self._idle_ms

    def run(self, show: Callable[[int], None]) -> None:
        """Run to the end; `show` is told how many requests are over."""
        while self._submit_arrivals():
            self.churn.resume_if_alone()
            self._replay()
            self._live = [request for request in self._live if request.state in NOT_OVER]
            self.churn.after_replay(self._live)
            show(len(self.requests) - self.loop.pending)
        self._take(self.loop.drain())

    def finish(self) -> None:
        """Follow what was put off, and compare what is left behind."""
        self.checker.follow(self._unchecked)
        self.checker.finish(self.requests, int(self.model.trail))

    def _submit_arrivals(self) -> bool:
        """Submit what has arrived; False when no request is left."""
        if not self.loop.pending and self._arrivals:
            self._idle_ms += max(0.0, self._arrivals[0].arrival_ms - self.clock_ms)
        while self._arrivals and self._arrivals[0].arrival_ms <= self.clock_ms:
            arrival = self._arrivals.popleft()
            prompt = arrival.prompt_tokens
            request = self.loop.submit(q_start=prompt, stop_at=prompt + arrival.output_tokens)
            self.service.submitted.append(request)
            self.requests.append(request)
            self._live.append(request)
        return self.loop.pending > 0

    def _replay(self) -> None:
        number = len(self.host_us)
        checked = self._check > 0 and number % self._check == 0
        first_step = self.service.slot_steps_launched() + 1
        self.first_steps.append(first_step)
        if checked and self._looks:
            self.service.before_launch = self.checker.steps.before_step
        self.host_us.append(0.0)
        self._launch()
        self.checker.launched(first_step)
        if checked:
            self.checker.look_at_bounds(self._live)
            if self._looks:
                self._take(self.loop.drain())
                self.checker.steps.after_step()
        self._poll()
        while isinstance(self.loop, DeviceLoop) and self.loop.running:
            self._poll()
        if isinstance(self.loop, DeviceLoop):
            self._take(self.loop.drain())  # a run's last record waits for the next run otherwise
        if checked:
            self.checker.look_at_bounds(self._live)

    def _launch(self) -> None:
        steps = self._steps_until_arrival() if isinstance(self.loop, DeviceLoop) else None
        while True:
            begin = time.perf_counter()
            try:
                self.loop.run(steps)
            except MailboxFullError:
                time.sleep(FULL_MAILBOX_S)
                self._poll()
                continue
            self._clock(begin)
            return

    def _steps_until_arrival(self) -> int | None:
        """Most steps of a run, so that whoever arrives meanwhile is not kept waiting."""
        if not self._arrivals:
            return None
        steps = math.ceil((self._arrivals[0].arrival_ms - self.clock_ms) / self._step_ms)
        return max(1, min(steps, DEFAULT_RECORDS))

    def _poll(self) -> None:
        begin = time.perf_counter()
        records = self.loop.poll()
        self._clock(begin)
        self._take(records)
        time.sleep(self._stall_s)

    def _clock(self, begin: float) -> None:
        self.host_us[-1] += (time.perf_counter() - begin) * 1e6

    def _take(self, records: list[StepRecord]) -> None:
        if self._check:
            self.checker.follow(records)
        else:
            self._unchecked += records


def replay_requests(requests: list[TraceRequest], arguments: argparse.Namespace) -> RequestsReport:
    """Run requests to their end, scheduled by the loop.

    Parameters
    ----------
    requests : list of TraceRequest
        In order of arrival; those without output are skipped.
    arguments : argparse.Namespace
        The command's options.
    """
    served = [request for request in requests if request.output_tokens > 0]
    run = RequestsRun(served, arguments)
    service = run.service
    service.warmup()
    service.set_ready([])  # graphs captured without a ready queue would not refill
    largest = run.loop.bucket(max(1, min(len(served), service.max_batch)))
    run.loop.capture([batch for batch in run.loop.buckets if batch <= largest])
    begin = time.perf_counter()
    with progress(len(served)) as show, one_thread():
        run.run(show)
    on_cuda = service.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - begin
    run.finish()
    return RequestsReport(
        device=f"{torch.cuda.get_device_name()}, {run.graphs}" if on_cuda else "CPU, Numba",
        judges=run.judges,
        checker=run.checker.steps,
        churn=run.churn.figures,
        requests=sum(request.state is RequestState.FINISHED for request in run.requests),
        skipped=len(requests) - len(served),
        steps_per_replay=None if arguments.device_loop else run.steps_per_replay,
        simulated_s=run.clock_ms / 1e3,
        wall_s=wall_s,
        host_us=run.host_us,
        first_steps=run.first_steps,
        batch_sizes=run.checker.batch_sizes,
        step_tokens=run.checker.step_tokens,
        refilled=run.checker.refilled,
        refused=run.checker.refused,
    )


def _service(kind: type[Service], device: str, arguments: argparse.Namespace) -> Service:
    rows = arguments.max_batch
    return kind(STATES_PER_ROW * rows, rows, device=device, token_layout=arguments.layout)
