"""swa_decode_attention in Numba: what device_kernels/decode_attention.cu computes, with fp64 sums."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from host_fallback.ring_load import dequantise


@njit(cache=True, error_model="numpy")
def _attend(q, keys, sink, scale, out, lse):
    """Attention of the heads of one token, q fp32 [H, D], over keys fp32 [K, D]; `sink` fp32 [H] or [0]."""
    heads, width = q.shape
    scores = np.empty(keys.shape[0])
    for head in range(heads):
        for k in range(keys.shape[0]):
            score = 0.0
            for i in range(width):
                score += np.float64(q[head, i]) * np.float64(keys[k, i])
            scores[k] = score * scale
        largest = scores.max()
        total, values = 0.0, np.zeros(width)
        for k in range(keys.shape[0]):
            weight = math.exp(scores[k] - largest)
            total += weight
            for i in range(width):
                values[i] += weight * np.float64(keys[k, i])
        lse[head] = math.log(total) + largest
        if sink.shape[0]:
            total += math.exp(sink[head] - largest)
        for i in range(width):
            out[head, i] = values[i] / total


def swa_decode_attention(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    tokens_per_step: int,  # how tokens share a block is the device's affair
) -> None:
    """Attend on checked CPU arguments; shapes and meaning are documented at `zos.ops`."""
    ring = swa_cache.shape[-3]
    queries, cache = q.float().numpy(), swa_cache.numpy()[:, :, 0]
    sinks = np.empty(0, np.float32) if sink is None else sink.numpy()
    values, sums = np.zeros(q.shape, np.float32), np.full(q.shape[:2], -np.inf, np.float32)
    for token, length in enumerate(swa_len.tolist()):
        slots = kv_swa_index[token, : max(length, 0)].numpy()
        slots = slots[slots >= 0]
        if len(slots) == 0:
            continue
        states = slots // ring
        if states[0] >= len(cache) or (states != states[0]).any():
            values[token], sums[token] = np.nan, np.nan  # nonsense gives what nobody takes for a result
            continue
        keys = dequantise(cache[states[0], slots % ring])
        _attend(queries[token], keys, sinks, softmax_scale, values[token], sums[token])
    out.copy_(torch.from_numpy(values))
    lse.copy_(torch.from_numpy(sums))
