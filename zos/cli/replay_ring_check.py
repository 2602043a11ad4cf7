"""The replay's check of the ring: what a step stored, loaded and could gather, against the dense model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from zos.cli.dense_ring import ENTRY_BYTES, DenseRing, dequantised
from zos.cli.latents import WIDTH
from zos.cli.replay_ring import ReplayRing
from zos.metadata import PrefillMetadata
from zos.service import MetadataService
from zos.table import Phase

Arrays = dict[str, np.ndarray]
ENTRY_WORDS = ENTRY_BYTES // 8  # an entry is compared as so many 64-bit words


class RingChecker:
    """Tells what the ring holds and what it must hold, as pairs of named arrays.

    Parameters
    ----------
    service : MetadataService
        Whose metadata are used.
    ring : ReplayRing
        Under test.

    Attributes
    ----------
    entries : int
        Entries compared so far, however read.
    restored : RestoredPrefixes
        Told which states hold what others wrote.
    """

    def __init__(self, service: MetadataService, ring: ReplayRing) -> None:
        self._geometry = service.geometry
        self._ring = ring
        self._dense = DenseRing(service.capacity, service.geometry.window)
        self.restored = self._dense.restored
        self.entries = 0

    def before_prefill(self, metadata: PrefillMetadata) -> None:
        """Poison what a prefill step loads into."""
        self._seen(metadata.batch, metadata.tokens).fill_(torch.nan)

    def prefill(self, expected: Mapping[str, np.ndarray], columns: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
        """History and own tokens of a prefill step, as its queries see them.

        Parameters
        ----------
        expected : mapping of str to numpy.ndarray
            The step's metadata as they should be.
        columns : mapping of str to numpy.ndarray
            The table as it should be, by column.
        """
        tickets = expected["tickets"].astype(np.int64)
        rows, window = len(tickets), self._geometry.window
        live = tickets[:, 3] > 0
        state, generation, q_start, _ = tickets[live].T
        history = np.zeros((rows, window, WIDTH), np.int16)
        entries, _ = self._dense.windows(state, generation, columns["swa_valid_start"][state], q_start)
        history[live] = dequantised(entries)
        places = np.flatnonzero(expected["token_row"] >= 0)
        token = tickets[expected["token_row"][places]]
        own = self._dense.entries(token[:, 0], token[:, 1], expected["positions"][places], np.zeros(len(places), bool))
        seen = self._seen(rows, len(expected["token_row"])).cpu().view(torch.int16).numpy()
        self.entries += rows * window + len(places)
        actual = {"history": seen[: rows * window].reshape(history.shape), "own tokens": seen[rows * window + places]}
        return actual, {"history": history, "own tokens": dequantised(own)}

    def decode(
        self,
        kv_swa_index: np.ndarray,
        expected: Mapping[str, np.ndarray],
        num_kept: np.ndarray,
        columns: Mapping[str, np.ndarray],
    ) -> tuple[Arrays, Arrays]:
        """Entries that the queries of a decode step gather, rejected drafts among them; parameters as above.

        Parameters
        ----------
        kv_swa_index : numpy.ndarray
            int32 [T, W], as the step got it.
        num_kept : numpy.ndarray
            int32 [B].
        """
        tickets, window = expected["tickets"].astype(np.int64), self._geometry.window
        places = np.flatnonzero(expected["token_row"] >= 0)
        row, position = expected["token_row"][places], expected["positions"][places]
        state, generation, q_start, _ = tickets.T
        live = tickets[:, 3] > 0
        starts = columns["swa_valid_start"][state]
        # dense [B, W + Q]: the positions q_start - W … q_start + Q - 1 of each row
        span = window + self._geometry.tokens_per_step
        dense = np.zeros((len(tickets), span, ENTRY_BYTES), np.uint8)
        dense[live, :window] = self._dense.windows(state[live], generation[live], starts[live], q_start[live])[0]
        j = position - q_start[row]
        dense[row, window + j] = self._dense.entries(state[row], generation[row], position, j >= num_kept[row])

        first = np.maximum(position - window + 1, starts[row])  # oldest visible position of each token
        visible = first[:, None] + np.arange(window) <= position[:, None]
        token, k = np.nonzero(visible)
        rows_of_dense = row[token] * span + first[token] + k - q_start[row[token]] + window
        wanted = _words(dense).reshape(-1, ENTRY_WORDS).take(rows_of_dense, axis=0)
        slots = self._ring.layer.flatten(0, 2)
        index = torch.from_numpy(kv_swa_index[places][visible]).long().clamp(0, len(slots) - 1)  # others differ anyway
        gathered = slots.index_select(0, index.to(slots.device)).cpu().numpy()
        self.entries += len(token)
        return {"rows gathered through kv_swa_index": _words(gathered)}, {"rows gathered through kv_swa_index": wanted}

    def windows(self, columns: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
        """Entries of each live state's window, where the ring must hold them."""
        state = np.flatnonzero(columns["phase"] == Phase.LIVE)
        generation, start, end = (
            columns[name][state].astype(np.int64) for name in ("generation", "swa_valid_start", "q_start")
        )
        expected, positions = self._dense.windows(state, generation, start, end)
        layer = self._ring.layer
        slots = torch.from_numpy(state[:, None] * self._geometry.ring + positions % self._geometry.ring)
        held = layer.flatten(0, 2).index_select(0, slots.flatten().to(layer.device)).cpu().numpy()
        held = held.reshape(expected.shape)
        held[positions < 0] = 0
        self.entries += int((positions >= 0).sum())
        return {"ring": _words(held)}, {"ring": _words(expected)}

    def _seen(self, rows: int, tokens: int) -> torch.Tensor:
        """What the queries of a step of so many rows and token places see."""
        return self._ring.buffer[: rows * self._geometry.window + tokens]


def _words(entries: np.ndarray) -> np.ndarray:
    """Entries uint8 [..., 528] as uint64 [..., 66]."""
    return entries.view(np.uint64)
