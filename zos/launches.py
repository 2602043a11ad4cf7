"""StepLaunches: how edits, graphs of steps and publications come onto the stream, and what the host counts of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from device_kernels import device_loop
from host_fallback.commit import APPENDED, TAKEN
from zos import nvtx
from zos.arguments import INT64_LARGEST, duration, whole_number
from zos.batches import BatchEdits
from zos.edits import LIFE_EDITS, is_forks
from zos.errors import EditsDuringCaptureError
from zos.mailbox import StepRecord, parsed
from zos.metadata import DecodeMetadata, StepMetadata
from zos.streams import StreamOrder


class StepLaunches(BatchEdits):
    """What a service launches for steps, beside prepare and commit themselves; parameters are those of BatchEdits.

    Attributes
    ----------
    device : torch.device
        The service's.
    steps_launched : int
        Steps prepared here, or reported through `launched`.
    """

    device: torch.device
    steps_launched: int
    _replays: int  # graphs replayed
    _order: StreamOrder

    @nvtx.marked("zos.flush")
    def flush(self) -> None:
        """Apply what is staged now, in one launch on the current stream; nothing staged, nothing launched.

        Call it before replaying a graph of your own, and `launched` after.

        Raises
        ------
        EditsDuringCaptureError
            Edits are staged while a CUDA graph is captured.
        """
        if self._edits and self._order.capturing():
            raise EditsDuringCaptureError("edits are staged, and a capture would replay them: flush before capturing")
        self._order.join()
        if self._edits:
            while self._edits:
                self._flush_with(self._edits.launch)
            self._order.mark()

    def replay(
        self, plain: Callable[[], None], draining: Callable[[], None], metadata: DecodeMetadata, steps: int
    ) -> None:
        """Launch one of two graphs of `steps` steps on `metadata`: `plain`, or, where edits are staged, `draining`.

        The graphs differ in `drain_edits`, with which the second begins.
        """
        self._order.join()
        if not self._edits:
            plain()
        else:
            while not self._edits.fits:
                self._flush_with(self._edits.launch)
            self._flush_with(draining)
        self._bounds.prepared(metadata.slot)
        self._replayed(steps, metadata.slot)
        self._prepared(metadata)

    def drain_edits(self) -> None:
        """Launch what applies the next packed buffer: the head of a `draining` graph of `replay`, nothing else."""
        self._edits.launch()

    def _flush_with(self, launch: Callable[[], None]) -> None:
        """Pack what is staged, as far as one launch applies it, and launch it."""
        packed = self._edits.pack()
        try:
            launch()
        except BaseException:
            self._edits.unpack(packed)
            raise
        edits, batches = packed
        if is_forks(edits):
            self._copy_states(edits)
        if self._bounds.edits_staged:
            self._bounds.edits_launched(sum(edit.kind in LIFE_EDITS for edit in edits))
        for batch_row, (ids, _) in batches.items():
            self._batch_launched(batch_row, ids)

    def load_device_loop(self) -> None:
        """Compile and load the kernel of a device-driven loop, so that a capture finds it ready."""
        for kernel in device_loop.KERNELS:
            kernel.load(self.device.index)

    def decide_next_step(self, slot: int, handle: int, control: torch.Tensor, steps: torch.Tensor, spare: int) -> None:
        """Launch what decides whether a WHILE node runs another step of a slot; captured, the last of its body."""
        mailbox, state = self._attached(slot), self._edits.batch_states[slot]
        device_loop.bind_decide_next_step(
            handle, mailbox.results, mailbox.results_state, state, control, steps, spare
        )()

    def starved(self, slot: int = 0) -> bool:
        """Whether a sequence finished in the slot's last step and no entry of its ready queue is left; on the CPU."""
        mailbox, state = self._attached(slot), self._edits.batch_states[slot]
        record = mailbox.results[int(mailbox.results_state[0]) % mailbox.records]
        ended = parsed(record.numpy())
        return bool((ended.finished & ~ended.refilled).any()) and int(state[TAKEN]) == int(state[APPENDED])

    def settle_launched(self, last_step: int, slot: int = 0) -> None:
        """Say that the last of a slot's steps that were counted as launched was `last_step`: a run ended early."""
        self.steps_launched -= self._bounds.settle(slot, last_step)
        state = self.slot(slot)
        state.sets_launched = deque((min(after_step, last_step), ids) for after_step, ids in state.sets_launched)

    def publish(self, slot: int = 0) -> None:
        """Publish the records of the steps that have run, in one launch on the current stream; may be captured.

        In a graph of your own, launch it on a branch beside the step's body, so that it ends before the step's commit.
        """
        self._attached(slot).publish()

    def wait(self, step: int, slot: int = 0, timeout_s: float = 10.0) -> list[StepRecord]:
        """Publish on the current stream, and return the records that come until that of `step` is among them, in order.

        Raises
        ------
        ValueError
            The slot has no mailbox, fewer steps are launched, or timeout_s is no duration.
        TimeoutError
            It did not come in time; the records that did come with the next call.
        MailboxOverrunError
            As poll.
        """
        mailbox = self._attached(slot)
        launched, timeout_s = self._bounds.launched_steps(slot), duration("timeout_s", timeout_s)
        if whole_number("step", step, -INT64_LARGEST, INT64_LARGEST) > launched:
            raise ValueError(f"step={step} is not launched: slot {slot} has launched {launched}")
        if mailbox.next_step <= step:
            self._order.join()
            mailbox.publish()
            self._order.mark()
        return self._to_learn(slot, mailbox.wait(step, timeout_s))

    def drain(self, slot: int = 0, timeout_s: float = 10.0) -> list[StepRecord]:
        """Return the records of every step launched so far that were not read yet; as `wait` for the last one."""
        return self.wait(self.slot_steps_launched(slot), slot, timeout_s)

    def launched(self, steps: int, slot: int = 0) -> None:
        """Say that a graph with `steps` captured decode steps of a slot was replayed on the current stream.

        Order and bounds then count them.

        What such a graph prepared the host does not know: until a slot's next eager prepare, `commit` cannot tell metadata that
        another batch size has replaced.
        """
        self.slot(slot)
        steps = whole_number("steps", steps, 0)
        if steps:
            self._bounds.prepared_unseen(slot)
        self._replayed(steps, slot)

    def _replayed(self, steps: int, slot: int) -> None:
        self.steps_launched += steps
        self._replays += 1
        if steps:
            self._bounds.launched(slot, steps, self.geometry.tokens_per_step)
        self._order.mark_replay()

    def _prepared(self, metadata: StepMetadata) -> None:
        metadata.origin.prepared_batch, metadata.origin.prepared_after = metadata.batch, self._replays

    def _count_launched(self, slot: int, steps: int, prefill: bool) -> None:
        tokens = self.max_prefill_tokens if prefill else self.geometry.tokens_per_step
        self._bounds.launched(slot, steps, tokens, prefill)

    def _count_step(self) -> None:
        self.steps_launched += 1
        self._order.mark()
