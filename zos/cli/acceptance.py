"""The acceptance model of a replay: which drafts are accepted, decided by a hash and so alike on host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zos.metadata import DecodeMetadata

# splitmix64's finaliser; the multipliers as int64, whose products wrap in torch and in NumPy alike
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
WORD = 2**64
HALF = 2**63
CHANCE_BITS = 53  # of a hash that are held against the probability: as many as a double has


class AcceptanceModel:
    """Accepts each draft with a probability, up to the first rejection; the bonus token is always kept.

    Draft j (from 1) of a step is accepted iff hash(seed, state_id, generation, q_start, j) falls below the probability: no
    random state, so the host predicts what the device keeps, and a replayed graph draws anew at every position.

    Parameters
    ----------
    probability : float
        Chance of each draft, 0 … 1.
    seed : int
        Any whole number.
    draft_tokens : int
        Most drafts of a row.
    device : torch.device or str
        Where `step` runs.

    Examples
    --------
    >>> model = AcceptanceModel(1.0, seed=0, draft_tokens=5)
    >>> model.num_kept(np.array([[3, 1, 1000, 6], [-1, 0, 0, 0]])).tolist()
    [6, 0]
    """

    def __init__(self, probability: float, seed: int, draft_tokens: int, device: torch.device | str = "cpu") -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"probability={probability} is outside 0 … 1")
        self._seed = (seed * GOLDEN_GAMMA + HALF) % WORD - HALF  # as int64
        self._below = round(probability * 2**CHANCE_BITS)
        self._drafts = np.arange(1, draft_tokens + 1)
        self._drafts_on_device = torch.arange(1, draft_tokens + 1, device=device)

    def step(self, metadata: DecodeMetadata) -> torch.Tensor:
        """num_kept (int32 [B]) of a prepared batch, on the device; may be captured."""
        kept: torch.Tensor = self._kept(metadata.tickets.long(), self._drafts_on_device)
        return kept.to(torch.int32)

    def num_kept(self, tickets: np.ndarray) -> np.ndarray:
        """Predict `step` on the host.

        Parameters
        ----------
        tickets : numpy.ndarray
            Whole numbers [B, 4]: (state_id, generation, q_start, seqlen_q).

        Returns
        -------
        numpy.ndarray
            int32 [B]: 1 + the drafts accepted before the first rejection, 0 on padding rows.
        """
        kept: np.ndarray = self._kept(tickets.astype(np.int64), self._drafts)
        return kept.astype(np.int32)

    def _kept(self, tickets: Any, drafts: Any) -> Any:
        """num_kept by tickets int64 [B, 4] and draft numbers [D]: torch tensors, or NumPy arrays."""
        sequence = mixed(self._seed ^ (tickets[:, 0] << 32) ^ tickets[:, 1])
        hashed = mixed(mixed(sequence ^ tickets[:, 2])[:, None] ^ drafts[None, :])
        accepted = shifted(hashed, 64 - CHANCE_BITS) < self._below
        asked = tickets[:, 3]
        leading = (accepted & (drafts[None, :] < asked[:, None])).cumprod(1).sum(1)
        return leading + (asked > 0)


def mixed(bits: Any) -> Any:
    """Hash each int64."""
    bits = (bits ^ shifted(bits, 30)) * MULTIPLIER_1
    bits = (bits ^ shifted(bits, 27)) * MULTIPLIER_2
    return bits ^ shifted(bits, 31)


def shifted(bits: Any, places: int) -> Any:
    """Shift right without a sign: int64 alone would fill in copies of it."""
    return (bits >> places) & (2 ** (64 - places) - 1)
