"""Generator: greedy generation for many prompts: chunked prefill, then a captured speculative loop, rows refilled as they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zos.arguments import whole_number
from zos.loop import DecodeLoop
from zos.mailbox import StepRecord
from zos.service import MetadataService
from zos.v4.model import V4Model, input_ids
from zos.v4.speculative import Drafter, SpeculativeStep
from zos.v4.state import V4State
from zos.v4.step import PrefillStep


@dataclass(eq=False)
class Generation:
    """One prompt and what was generated for it."""

    prompt: list[int]
    tokens: int  # wanted
    state_id: int = -1
    generated: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all tokens are there."""
        return len(self.generated) == self.tokens


class Generator:
    """Generates greedily with a service, a loop and a model.

    Parameters
    ----------
    model : V4Model
        The target, on the device to run on.
    max_length : int
        Longest prompt with its generated tokens.
    max_batch : int
        Sequences at once.
    chunk : int
        Most prompt tokens of a row in a prefill step.
    prefill_rows : int
        Most rows of a prefill step.
    make_drafter : callable, optional
        `make_drafter(service, state)` returns the drafter. Default: no drafts.
    tail : bool
        Run consumer layers on the last window of each prompt only (YOCO): less work, and they see no more of the prompt.

    Attributes
    ----------
    service, loop, state
        What it is made of.
    steps, rows_served, tokens_kept : int
        Decode steps that have ended, their rows that had tokens, and the tokens those kept.
    """

    def __init__(
        self,
        model: V4Model,
        max_length: int,
        max_batch: int = 8,
        chunk: int = 256,
        prefill_rows: int = 4,
        make_drafter: Callable[[MetadataService, V4State], Drafter] | None = None,
        tail: bool = False,
    ) -> None:
        config, device = model.config, model.head.weight.device
        sizes = {"max_length": max_length, "max_batch": max_batch, "chunk": chunk, "prefill_rows": prefill_rows}
        for name, size in sizes.items():
            whole_number(name, size, 1)
        self._tail = tail
        self.model, self.chunk, self.prefill_rows = model, chunk, min(prefill_rows, max_batch)
        self.service = MetadataService(
            max_batch, max_batch, config.geometry, device, chunk * self.prefill_rows, "strided",
            config.compression_rings(), carry_tokens=True,
        )  # fmt: skip
        self.state = V4State(config, max_batch, max_length, self.service.device)
        self._drafter = Drafter() if make_drafter is None else make_drafter(self.service, self.state)
        self.loop = DecodeLoop(
            self.service,
            SpeculativeStep(model, self.state, self.service, self._drafter),
            buckets=[max_batch],
            kept_tokens=True,
        )
        self.steps = self.rows_served = self.tokens_kept = 0
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}  # by state id
        self._free = deque(range(max_batch))

    def submit(self, prompt: Sequence[int], tokens: int) -> Generation:
        """Ask for `tokens` tokens after a prompt of one id or more; `run_step` works on it.

        Raises
        ------
        ValueError
            The prompt and its tokens have no room, or an id is none of the vocabulary.
        """
        room, last_id = self.state.prompts.shape[1], self.model.config.vocabulary - 1
        tokens = whole_number("tokens", tokens, 1)
        if not 1 <= len(prompt) <= room - tokens:
            raise ValueError(f"a prompt of {len(prompt)} ids and {tokens} tokens: 1 or more of both, {room} together")
        ids = [whole_number(f"prompt[{place}]", token, 0, last_id) for place, token in enumerate(prompt)]
        self._waiting.append(Generation(ids, tokens))
        return self._waiting[-1]

    @property
    def pending(self) -> int:
        """Generations that are not finished."""
        return len(self._waiting) + len(self._running)

    def run_step(self) -> None:
        """Prefill what waits for a free row, take what has come of earlier steps, and run one replay of the decode loop."""
        if self._waiting and self._free:
            self._fill_rows()
        self._take_records()
        self.loop.run()

    def run(self) -> None:
        """Finish everything; raises zos.DeviceStateError as soon as a state that went wrong is seen."""
        while self.pending:
            self.run_step()
        self._take(self.loop.drain())
        self.service.check()

    def _fill_rows(self) -> None:
        new = [self._waiting.popleft() for _ in range(min(len(self._waiting), len(self._free)))]
        for generation in new:
            generation.state_id = self._free.popleft()
            self._running[generation.state_id] = generation
            prompt = torch.tensor(generation.prompt)
            self.state.set_prompt(generation.state_id, prompt.to(self.service.device))
            length = len(generation.prompt)
            # The first decode step has the bonus token alone; each step's drafter sets the next one's length.
            self.service.admit(
                generation.state_id,
                prompt_end=length,
                chunk_q=self.chunk,
                decode_q=1,
                stop_at=length + generation.tokens,
            )
        for begin in range(0, len(new), self.prefill_rows):
            self._prefill(new[begin : begin + self.prefill_rows])
        self.loop.set_batch(self._running)

    def _prefill(self, rows: list[Generation]) -> None:
        """Run prompts through prefill steps; how many is the host's arithmetic, so nothing waits for the device."""
        done = 0
        while rows := [row for row in rows if len(row.prompt) > done]:
            self.service.set_prefill_batch([row.state_id for row in rows], batch=len(rows))
            self._take_records()
            self.prefill_step()
            done += self.chunk

    def prefill_step(self) -> None:
        """Run one step of the service's prefill batch."""
        metadata = self.service.prepare_prefill(tail=self._tail)
        step = PrefillStep(self.model.config, self.state, metadata)
        hidden = self.model(input_ids(metadata, self.state, self.service.table.prompt_end), step)
        taken = step.consumers
        self._drafter.observe(taken.positions, taken.write_slot, hidden)
        bonus = self.model.logits(hidden[taken.last_token_index]).argmax(-1)
        next_tokens = bonus.new_zeros(metadata.batch, self.model.config.geometry.tokens_per_step)
        next_tokens[:, 0] = bonus
        self.service.commit(metadata, metadata.seqlens_q, None, next_tokens)

    def _take_records(self) -> None:
        """Take what has come, and wait only where the mailbox has no room for a step more."""
        self._take(self.loop.poll())
        if self.loop.room < 1:
            self._take(self.loop.wait(self.loop.last_step_read + 1))

    def _take(self, records: list[StepRecord]) -> None:
        for record in records:
            if record.errors:  # a state in error never finishes
                self.service.check()
            if record.prefill:
                continue
            assert record.kept_tokens is not None
            self.steps += 1
            self.rows_served += int((record.kept > 0).sum())
            self.tokens_kept += int(record.kept.sum())
            for row in record.kept.nonzero()[0].tolist():
                state_id = int(record.state_ids[row])
                generation = self._running[state_id]
                generation.generated += record.kept_tokens[row, : record.kept[row]].tolist()
                if record.finished[row]:
                    self.service.release(state_id)
                    del self._running[state_id]
                    self._free.append(state_id)
