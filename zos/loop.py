"""DecodeLoop: captures prepare -> step -> commit for every batch bucket and replays the smallest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zos.arguments import whole_number
from zos.metadata import DecodeMetadata
from zos.service import MetadataService

WARMUP_RUNS = 2  # eager runs of a step before it is captured: lazy initialisation must not fall into the capture


class StepResult(NamedTuple):
    """What a step found out about its rows; all on the device."""

    num_kept: torch.Tensor  # int32 [B]: tokens kept, the bonus token included; 0 for no result
    finished: torch.Tensor | None = None  # bool [B]: sequences that end here
    next_tokens: torch.Tensor | None = None  # int64 [B, tokens per step]: input ids of the next step


Step = Callable[[DecodeMetadata], "torch.Tensor | tuple[torch.Tensor, ...] | StepResult"]


@dataclass
class _Captured:
    """A captured step, and what its kernels write to: kept alive as long as the graph."""

    graph: torch.cuda.CUDAGraph
    metadata: DecodeMetadata
    result: StepResult


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: 1, 2, 4, 8, then multiples of 8, and max_batch itself."""
    sizes = {1, 2, 4, *range(8, max_batch + 1, 8), max_batch}
    return tuple(sorted(size for size in sizes if size <= max_batch))


class DecodeLoop:
    """Runs decode steps: on a CUDA device as graph replays, on the CPU eagerly, with the same calls and the same bytes.

    Parameters
    ----------
    service : MetadataService
        Whose slot this loop drives.
    step : callable
        `step(metadata)` returns num_kept, or (num_kept, finished, next_tokens), or a StepResult. It must be capturable: no host
        sync, no host decision on device data. Before each capture it runs on an all-padding batch with buffers of its own.
    buckets : sequence of int, optional
        Batch sizes to capture. Default: 1, 2, 4, 8, then multiples of 8 up to max_batch.
    slot : int
        Metadata slot of the service that belongs to this loop.

    Examples
    --------
    >>> svc = MetadataService(capacity=16, max_batch=8, device="cpu")
    >>> svc.admit(state_id=3, q_start=1000)
    >>> loop = DecodeLoop(svc, lambda metadata: metadata.seqlens_q)  # keep every token
    >>> loop.set_batch([3])
    >>> loop.run(steps=2)
    >>> int(svc.table.q_start[3])
    1012
    """

    def __init__(
        self, service: MetadataService, step: Step, *, buckets: Sequence[int] | None = None, slot: int = 0
    ) -> None:
        if not callable(step):
            raise ValueError(f"step={step!r} is not callable")
        self._service = service
        self._step = step
        self._slot = slot
        self._batches_set = service.batches_set(slot)  # raises IndexError for a slot that is none
        largest = service.max_batch
        sizes = default_buckets(largest) if buckets is None else buckets
        self.buckets = tuple(sorted({whole_number("buckets", size, 1, largest) for size in sizes}))
        if not self.buckets:
            raise ValueError("buckets is empty")
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None  # torch's handle of the memory pool that all graphs share
        self._rows: list[int] = []  # state ids of the batch, in row order
        self._shape: tuple[int, int] | None = None  # (B, T) of the batch
        self._rotation = 0  # rows to move to the end after each step: those that are served for certain
        self._rotation_due = False

    @property
    def metadata(self) -> DecodeMetadata:
        """Metadata of the current batch: what its last step was given."""
        batch, tokens = self._batch_shape()
        return self._service.slot_metadata(self._slot, batch, tokens)

    @property
    def captured(self) -> tuple[tuple[int, int], ...]:
        """(batch, token places) of every graph captured so far."""
        return tuple(self._graphs)

    def set_batch(self, state_ids: Iterable[int], max_tokens: int | None = None) -> None:
        """Stage the batch of the next steps, padded to the smallest bucket that fits.

        With a token budget (`max_tokens`, packed layout) that may not fit all rows, the rows served for certain move to the end of
        the batch before the next step, so that a deferred row gets its turn; a batch set again keeps the order that its states
        have by then. `metadata.state_ids` says which state a row is.

        Raises
        ------
        ValueError, IndexError
            As MetadataService.set_batch, or more rows than the largest bucket.
        """
        ids = list(state_ids)
        batch, step = self.bucket(len(ids)), self._service.geometry.tokens_per_step
        tokens = self._budget(batch, max_tokens)
        rotation = tokens // step if len(ids) * step > tokens else 0
        if rotation:
            rows = self._rotated() if self._rotation_due else self._rows
            place = {state_id: row for row, state_id in enumerate(rows)}
            ids.sort(
                key=lambda state_id: place.get(state_id, len(rows))
            )  # stable: newcomers keep their order, at the end
        self._stage(ids, batch, tokens)
        self._rotation, self._rotation_due = rotation, False

    def _budget(self, batch: int, max_tokens: int | None) -> int:
        """Token places of a batch: the budget, where the batch could use more."""
        step = self._service.geometry.tokens_per_step
        if max_tokens is None:
            return batch * step
        if self._service.token_layout == "strided":
            raise ValueError(f"max_tokens={max_tokens} given, but token_layout='strided' has no token budget")
        return min(whole_number("max_tokens", max_tokens, step), batch * step)

    def _stage(self, ids: list[int], batch: int, tokens: int) -> None:
        budget = None if tokens == batch * self._service.geometry.tokens_per_step else tokens
        self._service.set_batch(ids, batch=batch, max_tokens=budget, slot=self._slot)
        self._batches_set = self._service.batches_set(self._slot)
        self._rows, self._shape = ids, (batch, tokens)

    def _rotated(self) -> list[int]:
        return self._rows[self._rotation :] + self._rows[: self._rotation]

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket that holds `rows` rows."""
        for size in self.buckets:
            if rows <= size:
                return size
        raise ValueError(f"state_ids has {rows} rows, more than the largest bucket {self.buckets[-1]}")

    def run(self, steps: int = 1) -> None:
        """Run `steps` steps of the current batch; staged edits take effect before the first.

        Raises
        ------
        ValueError
            No batch was set, or another caller set the slot's batch since: its rows would not be this loop's.
        """
        batch, tokens = self._batch_shape()
        if self._batches_set != self._service.batches_set(self._slot):
            raise ValueError(f"the batch of slot {self._slot} was set by another caller since loop.set_batch")
        for _ in range(whole_number("steps", steps, 0)):
            if self._rotation_due:
                self._stage(self._rotated(), batch, tokens)
            if self._service.device.type == "cuda":
                self._replay(batch, tokens)
            else:
                metadata = self._service.prepare(self._slot)
                self._service.commit(metadata, *_as_result(self._step(metadata)))
            self._rotation_due = self._rotation > 0

    def capture(self, batch_sizes: Iterable[int] | None = None, max_tokens: int | None = None) -> None:
        """Capture the graphs of these buckets (default: all) for a token budget ahead of their first use; no-op on the CPU."""
        for rows in self.buckets if batch_sizes is None else batch_sizes:
            batch = self.bucket(rows)
            tokens = self._budget(batch, max_tokens)
            if self._service.device.type == "cuda":
                self._captured(batch, tokens)

    def _batch_shape(self) -> tuple[int, int]:
        if self._shape is None:
            raise ValueError("the loop has no batch: call set_batch first")
        return self._shape

    def _replay(self, batch: int, tokens: int) -> None:
        captured = self._captured(batch, tokens)
        self._service.flush()
        captured.graph.replay()
        self._service.launched(1)
        captured.metadata.origin.prepared_batch = batch

    def _captured(self, batch: int, tokens: int) -> _Captured:
        captured = self._graphs.get((batch, tokens))
        if captured is None:
            with torch.cuda.device(self._service.device):
                captured = self._graphs[batch, tokens] = self._capture(batch, tokens)
        return captured

    def _capture(self, batch: int, tokens: int) -> _Captured:
        service = self._service
        service.warmup()
        metadata = service.private_metadata(batch, tokens)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARMUP_RUNS):
                    self._run_body(metadata)
        finally:  # also when step raises: the private buffers are freed, and nothing may still write to them
            current.wait_stream(side)
            current.synchronize()

        metadata = service.slot_metadata(self._slot, batch, tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):  # the default one may be another device's
            result = self._run_body(metadata)
        self._pool = graph.pool()
        return _Captured(graph, metadata, result)

    def _run_body(self, metadata: DecodeMetadata) -> StepResult:
        self._service.launch_prepare(metadata)
        result = _as_result(self._step(metadata))
        self._service.commit(metadata, *result)
        return result


def _as_result(returned: torch.Tensor | tuple[torch.Tensor, ...] | StepResult) -> StepResult:
    if isinstance(returned, torch.Tensor):
        return StepResult(returned)
    if isinstance(returned, tuple) and 1 <= len(returned) <= len(StepResult._fields):
        return StepResult(*returned)
    raise TypeError(f"step returned {type(returned).__name__}: expected num_kept or (num_kept, finished, next_tokens)")
