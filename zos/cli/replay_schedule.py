"""The replay's scheduler: admits requests on a simulated clock, and knows without asking which state is in which batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from zos.cli.acceptance import AcceptanceModel
from zos.cli.prefix_hits import PrefixHits
from zos.cli.replay_prediction import Prediction
from zos.cli.replay_store import ReplayStore
from zos.cli.traces import Request
from zos.loop import DecodeLoop
from zos.service import MetadataService
from zos.table import Phase


class PrefillBatch(Protocol):
    """Where prefilling states are sent; `PrefillSteps` is one."""

    def set_batch(self, state_ids: Sequence[int]) -> None:
        """Stage the rows of the next prefill steps."""


@dataclass
class PrefillFigures:
    """What prompts cost and prefix hits saved."""

    prefix_hits: int = 0  # adopted: longer than the window
    tokens_saved: int = 0  # never computed, as a hit brought them
    tokens_replayed: int = 0  # computed again before the end of a hit
    prompt_tokens_prefilled: int = 0  # computed, those included
    prefill_steps: int = 0
    deferred_rows: int = 0  # chunks that had to wait for a later step, by row and step

    def summary(self) -> dict[str, int]:
        """Every figure by name."""
        return asdict(self)


class Scheduler:
    """Continuous batching over the states of a service, first come, first served.

    Without `prefill` a prompt counts as already prefilled: its sequence enters at q_start = prompt length. With it, a sequence
    enters at 0, or by bounded replay after a prefix hit, and stands in the prefill batch, oldest first, until its prompt is
    complete. Either way it stops at prompt + output length. The device is never asked: chunks, deferred rows and the acceptance
    model tell how far each sequence is, so a batch is set only when its membership changes.

    Parameters
    ----------
    requests : sequence of Request
        In order of arrival, each with output.
    service : MetadataService
        With as many states as rows in a batch.
    loop : DecodeLoop
        Whose batch is set.
    acceptance : AcceptanceModel
        The one that the loop's step uses.
    step_ms : float
        What a step takes on the simulated clock.
    prefill : PrefillBatch, optional
        Whose batch is set too.
    chunk_q : int
        Tokens of a chunk.
    store : ReplayStore, optional
        Where states of prefixes are put and restored from; chunks are then cut at multiples of chunk_q.

    Attributes
    ----------
    batch, prefill_batch : list of int
        State of each row of the next step, until `end_step` those of the last.
    clock_ms : float
    admitted, completed : int
        Requests so far.
    trail : int
        Sum of tokens kept * seqlens_k of all rows so far, what commit cut at stop_at included.
    batch_sizes, step_tokens : list of int
        By step: decode rows, and tokens that they moved on by.
    figures : PrefillFigures or None
        None where prompts count as prefilled.
    prediction : Prediction
        What the table holds.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        service: MetadataService,
        loop: DecodeLoop,
        acceptance: AcceptanceModel,
        step_ms: float,
        prefill: PrefillBatch | None = None,
        chunk_q: int = 0,
        store: ReplayStore | None = None,
    ) -> None:
        self._service = service
        self._loop = loop
        self._acceptance = acceptance
        self._step_ms = step_ms
        self._prefill = prefill
        self._chunk_q = chunk_q
        self._store = store
        self._hits = PrefixHits()
        self._waiting = deque(requests)
        self._free = list(reversed(range(service.capacity)))  # the last one released is taken first: reuse at once
        self._finished: list[int] = []  # states to release before the next step
        self._complete: list[int] = []  # states whose prompt became complete in the last step
        geometry = service.geometry
        self.prediction = Prediction(
            service.capacity, geometry.window, geometry.tokens_per_step, service.max_prefill_tokens
        )
        self.figures = None if prefill is None else PrefillFigures()
        self.batch: list[int] = []
        self.prefill_batch: list[int] = []
        self.clock_ms = 0.0
        self.admitted = 0
        self.completed = 0
        self.trail = 0
        self.batch_sizes: list[int] = []
        self.step_tokens: list[int] = []

    def begin_step(self) -> bool:
        """Stage releases, admissions and the batches that they change; False when no request is left."""
        changed = bool(self._finished or self._complete)
        prefill_changed = bool(self._complete)
        for state_id in self._finished:
            self._release(state_id)
        if self._finished:
            phase = self.prediction.columns["phase"]
            self.batch = [state_id for state_id in self.batch if phase[state_id] == Phase.LIVE]
        if self._complete:
            self.batch += self._complete
            self.prefill_batch = [state_id for state_id in self.prefill_batch if state_id not in self._complete]
        self._finished, self._complete = [], []
        if not self.batch and not self.prefill_batch and self._waiting:
            self.clock_ms = max(self.clock_ms, self._waiting[0].arrival_ms)
        while self._waiting and self._free and self._waiting[0].arrival_ms <= self.clock_ms:
            request = self._waiting.popleft()
            if self._prefill is not None and request.prompt_tokens > 0:
                self.prefill_batch.append(self._admit(request))
                prefill_changed = True
            else:
                self.batch.append(self._admit(request))
                changed = True
        if changed and self.batch:
            self._loop.set_batch(self.batch)
        if prefill_changed and self.prefill_batch and self._prefill is not None:
            self._prefill.set_batch(self.prefill_batch)
        return bool(self.batch or self.prefill_batch)

    def end_step(self) -> None:
        """Predict what the step computed and kept; the clock moves on."""
        if self.figures is not None and self.prefill_batch:
            self._end_prefill(self.figures, np.array(self.prefill_batch))
        rows = np.array(self.batch, np.int64)
        tickets = self.prediction.tickets(rows)
        before = tickets[:, 2]
        kept = self._acceptance.num_kept(tickets)
        finished = self.prediction.decode(rows, kept)
        self._finished = finished.tolist()
        self.completed += len(finished)
        self.trail += int((kept * (before + tickets[:, 3])).sum())
        self.batch_sizes.append(len(rows))
        self.step_tokens.append(int((self.prediction.columns["q_start"][rows] - before).sum()))
        self.clock_ms += self._step_ms

    def _end_prefill(self, figures: PrefillFigures, rows: np.ndarray) -> None:
        fits = self.prediction.served(rows)
        tickets = self.prediction.tickets(rows[fits])
        self._complete = self.prediction.prefill(rows[fits]).tolist()
        chunks = tickets[:, 3]
        self.trail += int((chunks * (tickets[:, 2] + chunks)).sum())
        figures.prefill_steps += 1
        figures.prompt_tokens_prefilled += int(chunks.sum())
        figures.deferred_rows += int((~fits).sum())
        if self._store is not None:
            self._store.put(rows[fits], self.prediction.columns)

    def _admit(self, request: Request) -> int:
        state_id = self._free.pop()
        prompt, stop_at = request.prompt_tokens, request.prompt_tokens + request.output_tokens
        self.admitted += 1
        if self.figures is None:
            self._service.admit(state_id=state_id, q_start=prompt, stop_at=stop_at)
            self.prediction.admit(state_id, prompt, stop_at)
            return state_id
        hit = self._hits.admit(request)
        columns: dict[str, Any] = {"stop_at": stop_at, "prompt_end": prompt, "chunk_q": self._chunk_q}
        restored, stores = None, self._store is not None
        if self._store is not None:
            generation = int(self.prediction.columns["generation"][state_id]) + 1
            restored = self._store.admit(state_id, generation, request, hit, columns)
        start = self.prediction.admit_prompt(state_id, prompt, stop_at, self._chunk_q, hit, restored, aligned=stores)
        if restored is None:
            first_chunk = int(self.prediction.columns["seqlen_q"][state_id]) if stores else None
            self._service.admit(state_id=state_id, seqlen_q=first_chunk, prefix_hit=hit, **columns)
        if start > 0:
            self.figures.prefix_hits += 1
            self.figures.tokens_saved += start
            self.figures.tokens_replayed += hit - start
        return state_id

    def _release(self, state_id: int) -> None:
        self._service.release(state_id)
        self.prediction.release(state_id)
        self._free.append(state_id)
