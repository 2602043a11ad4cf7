"""The model's modules: norm, rotary embedding, MLA projections with the merged GEMM, compressor, MLP."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from zos.attention import merge
from zos.v4.config import LATENT, V4Config
from zos.v4.step import Step


def linear(inputs: int, outputs: int, config: V4Config) -> nn.Linear:
    """A projection of the model."""
    return nn.Linear(inputs, outputs, bias=False, dtype=config.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in the type of the sums."""

    def __init__(self, width: int, config: V4Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.dtype))
        self.eps, self.sums = config.eps, config.state_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width] of the weight's type."""
        x = x.to(self.sums)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight.to(self.sums)).to(self.weight.dtype)


class Rotary(nn.Module):
    """Rotates the last `rope_dims` dimensions by the position; dimension i of them makes a pair with i + rope_dims / 2."""

    def __init__(self, theta: float, config: V4Config) -> None:
        super().__init__()
        self.dims, self.sums = config.rope_dims, config.state_dtype
        exponent = torch.arange(0, self.dims, 2, dtype=torch.float64) / self.dims
        self.frequency: torch.Tensor
        self.register_buffer("frequency", theta**-exponent, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Rotate x [T, …, D] by positions int64 [T], or back."""
        angle = positions[:, None] * self.frequency  # float64: positions of a million keep their fraction of a turn
        angle = angle.reshape(len(x), *[1] * (x.dim() - 2), -1)
        cos, sin = torch.cos(angle).to(self.sums), torch.sin(angle).to(self.sums)
        if inverse:
            sin = -sin
        plain, first, second = x.split([x.shape[-1] - self.dims, self.dims // 2, self.dims // 2], -1)
        first, second = first.to(self.sums), second.to(self.sums)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([plain, turned.to(x.dtype)], -1)


class Compressor(nn.Module):
    """Pools every `ratio` tokens of a producer layer into one compressed entry, by a softmax over gates, value by value."""

    def __init__(self, ratio: int, config: V4Config) -> None:
        super().__init__()
        self.ratio, self.sums = ratio, config.state_dtype
        self.latent_gate_proj = linear(config.dim, 2 * LATENT, config)
        self.norm = RMSNorm(LATENT, config)
        self.rotary = Rotary(config.compress_rope_theta, config)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """What is kept of each token until its entry is complete: [T, dim] -> [T, 2 * 512] in the type of the sums."""
        kept: torch.Tensor = self.latent_gate_proj(x).to(self.sums)
        return kept

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Entries [n, 512] of tokens [n, ratio, 2 * 512], oldest first, the last at int64 [n]; rotated by the first's position."""
        latent, gate = tokens.chunk(2, -1)
        pooled = (torch.softmax(gate, 1) * latent).sum(1)
        entries: torch.Tensor = self.rotary(self.norm(pooled), positions - (self.ratio - 1))
        return entries


class Attention(nn.Module):
    """MLA of a layer: window and, where it compresses or shares, compressed entries, under one softmax."""

    def __init__(self, number: int, config: V4Config) -> None:
        super().__init__()
        self.number, self.config = number, config
        self.source = config.compressed_by(number)
        heads = config.heads
        self.q_a_kv_swa_proj = linear(config.dim, config.query_latent + LATENT, config)
        self.q_norm, self.kv_norm = RMSNorm(config.query_latent, config), RMSNorm(LATENT, config)
        self.q_b_proj = linear(config.query_latent, heads * LATENT, config)
        self.o_proj = linear(heads * LATENT, config.dim, config)
        self.rotary = Rotary(config.theta(number), config)
        self.sink = nn.Parameter(torch.zeros(heads, dtype=config.state_dtype)) if config.attention_sink else None
        self.compressor = Compressor(config.ratio(number), config) if self.source == number else None

    def window_vectors(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The sliding window's vectors [T, 512] alone."""
        vectors: torch.Tensor = self.rotary(self.kv_norm(self.q_a_kv_swa_proj(x)[..., -LATENT:]), positions)
        return vectors

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, 512] and the sliding window's vectors [T, 512], rotated, of x [T, dim]."""
        q_latent, kv_swa = self.q_a_kv_swa_proj(x).split([self.config.query_latent, LATENT], -1)
        q = self.q_b_proj(self.q_norm(q_latent)).unflatten(-1, (self.config.heads, LATENT))
        return self.rotary(q, positions), self.rotary(self.kv_norm(kv_swa), positions)

    def output(self, out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, dim] of attention's out [T, H, 512], turned back: values carry their keys' rotation."""
        projected: torch.Tensor = self.o_proj(self.rotary(out, positions, inverse=True).flatten(1))
        return projected

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, dim] -> [T, dim]; writes the layer's ring and compressed entries."""
        q, kv_swa = self.project(x, step.positions)
        if self.compressor is not None:
            step.compress(self.number, self.compressor.tokens(x), self.compressor)
        scale = self.config.softmax_scale
        if self.source is None:
            out, _ = step.attend_window(self.number, q, kv_swa, scale, self.sink)
        else:
            window = step.attend_window(self.number, q, kv_swa, scale)
            out = merge(*window, *step.attend_compressed(self.source, q, scale), self.sink)
        return self.output(out, step.positions)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, number: int, config: V4Config) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(config.dim, config), RMSNorm(config.dim, config)
        self.attention = Attention(number, config)
        self.gate_up_proj = linear(config.dim, 2 * config.mlp_dim, config)
        self.down_proj = linear(config.mlp_dim, config.dim, config)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """[T, dim] -> [T, dim]."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        down: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return down

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, dim] -> [T, dim]."""
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))
