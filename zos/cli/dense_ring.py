"""The dense model of the ring: every token's entry by its position, quantised by a rule of its own, without any ring."""

from __future__ import annotations

import numpy as np
import torch

from zos.cli.latents import BLOCK, WIDTH, Latents
from zos.entry import EntryFormat

ENTRY_BYTES = EntryFormat.mxfp8().entry_bytes
E4M3_LARGEST_MANTISSA, E4M3_LARGEST_EXPONENT = 0.875, 9  # 448 = 0.875 * 2^9
SCALE_BIAS = 127
ELEMENTS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()  # of each e4m3 byte
SCALES = np.ldexp(np.float32(1), np.arange(255) - SCALE_BIAS)  # of each e8m0 byte but the NaN's


def quantised(values: np.ndarray) -> np.ndarray:
    """uint8 [T, 528] of finite float32 [T, 512], by docs/design.md ("Entry"): frexp for the scale, torch's own float8 cast."""
    blocks = values.reshape(-1, WIDTH // BLOCK, BLOCK)
    mantissa, exponent = np.frexp(
        np.abs(blocks).max(axis=2)
    )  # amax = mantissa * 2^exponent, mantissa 0.5 … 1 or amax = 0
    scale = exponent - E4M3_LARGEST_EXPONENT + (mantissa > E4M3_LARGEST_MANTISSA)
    scale = np.where(mantissa == 0, -SCALE_BIAS, np.maximum(scale, -SCALE_BIAS))
    scaled = blocks * np.ldexp(np.float32(1), -scale)[:, :, None]
    elements = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1, WIDTH)
    return np.concatenate([elements, (scale + SCALE_BIAS).astype(np.uint8)], axis=1)


def dequantised(entries: np.ndarray) -> np.ndarray:
    """Bits of bf16 as int16 [..., 512] of finite entries uint8 [..., 528]."""
    elements = np.take(ELEMENTS, entries[..., :WIDTH]).reshape(*entries.shape[:-1], -1, BLOCK)
    values = elements * np.take(SCALES, entries[..., WIDTH:])[..., None]
    bits: np.ndarray = torch.from_numpy(values).flatten(-2).to(torch.bfloat16).view(torch.int16).numpy()
    return bits


class RestoredPrefixes:
    """Who wrote what a restored state's ring holds below its boundary: the sequence whose state was stored.

    Parameters
    ----------
    capacity : int
        Number of states.
    """

    def __init__(self, capacity: int) -> None:
        # int64 [capacity, 4]: generation of the restored sequence, its boundary, state and generation of the one stored
        self._rows = np.zeros((capacity, 4), np.int64)

    def add(self, state_id: int, generation: int, boundary: int, writer: int, writer_generation: int) -> None:
        """A state of this generation was restored at a boundary."""
        self._rows[state_id] = generation, boundary, writer, writer_generation

    def writers(
        self, state_id: np.ndarray, generation: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """State and generation int64 [T] that wrote tokens int64 [T], int64 [T], int64 [T]; of a window, not of all before it."""
        life, boundary, writer, writer_generation = self._rows[state_id].T
        restored = (life == generation) & (position < boundary)
        return np.where(restored, writer, state_id), np.where(restored, writer_generation, generation)


class DenseRing:
    """The last positions of every sequence, made from (state_id, generation, position) when first asked for.

    Parameters
    ----------
    capacity : int
        Number of states.
    window : int
        Most positions asked for at once.

    Attributes
    ----------
    restored : RestoredPrefixes
        Which states hold what others wrote.
    """

    def __init__(self, capacity: int, window: int) -> None:
        self._window = window
        self.restored = RestoredPrefixes(capacity)
        self._latents = Latents()
        # by place, which is state_id * window + position % window
        self._entries = np.zeros((capacity * window, ENTRY_BYTES), np.uint8)
        self._held = np.full((capacity * window, 2), -1, np.int64)  # (generation, position)

    def entries(
        self, state_id: np.ndarray, generation: np.ndarray, position: np.ndarray, rejected: np.ndarray
    ) -> np.ndarray:
        """uint8 [T, 528] of tokens int64 [T], int64 [T], int64 [T], bool [T], made anew."""
        return quantised(self._latents.on_host(state_id, generation, position, rejected))

    def windows(
        self, state_id: np.ndarray, generation: np.ndarray, start: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Kept entries of the positions end - W … end - 1 of rows int64 [N], oldest first.

        Returns
        -------
        tuple of numpy.ndarray
            uint8 [N, W, 528], zeros where a position is below `start`, and the positions int64 [N, W], -1 there.
        """
        position = end[:, None] - self._window + np.arange(self._window)
        position[position < start[:, None]] = -1
        place = state_id[:, None] * self._window + position % self._window
        wanted = np.stack(np.broadcast_arrays(generation[:, None], position), axis=2)
        new = (position >= 0) & (self._held[place] != wanted).any(axis=2)
        if new.any():
            state, where = np.broadcast_to(state_id[:, None], new.shape)[new], place[new]
            state, writer_generation = self.restored.writers(state, wanted[new][:, 0], position[new])
            self._entries[where] = self.entries(state, writer_generation, position[new], np.zeros(len(where), bool))
            self._held[where] = wanted[new]
        found = self._entries.take(place, axis=0)
        found[position < 0] = 0
        return found, position
