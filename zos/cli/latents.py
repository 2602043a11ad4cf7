"""Synthetic latents: a vector for each written token, made by a hash and so alike on host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zos.cli.acceptance import mixed
from zos.entry import EntryFormat

WIDTH = EntryFormat.mxfp8().fp8_values
BLOCK = EntryFormat.mxfp8().scale_block
WORD_BITS = 32
VALUE_BITS = 9  # of a value before its block's magnitude: -256 … 255, which bf16 holds exactly
MAGNITUDE_BITS = 4
# What a block's values are multiplied by: zero, subnormals of bf16 and of the scales, the usual, the very large. All products are
# exact in bf16, so that host and device cannot round differently.
MAGNITUDES = (0.0, *(2.0**e for e in (-133, -126, -60, -16, -8, -4, -2, -1, 0, 1, 3, 5, 9, 30, 110)))


class Latents:
    """bf16 vectors of 512 values, told by (state_id, generation, position, rejected).

    Parameters
    ----------
    device : torch.device or str
        Where `on_device` runs.

    Examples
    --------
    >>> Latents().on_host(np.array([3]), np.array([1]), np.array([1000]), np.array([False])).shape
    (1, 512)
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # An odd int32 factor for each value and each block; the high bits of a product depend on all bits of the token's hash.
        self._factors = (mixed(np.arange(1, WIDTH + WIDTH // BLOCK + 1)) >> WORD_BITS).astype(np.int32) | 1
        self._factors_on_device = torch.from_numpy(self._factors).to(device)
        self._magnitudes = np.array(MAGNITUDES, np.float32)
        self._magnitudes_on_device = torch.from_numpy(self._magnitudes).to(device)

    def on_device(
        self, state_id: torch.Tensor, generation: torch.Tensor, position: torch.Tensor, rejected: torch.Tensor
    ) -> torch.Tensor:
        """bf16 [T, 512] of tokens int64 [T], int64 [T], int64 [T], bool [T]; may be captured."""
        token = _hashed(state_id, generation, position, rejected.long()).to(torch.int32)
        values, blocks = _drawn(token, self._factors_on_device)
        scaled: torch.Tensor = (
            values.float().view(-1, WIDTH // BLOCK, BLOCK) * self._magnitudes_on_device[blocks.long()][:, :, None]
        )
        return scaled.view(-1, WIDTH).to(torch.bfloat16)

    def on_host(
        self, state_id: np.ndarray, generation: np.ndarray, position: np.ndarray, rejected: np.ndarray
    ) -> np.ndarray:
        """float32 [T, 512], the same numbers, of tokens int64 [T], int64 [T], int64 [T], bool [T]."""
        token = _hashed(state_id, generation, position, rejected.astype(np.int64)).astype(np.int32)
        values, blocks = _drawn(token, self._factors)
        scaled: np.ndarray = (
            values.astype(np.float32).reshape(-1, WIDTH // BLOCK, BLOCK) * self._magnitudes[blocks][:, :, None]
        )
        return scaled.reshape(-1, WIDTH)


def _hashed(state_id: Any, generation: Any, position: Any, rejected: Any) -> Any:
    """int64 [T] with the range of an int32."""
    return mixed(mixed(state_id << 32 ^ generation) ^ (position << 1 | rejected)) >> WORD_BITS


def _drawn(token: Any, factors: Any) -> tuple[Any, Any]:
    """Values [T, 512] and magnitude numbers [T, 16] of hashes int32 [T]; products wrap in torch and in NumPy alike."""
    values = token[:, None] * factors[:WIDTH] >> WORD_BITS - VALUE_BITS  # signed
    blocks = token[:, None] * factors[WIDTH:] >> WORD_BITS - MAGNITUDE_BITS
    return values, blocks + 2 ** (MAGNITUDE_BITS - 1)
