"""swa_ring_store in Numba: the bytes that device_kernels/ring_store.cu writes."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from host_fallback.ring import E4M3_NAN, E8M0_NAN, SCALE_BLOCK, e4m3_round, e8m0_round_up
from host_fallback.ring_load import dequantise, write_values


@njit(cache=True, error_model="numpy")
def _quantise(values, entries):
    """One entry a row: float32 [T, D] -> uint8 [T, D + D / 32]."""
    width = values.shape[1]
    scaled = np.empty(SCALE_BLOCK, np.float32)
    for token in range(values.shape[0]):
        for block in range(width // SCALE_BLOCK):
            begin = block * SCALE_BLOCK
            bits = values[token, begin : begin + SCALE_BLOCK].view(np.uint32)
            amax = np.int64(0)
            for k in range(SCALE_BLOCK):
                amax = max(amax, np.int64(bits[k]) & 0x7FFFFFFF)
            scale = e8m0_round_up(amax)
            entries[token, width + block] = scale
            if scale == E8M0_NAN:
                entries[token, begin : begin + SCALE_BLOCK] = E4M3_NAN
                continue
            inverse = np.float32(2.0 ** (127 - scale))
            for k in range(SCALE_BLOCK):
                scaled[k] = values[token, begin + k] * inverse
            codes = scaled.view(np.uint32)
            for k in range(SCALE_BLOCK):
                entries[token, begin + k] = e4m3_round(np.int64(codes[k]))


def swa_ring_store(
    values: torch.Tensor, write_slot: torch.Tensor, swa_cache: torch.Tensor, cast_back: torch.Tensor | None
) -> None:
    """Quantise and write, on checked CPU arguments; shapes and meaning are documented at `zos.ops`."""
    width, (states, ring) = values.shape[-1], swa_cache.shape[-4:-2]
    entries = np.empty((*values.shape[:-1], width + width // SCALE_BLOCK), np.uint8)
    _quantise(values.detach().float().numpy().reshape(-1, width), entries.reshape(-1, entries.shape[-1]))
    slots = write_slot.numpy()
    stored = (slots >= 0) & (slots < states * ring)  # -1 would be the last row to NumPy
    state, slot = np.divmod(slots[stored], ring)
    swa_cache.numpy()[..., state, slot, 0, :] = entries[..., stored, :]
    if cast_back is not None:
        write_values(dequantise(entries), cast_back)
