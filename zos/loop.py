"""DecodeLoop: captures prepare -> step -> commit for every batch bucket and replays the smallest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zos import nvtx
from zos.arguments import whole_number
from zos.errors import MailboxFullError
from zos.mailbox import StepRecord
from zos.metadata import DecodeMetadata
from zos.requests import RequestScheduler
from zos.service import MetadataService
from zos.steps import ONE_CAPTURE, CapturedSteps, Step, StepRunner, with_progress

DEFAULT_RECORDS = 64


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: 1, 2, 4, 8, then multiples of 8, and max_batch itself."""
    sizes = {1, 2, 4, *range(8, max_batch + 1, 8), max_batch}
    return tuple(sorted(size for size in sizes if size <= max_batch))


class DecodeLoop(RequestScheduler):
    """Runs decode steps: on a CUDA device as graph replays, on the CPU eagerly, with the same calls and the same bytes.

    Batches are set by the caller (`set_batch`), or by the loop from requests (`submit`, then `run` and `poll`).

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
    steps_per_replay : int
        Steps of a graph, one after the other; the host can act between replays only.
    records : int
        Records of the mailbox that the loop attaches, unless the slot has one: how far steps may run ahead of the reader.
        0: no mailbox.
    kept_tokens : bool
        Whether records have room for the ids of the tokens kept.

    Examples
    --------
    >>> svc = MetadataService(capacity=16, max_batch=8, device="cpu")
    >>> svc.admit(state_id=3, q_start=1000)
    >>> loop = DecodeLoop(svc, lambda metadata: metadata.seqlens_q)  # keep every token
    >>> loop.set_batch([3])
    >>> loop.run(steps=2)
    >>> int(svc.table.q_start[3])
    1012
    >>> [record.kept.tolist() for record in loop.poll()]
    [[6], [6]]
    """

    def __init__(
        self,
        service: MetadataService,
        step: Step,
        *,
        buckets: Sequence[int] | None = None,
        slot: int = 0,
        steps_per_replay: int = 1,
        records: int = DEFAULT_RECORDS,
        kept_tokens: bool = False,
    ) -> None:
        self._runner = StepRunner(service, slot, step)
        self._batches_set = service.slot(slot).batches_set  # raises IndexError for a slot that is none
        largest = service.max_batch
        sizes = default_buckets(largest) if buckets is None else buckets
        self.buckets = tuple(sorted({whole_number("buckets", size, 1, largest) for size in sizes}))
        if not self.buckets:
            raise ValueError("buckets is empty")
        self.steps_per_replay = whole_number("steps_per_replay", steps_per_replay, 1)
        if whole_number("records", records, 0) and service.slot(slot).mailbox is None:
            whole_number("records", records, 2 * steps_per_replay)
            service.attach_mailbox(slot, records, kept_tokens)
        super().__init__(service, slot, self.buckets[-1])
        self._metadata_slot = service.slot(slot)
        self._on_cuda = service.device.type == "cuda"
        self._graphs: dict[tuple[int, int, bool], CapturedSteps] = {}
        self._pool: Any = None  # torch's handle of the memory pool that all graphs share
        self._rows: list[int] = []  # state ids of the batch, in row order
        self._shape: tuple[int, int] | None = None  # (B, T) of the batch
        self._rotation = 0  # rows to move to the end after each replay: those that are served for certain
        self._rotation_due = False

    @property
    def metadata(self) -> DecodeMetadata:
        """Metadata of the current batch: what its last step was given."""
        batch, tokens = self._batch_shape()
        return self._service.slot_metadata(self._slot, batch, tokens)

    @property
    def captured(self) -> tuple[tuple[int, int], ...]:
        """(batch, token places) of every graph captured so far."""
        return tuple((batch, tokens) for batch, tokens, _ in self._graphs)

    def set_batch(self, state_ids: Iterable[int], max_tokens: int | None = None) -> None:
        """Stage the batch of the next steps, padded to the smallest bucket that fits.

        With a token budget (`max_tokens`, packed layout) that may not fit all rows, the rows served for certain move to the end of
        the batch before the next replay, so that a deferred row gets its turn; a batch set again keeps the order that its states
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
        self._batches_set = self._metadata_slot.batches_set
        self._rows, self._shape = ids, (batch, tokens)

    def _stage_rows(self, state_ids: list[int]) -> None:
        self.set_batch(state_ids)

    def _shrinks(self, live: int, rows: int) -> bool:
        return self.bucket(live) < self.bucket(rows)

    def _rotated(self) -> list[int]:
        return self._rows[self._rotation :] + self._rows[: self._rotation]

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket that holds `rows` rows."""
        for size in self.buckets:
            if rows <= size:
                return size
        raise ValueError(f"state_ids has {rows} rows, more than the largest bucket {self.buckets[-1]}")

    def run(self, steps: int | None = None) -> None:
        """Run steps of the current batch; staged edits take effect before the first.

        Parameters
        ----------
        steps : int, optional
            A multiple of steps_per_replay. Default: one replay.

        Raises
        ------
        ValueError
            No batch was set, another caller set the slot's batch since (its rows would not be this loop's), or `steps` is no
            multiple of steps_per_replay.
        MailboxFullError
            The steps would run further ahead of the reader than the mailbox has records; those before them are launched. While
            nobody has asked for records (`poll`, `wait`, `drain`) there is no reader to be ahead of.
        """
        each = self.steps_per_replay
        replays = 1
        if steps is not None:
            replays, rest = divmod(whole_number("steps", steps, 0), each)
            if rest:
                raise ValueError(f"steps={steps} is no multiple of steps_per_replay={each}")
        for _ in range(replays):
            self._run_replay(each)

    @nvtx.marked("zos.step")
    def _run_replay(self, steps: int) -> None:
        if self._requests:
            self._schedule()
        batch, tokens = self._checked_batch()
        self._check_room()
        if self._rotation_due:
            self._stage(self._rotated(), batch, tokens)
        if self._on_cuda:
            captured = self._captured(batch, tokens)
            self._service.replay(captured.plain.replay, captured.draining.replay, captured.metadata, steps)
        else:
            for _ in range(steps):
                self._runner.run_eagerly()
        self._rotation_due = self._rotation > 0

    def poll(self) -> list[StepRecord]:
        """Return the records of the steps that have ended since the last call, in order; no CUDA call.

        Raises
        ------
        ValueError
            The loop has no mailbox.
        MailboxOverrunError
            Records were overwritten before they were read.
        """
        self._take(self._service.poll(self._slot))
        return self._delivered()

    def wait(self, step: int, timeout_s: float = 10.0) -> list[StepRecord]:
        """Return the records that are there once step number `step` has ended; it spins, with a time-out.

        Raises
        ------
        ValueError
            The loop has no mailbox, or has not launched that step.
        TimeoutError
            The step did not end in time.
        """
        self._take(self._service.wait(step, self._slot, timeout_s))
        return self._delivered()

    def drain(self, timeout_s: float = 10.0) -> list[StepRecord]:
        """Return the records of every step launched so far, once they have all ended; as `wait` for the last one."""
        self._take(self._service.drain(self._slot, timeout_s))
        return self._delivered()

    @property
    def steps_launched(self) -> int:
        """Number of the last step launched."""
        return self._service.slot_steps_launched(self._slot)

    @property
    def service(self) -> MetadataService:
        """The service whose slot this loop drives."""
        return self._service

    @property
    def room(self) -> int:
        """Steps that may be launched before the mailbox is full of unread records."""
        mailbox = self._metadata_slot.mailbox
        if mailbox is None:
            raise ValueError("the loop has no mailbox (records=0)")
        return mailbox.records - (self.steps_launched - mailbox.next_step + 1)

    @property
    def last_step_read(self) -> int:
        """Number of the last step whose record has been read; 0 without a mailbox."""
        mailbox = self._metadata_slot.mailbox
        return 0 if mailbox is None else mailbox.next_step - 1

    def capture(self, batch_sizes: Iterable[int] | None = None, max_tokens: int | None = None) -> None:
        """Capture the graphs of these buckets (default: all) for a token budget ahead of their first use; no-op on the CPU.

        On a terminal, where tqdm is installed, a bar shows how far it is and what memory the graphs take.
        """
        sizes = [self.bucket(rows) for rows in (self.buckets if batch_sizes is None else batch_sizes)]
        if self._service.device.type != "cuda":
            for batch in sizes:
                self._budget(batch, max_tokens)
            return
        for batch in with_progress(sizes, self._service.device):
            self._make_ready(batch, self._budget(batch, max_tokens))

    def _make_ready(self, batch: int, tokens: int) -> None:
        """Capture what a run of such a batch launches."""
        self._captured(batch, tokens)

    def _batch_shape(self) -> tuple[int, int]:
        if self._shape is None:
            raise ValueError("the loop has no batch: call set_batch first")
        return self._shape

    def _checked_batch(self) -> tuple[int, int]:
        """(B, T) of the batch, if it still is this loop's."""
        shape = self._batch_shape()
        if self._batches_set != self._metadata_slot.batches_set:
            raise ValueError(f"the batch of slot {self._slot} was set by another caller since loop.set_batch")
        return shape

    def _check_room(self) -> None:
        mailbox = self._metadata_slot.mailbox
        if mailbox is None or not mailbox.has_reader:
            return
        after = self._service.slot_steps_launched(self._slot) + self.steps_per_replay
        undelivered = len(self._inbox) if self._has_reader else 0
        if after - mailbox.next_step + undelivered < mailbox.records:
            return
        if not self._has_reader:  # requests alone need the records
            self._take(self._service.poll(self._slot))
        ahead = after - mailbox.next_step + 1 + undelivered
        if ahead > mailbox.records:
            raise MailboxFullError(
                f"{self.steps_per_replay} step(s) more would be {ahead} ahead of the reader, but the mailbox of slot {self._slot} "
                f"has {mailbox.records} records: poll first"
            )

    def _captured(self, batch: int, tokens: int) -> CapturedSteps:
        shape = (batch, tokens, self._metadata_slot.has_queue)
        captured = self._graphs.get(shape)
        if captured is None:
            with ONE_CAPTURE, torch.cuda.device(self._service.device):
                captured = self._runner.capture(batch, tokens, self.steps_per_replay, self._pool)
            self._graphs[shape] = captured
            self._pool = captured.draining.pool()
        return captured
