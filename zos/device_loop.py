"""DeviceLoop: a DecodeLoop whose steps follow one another on the device until the host is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zos import nvtx
from zos.arguments import whole_number
from zos.loop import DecodeLoop
from zos.mapped import shared_zeros
from zos.metadata import DecodeMetadata
from zos.steps import ONE_CAPTURE

STOP, STEPS_READ, MOST_STEPS, RUNS_ENDED, LAST_STEP, CONTROL_WORDS = (
    0,
    1,
    2,
    3,
    4,
    8,
)  # as in device_kernels/device_loop.cu
SPARE_RECORDS = 2  # of the mailbox that stay free: a run ends before the mailbox is full


@dataclass
class _Run:
    """Captured WHILE graphs of one batch shape, and what their kernels write to: kept alive as long as the graphs."""

    plain: Any  # cuda.core.graph.Graph
    draining: Any  # the same, with the staged edits applied first
    metadata: DecodeMetadata
    kept: list[object]


class DeviceLoop(DecodeLoop):
    """Runs steps without the host: a CUDA graph's WHILE node goes on until the host is needed.

    A run ends when a sequence finishes and the ready queue is empty, after `most_steps` steps, when the mailbox is nearly full, or
    soon after `stop`. Records and results are those of a DecodeLoop. On the CPU the same steps run eagerly within `run`.

    Parameters are those of DecodeLoop; it needs a mailbox, and cuda.core on a CUDA device.

    Examples
    --------
    >>> svc = MetadataService(capacity=16, max_batch=8, device="cpu")
    >>> svc.admit(state_id=3, q_start=1000, stop_at=1020)
    >>> loop = DeviceLoop(svc, lambda metadata: metadata.seqlens_q)
    >>> loop.set_batch([3])
    >>> loop.run(steps=50)
    >>> loop.running, len(loop.drain())
    (False, 4)
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.steps_per_replay != 1:
            raise ValueError(f"steps_per_replay={self.steps_per_replay}: a run takes as many steps as it needs")
        if self._metadata_slot.mailbox is None:
            raise ValueError("a device-driven loop needs a mailbox (records=0 given)")
        control, self._control_operand = shared_zeros(CONTROL_WORDS, torch.int64, self._service.device)
        self._control_memory = control
        self._control = control.numpy()
        self._steps = torch.zeros(1, dtype=torch.int64, device=self._service.device)
        self._runs: dict[tuple[int, int, bool], _Run] = {}
        self._runs_launched = 0
        self._planned = 0  # steps that the run under way may take, as counted so far

    @property
    def running(self) -> bool:
        """Whether a run is under way; no CUDA call."""
        over = int(self._control[RUNS_ENDED]) == self._runs_launched
        if over and self._planned:
            last_step = int(self._control[LAST_STEP])
            self._service.settle_launched(last_step, self._slot)
            if self._allocator is not None:
                self._allocator.settle(last_step)
            self._planned = 0
        return not over

    def stop(self) -> None:
        """Let the run under way end after the step that it is in, or the one after."""
        self._control[STOP] = 1

    @nvtx.marked("zos.step")
    def run(self, steps: int | None = None) -> None:
        """Let the device run steps of the current batch; staged edits take effect before the first. Returns at once.

        Parameters
        ----------
        steps : int, optional
            Most steps of the run. Default: as many as the mailbox has room for.

        Raises
        ------
        ValueError
            As DecodeLoop.run, or a run is under way still.
        MailboxFullError
            There is no room for a step: poll first.
        """
        if self.running:
            raise ValueError("a run is under way: poll until `running` is False, or stop it")
        if self._requests:
            self._schedule()
        batch, tokens = self._checked_batch()
        mailbox = self._metadata_slot.mailbox
        assert mailbox is not None
        mailbox.has_reader = True
        self._check_room()
        room = mailbox.records - SPARE_RECORDS - (self.steps_launched - mailbox.next_step + 1)
        most = max(1, min(room, room if steps is None else whole_number("steps", steps, 1)))
        self._control[STOP] = 0
        self._control[STEPS_READ] = mailbox.next_step - 1
        self._control[MOST_STEPS] = most
        if not self._on_cuda:
            return self._run_eagerly(most)
        run = self._captured_run(batch, tokens)
        stream = _core_stream(torch.cuda.current_stream(self._service.device))
        self._planned = most
        self._runs_launched += 1
        self._service.replay(lambda: run.plain.launch(stream), lambda: run.draining.launch(stream), run.metadata, most)
        return None

    def poll(self) -> list[Any]:
        """As DecodeLoop.poll; the device learns that the mailbox has room again."""
        records = super().poll()
        mailbox = self._metadata_slot.mailbox
        assert mailbox is not None
        self._control[STEPS_READ] = mailbox.next_step - 1
        _ = self.running  # settles how many steps a run took, once it is over
        return records

    def drain(self, timeout_s: float = 10.0) -> list[Any]:
        """Return the records of every step, once the run under way is over."""
        if self._on_cuda and self.running:
            torch.cuda.current_stream(self._service.device).synchronize()
        _ = self.running
        return super().drain(timeout_s)

    def _run_eagerly(self, most: int) -> None:
        for _ in range(most):
            self._runner.run_eagerly()
            if self._control[STOP] or self._service.starved(self._slot):
                break

    def _make_ready(self, batch: int, tokens: int) -> None:
        self._captured_run(batch, tokens)

    def _captured_run(self, batch: int, tokens: int) -> _Run:
        key = (batch, tokens, self._metadata_slot.has_queue)
        if key not in self._runs:
            with ONE_CAPTURE, torch.cuda.device(self._service.device):
                self._runs[key] = self._capture_run(batch, tokens)
        return self._runs[key]

    def _capture_run(self, batch: int, tokens: int) -> _Run:
        self._service.load_device_loop()
        self._runner.warm_up(batch, tokens)
        metadata = self._service.slot_metadata(self._slot, batch, tokens)
        kept: list[object] = []
        plain, draining = (self._capture_while(metadata, drains, kept) for drains in (False, True))
        return _Run(plain, draining, metadata, kept)

    def _capture_while(self, metadata: DecodeMetadata, drains: bool, kept: list[object]) -> Any:
        from cuda.core import Device  # type: ignore[import-untyped]

        device = Device(self._service.device.index)
        device.set_current()
        builder = device.create_graph_builder().begin_building("relaxed")
        if drains:
            with torch.cuda.stream(_torch_stream(builder.stream, self._service.device)):
                self._service.drain_edits()
        condition = builder.create_condition(default_value=1)
        body = builder.while_loop(condition).begin_building("relaxed")
        pool = torch.cuda.MemPool()
        with torch.cuda.stream(_torch_stream(body.stream, self._service.device)), torch.cuda.use_mem_pool(pool):
            branch = torch.cuda.Stream()
            result = self._runner.launch(metadata, branch)
            self._service.decide_next_step(
                self._slot, int(condition.handle), self._control_operand, self._steps, SPARE_RECORDS
            )
        body.end_building()
        graph = builder.end_building().complete()
        kept += [pool, result, builder, body, condition]
        return graph


def _torch_stream(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """Torch's view of a stream of cuda.core."""
    return torch.cuda.ExternalStream(int(stream.handle), device)


def _core_stream(stream: torch.cuda.Stream) -> Any:
    """Return cuda.core's view of a stream of torch."""
    from cuda.core import Stream

    return Stream.from_handle(stream.cuda_stream)
