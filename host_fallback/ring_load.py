"""swa_ring_load in Numba: the values that device_kernels/ring_load.cu writes."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from host_fallback.ring import E4M3_NAN, E8M0_NAN, SCALE_BLOCK

# dtype -> (integers of its size, bits of its NaN)
_QUIET_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


def _value_tables() -> tuple[np.ndarray, np.ndarray]:
    """fp32 value of each e4m3 byte and of each e8m0 byte."""
    byte = np.arange(256)
    magnitude, exponent, mantissa = byte & 0x7F, byte >> 3 & 0xF, byte & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    elements = np.where(byte & 0x80, -values, values).astype(np.float32)
    elements[magnitude == E4M3_NAN] = np.nan
    scales = np.full(256, np.nan, np.float32)
    scales[:E8M0_NAN] = np.ldexp(1.0, byte[:E8M0_NAN] - 127)  # byte 0 is the subnormal 2^-127
    return elements, scales


_ELEMENTS, _SCALES = _value_tables()


@njit(cache=True, error_model="numpy")
def _dequantise(entries, out, elements, scales):
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            out[row, i] = elements[entries[row, i]] * scales[entries[row, width + i // SCALE_BLOCK]]


def dequantise(entries: np.ndarray) -> np.ndarray:
    """fp32 [..., D] of entries uint8 [..., D + D / 32]."""
    blocks = entries.shape[-1] // (SCALE_BLOCK + 1)  # of so many elements and their scale
    out = np.empty((*entries.shape[:-1], blocks * SCALE_BLOCK), np.float32)
    _dequantise(entries.reshape(-1, entries.shape[-1]), out.reshape(-1, out.shape[-1]), _ELEMENTS, _SCALES)
    return out


def write_values(values: np.ndarray, out: torch.Tensor) -> None:
    """Round fp32 values to the dtype of `out`; every NaN is the quiet one with no payload, whatever torch makes of it."""
    out.copy_(torch.from_numpy(values))
    kind, bits = _QUIET_NAN[out.dtype]
    out.view(kind)[torch.from_numpy(np.isnan(values))] = bits


def swa_ring_load(swa_cache: torch.Tensor, load_plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
    """Gather, dequantise and zero-fill, on checked CPU arguments; shapes and meaning are documented at `zos.ops`."""
    (states, ring), rows = swa_cache.shape[-4:-2], load_plan.shape[0] * window
    entries = np.zeros((*out.shape[:-2], rows, swa_cache.shape[-1]), np.uint8)  # byte 0 is +0 under any scale but NaN
    cache = swa_cache.numpy()
    for row, plan in enumerate(load_plan.tolist()):
        for state, slot, to, length in plan:
            begin, end = (
                max(to, row * window),
                min(to + length, (row + 1) * window),
            )  # a segment fills rows of its own row only
            entries[..., begin : max(begin, end), :] = 0
            slot += begin - to
            first, last = max(slot, 0), min(slot + end - begin, ring)
            if 0 <= state < states and first < last:
                begin += first - slot
                entries[..., begin : begin + last - first, :] = cache[..., state, first:last, 0, :]
    write_values(dequantise(entries), out[..., :rows, :])
