"""The dense twin: the same weights over one whole sequence, by masks alone: no rings, no metadata, no drafts, no graphs.

It shares no arithmetic with the model: norms, rotation, pooling, quantiser and attention are written anew, from the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from zos.v4.config import LATENT, V4Config
from zos.v4.drafter import DraftModel
from zos.v4.layers import Attention, Compressor, Layer, RMSNorm
from zos.v4.model import V4Model

BLOCK, SMALLEST_EXPONENT = 32, -127
LARGEST_MANTISSA, LARGEST_EXPONENT = 0.875, 9  # e4m3 reaches 448 = 0.875 * 2^9
QUERY_BLOCK = 256


@dataclass(frozen=True)
class Visibility:
    """What a run sees of a sequence, where that is less than all of it.

    Attributes
    ----------
    first : int
        First position that is computed.
    producer_start, consumer_start : int
        Positions below are in no window of the layers of that half.
    cached : dict of int to torch.Tensor, optional
        By compressing layer: entries [n, 512] that exist from the start, those of tokens below first + window at least.
    """

    first: int = 0
    producer_start: int = 0
    consumer_start: int = 0
    cached: dict[int, torch.Tensor] | None = None


@dataclass(frozen=True)
class DenseRun:
    """What a dense run found, from position `first` on."""

    logits: torch.Tensor  # [n, vocabulary]
    hidden: torch.Tensor  # [n, dim]: final, normed
    compressed: dict[int, torch.Tensor]  # by compressing layer: [entries from position 0 on, 512]


def dense_forward(model: V4Model, ids: torch.Tensor, visibility: Visibility | None = None) -> DenseRun:
    """Run the model over ids int64 [n] of positions 0 … n - 1, of which those below visibility.first are not computed."""
    visibility = visibility or Visibility()
    config = model.config
    positions = torch.arange(visibility.first, len(ids), device=ids.device)
    x = model.embedding.weight[ids[visibility.first :]].to(config.state_dtype)
    compressed: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        attention, normed = layer.attention, _norm(x, layer.attention_norm)
        if attention.compressor is not None:
            cached = None if visibility.cached is None else visibility.cached[number]
            compressed[number] = _compressed(normed, positions, attention.compressor, config, cached)
        source = config.compressed_by(number)
        start = visibility.producer_start if number < config.producers else visibility.consumer_start
        entries, ratio = (None, 0) if source is None else (compressed[source], config.ratios[source])
        x = x + _attention(normed, positions, attention, start, entries, ratio)
        x = x + _mlp(x, layer)
    hidden = _norm(x, model.norm)
    return DenseRun(hidden @ model.head.weight.T, hidden, compressed)


def dense_drafts(
    model: V4Model, draft_model: DraftModel, ids: torch.Tensor, bonus: int, hidden: torch.Tensor
) -> torch.Tensor:
    """The draft model's tokens int64 [Q - 1] after tokens int64 [n] with final hidden states [n, dim], and a bonus token."""
    config = model.config
    width, n = config.geometry.tokens_per_step, len(ids)
    positions = torch.arange(max(0, n - config.geometry.window), n + width, device=ids.device)
    context = hidden[positions[:-width]] @ draft_model.context_proj.weight.T
    x = draft_model.mask_embedding.expand(width, -1).to(config.state_dtype).clone()
    x[0] = model.embedding.weight[bonus]
    for layer in draft_model.layers:
        assert isinstance(layer, Layer)
        tokens = torch.cat([_norm(context, layer.attention_norm), _norm(x, layer.attention_norm)])
        x = x + _attention(tokens, positions, layer.attention, 0, None, 0, block=width)[-width:]
        x = x + _mlp(x, layer)
    return (_norm(x, draft_model.norm) @ model.head.weight.T).argmax(-1)[1:]


def mxfp8_round_trip(x: torch.Tensor) -> torch.Tensor:
    """What a reader finds of finite vectors [n, 512], in float32: blocks of 32, scaled by powers of two, rounded to e4m3."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))  # the largest is mantissa * 2^exponent
    exponent = exponent - LARGEST_EXPONENT + (mantissa > LARGEST_MANTISSA)
    scale = torch.exp2(exponent.clamp(min=SMALLEST_EXPONENT).double())
    values: torch.Tensor = ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2).float()
    return values


def _attention(
    x: torch.Tensor,
    positions: torch.Tensor,
    layer: Attention,
    start: int,
    entries: torch.Tensor | None,
    ratio: int,
    block: int = 0,
) -> torch.Tensor:
    """Attention of a layer, [n, dim] -> [n, dim]: a mask over the window's keys and the compressed entries, one softmax.

    The last `block` tokens see all tokens.
    """
    config, sums = layer.config, layer.config.state_dtype
    latent, kv = (x @ layer.q_a_kv_swa_proj.weight.T).split([config.query_latent, LATENT], -1)
    q = (_norm(latent, layer.q_norm) @ layer.q_b_proj.weight.T).unflatten(-1, (config.heads, LATENT))
    theta = config.rope_theta if config.ratio(layer.number) == 0 else config.compress_rope_theta
    q = _rotated(q, positions[:, None], theta, config.rope_dims, 1, sums).to(sums)
    kv = _rotated(_norm(kv, layer.kv_norm), positions, theta, config.rope_dims, 1, sums)
    keys = mxfp8_round_trip(kv).to(sums)
    if entries is not None:
        keys = torch.cat([keys, entries.to(sums)])
    parts = []
    for begin in range(0, len(q), QUERY_BLOCK):
        p = positions[begin : begin + QUERY_BLOCK, None]
        mask = (positions <= p) & (positions > p - config.geometry.window) & (positions >= start)
        mask |= p > positions[-1] - block
        if entries is not None:
            last_token = (torch.arange(len(entries), device=x.device) + 1) * ratio - 1
            mask = torch.cat([mask, last_token <= p], 1)
        scores = torch.einsum("nhd,kd->nhk", q[begin : begin + QUERY_BLOCK], keys) * LATENT**-0.5
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        if layer.sink is not None:
            scores = torch.cat([scores, layer.sink.to(sums)[None, :, None].expand(len(scores), -1, 1)], 2)
        weights = torch.softmax(scores, 2)[:, :, : len(keys)].masked_fill(
            ~mask[:, None], 0
        )  # NaN of a query that sees nothing
        parts.append(weights @ keys)
    out = _rotated(torch.cat(parts).to(x.dtype), positions[:, None], theta, config.rope_dims, -1, sums)
    return out.flatten(1) @ layer.o_proj.weight.T


def _mlp(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    gate, up = (_norm(x, layer.mlp_norm) @ layer.gate_up_proj.weight.T).chunk(2, -1)
    return (functional.silu(gate) * up) @ layer.down_proj.weight.T


def _compressed(
    x: torch.Tensor, positions: torch.Tensor, layer: Compressor, config: V4Config, cached: torch.Tensor | None
) -> torch.Tensor:
    """Entries of positions 0 …: those cached, then those pooled from x [n, dim]."""
    done = 0 if cached is None else len(cached)
    begin = done * layer.ratio - int(positions[0])  # first token of the first new entry
    complete = max(0, (len(x) - begin) // layer.ratio)
    tokens = (x[begin : begin + complete * layer.ratio] @ layer.latent_gate_proj.weight.T).to(config.state_dtype)
    latent, gate = tokens.unflatten(0, (complete, layer.ratio)).split(LATENT, -1)
    weights = gate.exp() / gate.exp().sum(1, keepdim=True)
    pooled = _norm((weights * latent).sum(1), layer.norm)
    first = (done + torch.arange(complete, device=x.device)) * layer.ratio
    new = _rotated(pooled, first, config.compress_rope_theta, config.rope_dims, 1, config.state_dtype)
    return new if cached is None else torch.cat([cached, new])


def _norm(x: torch.Tensor, layer: RMSNorm) -> torch.Tensor:
    wide = x.to(layer.sums)
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight).to(layer.weight.dtype)


def _rotated(
    x: torch.Tensor, positions: torch.Tensor, theta: float, dims: int, sign: int, sums: torch.dtype
) -> torch.Tensor:
    """Turn the last dims of x [n, …, D] as complex numbers by sign * position * theta^(-2i / dims)."""
    frequency = theta ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=x.device) / dims)
    turn = torch.polar(torch.ones_like(frequency), frequency * positions[..., None].double() * sign)
    first, second = x[..., -dims:].to(sums).chunk(2, -1)
    turned = torch.complex(first, second).to(torch.complex128) * turn
    return torch.cat([x[..., :-dims], turned.real.to(x.dtype), turned.imag.to(x.dtype)], -1)
