"""The oracle of prefill steps: what docs/design.md says of prepare_v4_prefill_metadata, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from zos.cli.oracle import Oracle


class PrefillOracle(Oracle):
    """An oracle that prepares chunks of any length as well."""

    def prepare_prefill(self, state_ids: Iterable[int], full_index: bool = False) -> dict[str, np.ndarray]:
        """Metadata of a prefill batch over max_prefill_tokens token places.

        Parameters
        ----------
        state_ids : iterable of int
            The state of each row, -1 for padding.
        full_index : bool
            Whether "kv_swa_full_index" is wanted.

        Returns
        -------
        dict of str to numpy.ndarray
            PrefillMetadata's outputs by name, "tickets", "compression_write_slot[r]", "compression_index[r]".
        """
        ids = [int(state_id) for state_id in state_ids]
        places = self.max_prefill_tokens
        out = self._padding(len(ids), places)
        del out["kv_swa_index"]
        out["last_token_index"] = np.full(len(ids), -1, np.int64)
        out["swa_load_plan"] = np.array(
            [[(-1, 0, row * self.window, self.window), (-1, 0, 0, 0), (-1, 0, 0, 0)] for row in range(len(ids))],
            np.int32,
        ).reshape(len(ids), 3, 4)
        before = 0
        for row, state_id in enumerate(ids):
            taken, error, value = self._examine(state_id, places)
            first = before
            before += taken
            out["cu_seqlens_q"][row + 1] = min(before, places)
            self._write_empty_ticket(out["tickets"][row], state_id, error, taken)
            if error:
                self._record_error(self.records[state_id], error, value)
            elif taken > 0 and before > places:
                self.counters["deferred"] += 1
            elif taken > 0:
                self._write_row(out, row, state_id, first, len(ids))
                out["last_token_index"][row] = before - 1
                record = self.records[state_id]
                out["swa_load_plan"][row] = self.load_plan(row, state_id, record["q_start"], record["swa_valid_start"])
        if full_index:
            out["kv_swa_full_index"] = self._expand(out["kv_swa_full_index_pivots"])
        return out

    def load_plan(self, row: int, state_id: int, begin: int, valid_start: int) -> list[tuple[int, int, int, int]]:
        """Segments of a row's history before `begin`: runs of rows that are zeros, or neighbours in the ring."""
        segments: list[tuple[int, int, int, int]] = []
        for k in range(self.window):
            position, to = begin - self.window + k, row * self.window + k
            missing = position < max(valid_start, 0)
            source, slot = (-1, 0) if missing else (state_id, position % self.ring)
            if segments and segments[-1][0] == source and (missing or segments[-1][1] + segments[-1][3] == slot):
                source, slot, to, rows = segments.pop()
                segments.append((source, slot, to, rows + 1))
            else:
                segments.append((source, slot, to, 1))
        return segments + [(-1, 0, 0, 0)] * (3 - len(segments))

    def _expand(self, pivots: np.ndarray) -> np.ndarray:
        full = np.full((len(pivots), self.window), -1, np.int32)
        for place, (first, history, second, chunk) in enumerate(pivots.tolist()):
            full[place, : history + chunk] = [*range(first, first + history), *range(second, second + chunk)]
        return full
