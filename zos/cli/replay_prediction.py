"""The replay's prediction: what the device's table must hold, moved on by host arithmetic and never by asking."""

from __future__ import annotations

import numpy as np

from zos.table import Phase

COLUMNS = (
    *("phase", "seqlen_q", "q_start", "prompt_end", "swa_valid_start"),
    *("kv_cached_end", "generation", "head", "stop_at", "chunk_q"),
)


class Prediction:
    """The columns of every state, and what each call and each step does to them.

    Parameters
    ----------
    capacity : int
        Number of states.
    window, tokens_per_step : int
        W and Q.
    max_prefill_tokens : int
        Token places of a prefill step.

    Attributes
    ----------
    columns : dict of str to numpy.ndarray
        int64 [capacity] by name.
    """

    def __init__(self, capacity: int, window: int, tokens_per_step: int, max_prefill_tokens: int) -> None:
        self._window = window
        self._tokens_per_step = tokens_per_step
        self._max_prefill_tokens = max_prefill_tokens
        self.columns = {name: np.zeros(capacity, np.int64) for name in COLUMNS}

    def arrays(self) -> dict[str, np.ndarray]:
        """int32 columns by name, as the device should hold them once everything staged is applied."""
        return {name: column.astype(np.int32) for name, column in self.columns.items()}

    def admit(self, state_id: int, q_start: int, stop_at: int) -> None:
        """Predict an admission whose prompt counts as prefilled."""
        self._admit(state_id, q_start=q_start, head=q_start, stop_at=stop_at, seqlen_q=self._tokens_per_step)

    def admit_prompt(
        self,
        state_id: int,
        prompt_end: int,
        stop_at: int,
        chunk_q: int,
        hit: int,
        restored: tuple[int, int] | None = None,
        aligned: bool = False,
    ) -> int:
        """Predict an admission whose prompt is prefilled after a prefix hit; returns its q_start.

        Parameters
        ----------
        state_id, prompt_end, stop_at, chunk_q : int
            As admitted.
        hit : int
            Tokens of the prefix hit.
        restored : (int, int), optional
            q_start and swa_valid_start of a restored state. Default: the hit is adopted by bounded replay, or not at all.
        aligned : bool
            Whether the first chunk is cut at a multiple of chunk_q, and so the others are.
        """
        adopted = hit if hit > self._window or restored else 0
        start = max(0, adopted - self._window)
        start, valid_start = restored or (start, start)
        first_chunk = chunk_q - start % chunk_q if aligned else chunk_q
        chunk = min(first_chunk, prompt_end - start) or self._tokens_per_step
        self._admit(
            state_id, q_start=start, head=start, swa_valid_start=valid_start, kv_cached_end=adopted, prompt_end=prompt_end,
            stop_at=stop_at, chunk_q=chunk_q, seqlen_q=chunk,
        )  # fmt: skip
        return start

    def _admit(self, state_id: int, **values: int) -> None:
        """Set every column, so that nothing of an earlier tenant remains."""
        generation = self.columns["generation"][state_id] + 1
        for name, column in self.columns.items():
            column[state_id] = values.get(name, 0)
        self.columns["phase"][state_id] = Phase.LIVE
        self.columns["generation"][state_id] = generation

    def release(self, state_id: int) -> None:
        """Predict a release."""
        self.columns["phase"][state_id] = Phase.FREE
        self.columns["generation"][state_id] += 1

    def pause(self, state_id: int) -> None:
        """Predict a pause."""
        if self.columns["phase"][state_id] == Phase.LIVE:
            self.columns["phase"][state_id] = Phase.PAUSED

    def resume(self, state_id: int) -> None:
        """Predict a resume."""
        if self.columns["phase"][state_id] == Phase.PAUSED:
            self.columns["phase"][state_id] = Phase.LIVE

    def reset(self, state_id: int) -> bool:
        """Predict a reset to a decoding sequence of length 0; returns whether it did anything."""
        c = self.columns
        if c["phase"][state_id] not in (Phase.LIVE, Phase.PAUSED):
            return False
        self._admit(state_id, stop_at=int(c["stop_at"][state_id]), seqlen_q=self._tokens_per_step)
        return True

    def tickets(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows, 4]: (state_id, generation, q_start, seqlen_q) of the states in `rows`."""
        c = self.columns
        return np.stack([rows, c["generation"][rows], c["q_start"][rows], c["seqlen_q"][rows]], axis=1)

    def served(self, rows: np.ndarray) -> np.ndarray:
        """Which prefilling rows have a chunk that fits, bool [rows]; places are counted in row order, deferred rows' included."""
        fits: np.ndarray = self.columns["seqlen_q"][rows].cumsum() <= self._max_prefill_tokens
        return fits

    def prefill(self, rows: np.ndarray) -> np.ndarray:
        """Move rows on by their chunks; returns those whose prompt is complete."""
        c = self.columns
        end = c["q_start"][rows] + c["seqlen_q"][rows]
        c["q_start"][rows] = c["head"][rows] = end
        missing = c["prompt_end"][rows] - end
        c["seqlen_q"][rows] = np.where(missing > 0, np.minimum(c["chunk_q"][rows], missing), self._tokens_per_step)
        complete: np.ndarray = rows[missing == 0]
        return complete

    def decode(self, rows: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Move rows on by what was kept, cut at stop_at; returns those that are finished."""
        c = self.columns
        before, stop_at = c["q_start"][rows], c["stop_at"][rows]
        c["head"][rows] = np.maximum(c["head"][rows], before + c["seqlen_q"][rows])
        c["q_start"][rows] = after = np.minimum(before + kept, stop_at)
        finished: np.ndarray = rows[after == stop_at]
        c["phase"][finished] = Phase.FINISHED
        return finished
