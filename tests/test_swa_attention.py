"""Test that window attention over rings, over pivots and merged from parts is what a softmax over the visible vectors says.

That the metadata name the right vectors is test_attention.py's matter; here indices and pivots are any.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zos
from zos.attention import attend, dequantise, merge, swa_decode_attention, swa_prefill_attention
from zos.cli.dense_ring import dequantised, quantised

ENTRY = zos.EntryFormat.mxfp8()
LATENT, SCALE = ENTRY.values, 0.05
HEADS, WINDOW = 3, 40
NAN_BYTE = 0xFF
TOLERANCE = {  # of values around 1
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}
DTYPES = list(TOLERANCE)


def softmax_over(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One token's attention in float64: q [H, D], keys [n, D] -> out [H, D], lse [H] without the sink."""
    scores = q.double() @ keys.double().T * SCALE
    sinks = torch.full((len(q), 1), -torch.inf).double() if sink is None else sink.double()[:, None]
    weights = torch.exp(scores)
    total = weights.sum(1, keepdim=True) + torch.exp(sinks.to(q.device))
    return (weights / total.clamp(min=1e-300)) @ keys.double(), torch.log(weights.sum(1))


def entries(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, torch.Tensor]:
    """Random entries uint8 [rows, 528], and their values float32 [rows, 512], which bf16 holds exactly."""
    stored = quantised(
        rng.standard_normal((rows, LATENT), np.float32) * rng.choice([0.0, 2.0**-100, 0.25, 1.0], (rows, 1))
    )
    return stored, torch.from_numpy(dequantised(stored)).view(torch.bfloat16).float()


def queries(tokens: int, dtype: torch.dtype, rng: np.random.Generator, device: str) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((tokens, HEADS, LATENT))).to(device, dtype)


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("states", [2, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(device: str, dtype: torch.dtype, states: int, sinks: bool, seed: int) -> None:
    """Strided states, gaps and stale slots behind swa_len, entries of NaN that nobody names, tokens without keys."""
    rng = np.random.default_rng(seed)
    slots, tokens = 17, 9
    stored, values = entries(states * slots, rng)
    index = rng.integers(0, states * slots, (tokens, WINDOW))
    index[rng.random(index.shape) < 0.2] = -1
    length = rng.integers(1, WINDOW + 1, tokens)
    length[0], index[1] = 0, -1
    named = [row[:n][row[:n] >= 0] for row, n in zip(index, length, strict=True)]
    unnamed = np.setdiff1d(np.arange(states * slots), np.concatenate(named))
    stored[unnamed] = NAN_BYTE
    slab = torch.full((states, slots * ENTRY.entry_bytes + 64), NAN_BYTE, dtype=torch.uint8, device=device)
    ring = slab[:, 32:-32].unflatten(1, (slots, 1, ENTRY.entry_bytes))
    ring.copy_(torch.from_numpy(stored).view(ring.shape))
    q, sink = queries(tokens, dtype, rng, device), torch.randn(HEADS, device=device) if sinks else None
    out, lse = swa_decode_attention(
        q, ring, torch.from_numpy(index.astype(np.int32)).to(device), torch.from_numpy(length.astype(np.int32)).to(device),
        SCALE, sink,
    )  # fmt: skip
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for token, rows in enumerate(named):
        expected, expected_lse = softmax_over(q[token], values[rows].to(device), sink)
        torch.testing.assert_close(out[token], expected.to(dtype), **TOLERANCE[dtype])
        torch.testing.assert_close(lse[token], expected_lse.to(lse.dtype), rtol=1e-5, atol=1e-5)
    assert not out[:2].any() and (lse[:2] == -torch.inf).all()


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(device: str, dtype: torch.dtype, sinks: bool, seed: int) -> None:
    """Keys in both sections, in one of them, in none; more queries than a block; rows that nobody names are NaN."""
    rng = np.random.default_rng(seed)
    tokens, rows = 150, 2 * WINDOW
    values = torch.from_numpy(rng.standard_normal((rows + tokens, LATENT), np.float32))
    first_length = rng.integers(0, WINDOW + 1, tokens)
    second_length = rng.integers(0, WINDOW + 1 - first_length)
    first_length[5] = second_length[5] = 0
    first, second = rng.integers(0, rows + 1 - first_length), rows + rng.integers(0, tokens + 1 - second_length)
    named = [np.r_[a : a + n, b : b + m] for a, n, b, m in zip(first, first_length, second, second_length, strict=True)]
    values[np.setdiff1d(np.arange(rows + tokens), np.concatenate(named))] = torch.nan
    values = values.bfloat16().float().to(device)
    pivots = torch.from_numpy(np.stack([first, first_length, second, second_length], 1).astype(np.int32)).to(device)
    q, sink = queries(tokens, dtype, rng, device), torch.randn(HEADS, device=device) if sinks else None
    out, lse = swa_prefill_attention(q, values[:rows], values[rows:], pivots, WINDOW, SCALE, sink)
    for token, keys in enumerate(named):
        expected, expected_lse = softmax_over(q[token], values[keys], sink)
        torch.testing.assert_close(out[token], expected.to(dtype), **TOLERANCE[dtype])
        torch.testing.assert_close(lse[token], expected_lse.to(lse.dtype), rtol=1e-5, atol=1e-5)
    assert not out[5].any() and (lse[5] == -torch.inf).all()


@pytest.mark.parametrize("sinks", [True, False])
def test_merged_parts_are_the_whole(device: str, sinks: bool, seed: int) -> None:
    """A sink counted in both parts, or in none, or a part without keys that yields NaN, would show."""
    rng = np.random.default_rng(seed)
    tokens, keys = 8, 30
    q = queries(tokens, torch.float64, rng, device)
    values = torch.from_numpy(rng.standard_normal((tokens, keys, LATENT))).to(device)
    cut = torch.tensor([0, keys, 0, *rng.integers(0, keys + 1, tokens - 3).tolist()], device=device)[:, None]
    exists = torch.ones(tokens, keys, dtype=torch.bool, device=device)
    exists[2] = False  # no part has a key
    sink = torch.randn(HEADS, dtype=torch.float64, device=device) if sinks else None
    number = torch.arange(keys, device=device)
    parts = [attend(q, values, (exists & side)[:, None], SCALE) for side in (number < cut, number >= cut)]
    merged = merge(*parts[0], *parts[1], sink)
    for token in range(tokens):
        expected, _ = softmax_over(q[token], values[token][exists[token]], sink)
        torch.testing.assert_close(merged[token], expected, **TOLERANCE[torch.float64])


def test_dequantise_every_byte(device: str) -> None:
    """Each e4m3 byte under each scale byte, the subnormal 2^-127 and NaN among them, is what float64 says it is."""
    elements = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)
    blocks = elements.view(8, ENTRY.scale_block)
    row = torch.cat([blocks.flatten(), blocks.flatten()]).expand(256, LATENT)
    stored = torch.cat([row, scales[:, None].expand(256, ENTRY.scales)], 1).to(device)
    value = elements.view(torch.float8_e4m3fn).double()
    factor = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan], dtype=torch.float64)
    expected = (factor[:, None] * value).repeat(1, 2)
    assert torch.equal(dequantise(stored, torch.float64).cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    narrow = dequantise(stored, torch.float32).cpu()  # only infinite where float32 has no such number
    assert torch.equal(narrow.nan_to_num(7.0), expected.float().nan_to_num(7.0))
