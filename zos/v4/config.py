"""V4Config: sizes of a V4.1-shaped model, and the state slot that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch

from zos.attention import accumulation_dtype
from zos.entry import EntryFormat
from zos.geometry import CompressionRing, RingGeometry
from zos.layout import CompressionState, StateSlotLayout

LATENT = EntryFormat.mxfp8().values  # width of the vector that is key and value of all heads


@dataclass(frozen=True)
class V4Config:
    """Sizes of the model.

    The first `producers` layers store their rings and, where they compress, their compressed entries; the layers after them are
    YOCO consumers, whose rings are dropped and who read the compressed entries of the last producer with their ratio.

    Attributes
    ----------
    vocabulary, dim, heads, query_latent, mlp_dim : int
        Token ids, width of the residual stream, query heads, width of the query latent, inner width of the MLP.
    ratios : tuple of int
        Of each layer: tokens per compressed entry, 0 for a layer that sees its sliding window only.
    producers : int
        Layers of the producer half.
    rope_dims : int
        Last dimensions of queries and keys that are rotated.
    rope_theta, compress_rope_theta : float
        Base of the rotary table of layers that see their window only, and of those that compress.
    attention_sink : bool
        Whether each head has a sink.
    dtype : torch.dtype
        Of weights and activations.
    geometry : RingGeometry
        Window, draft tokens, ring.
    draft_layers : int
        Layers of the draft model.
    eps : float
        Of the norms.
    """

    vocabulary: int
    dim: int
    heads: int
    query_latent: int
    mlp_dim: int
    ratios: tuple[int, ...]
    producers: int
    rope_dims: int = 64
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    attention_sink: bool = True
    dtype: torch.dtype = torch.bfloat16
    geometry: RingGeometry = field(default_factory=RingGeometry)
    draft_layers: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Raise ValueError where a consumer finds no producer of its ratio."""
        if not 1 <= self.producers <= len(self.ratios):
            raise ValueError(f"producers={self.producers} is outside 1 … {len(self.ratios)}, the number of layers")
        for layer in range(len(self.ratios)):
            self.compressed_by(layer)

    @classmethod
    def tiny(cls, dtype: torch.dtype = torch.float64) -> V4Config:
        """Return a model for tests: every kind of layer; in float64 the shape of a batch cannot flip a byte or a token."""
        return cls(
            vocabulary=256, dim=64, heads=2, query_latent=32, mlp_dim=128, ratios=(1, 2, 2, 0), producers=2, dtype=dtype
        )

    @classmethod
    def v41_flash(cls, dtype: torch.dtype = torch.bfloat16) -> V4Config:
        """Return a model of V4.1-Flash's shape (dense MLPs stand for its experts); its state slot is that of the layout."""
        return cls(
            vocabulary=129_280, dim=4096, heads=64, query_latent=1024, mlp_dim=2048, ratios=(2,) * 40, producers=20,
            dtype=dtype,
        )  # fmt: skip

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.ratios)

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        return float(LATENT**-0.5)

    @property
    def ring_dtype(self) -> torch.dtype:
        """Type of the vectors handed to the ring, which takes no float64."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of not yet pooled tokens."""
        return accumulation_dtype(self.dtype)

    @property
    def compressing(self) -> tuple[int, ...]:
        """Producer layers that compress, in order."""
        return tuple(layer for layer in range(self.producers) if self.ratios[layer])

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry; 0 for a layer that sees its window only, as draft layers (those after the last) do."""
        return self.ratios[layer] if layer < self.layers else 0

    def compressed_by(self, layer: int) -> int | None:
        """Layer whose compressed entries a layer reads: its own, for a consumer the last producer's of its ratio; None for none."""
        ratio = self.ratio(layer)
        if not ratio:
            return None
        if layer < self.producers:
            return layer
        of_ratio = [producer for producer in range(self.producers) if self.ratios[producer] == ratio]
        if not of_ratio:
            raise ValueError(f"ratios[{layer}]={ratio}, but no producer layer compresses with that ratio")
        return of_ratio[-1]

    def theta(self, layer: int) -> float:
        """Base of a layer's rotary table."""
        return self.compress_rope_theta if self.ratio(layer) else self.rope_theta

    def compression_rings(self) -> tuple[CompressionRing, ...]:
        """Rings that the metadata must serve: one for each ratio."""
        ratios = sorted({self.ratios[layer] for layer in self.compressing})
        return tuple(CompressionRing(ratio, self.geometry.tokens_per_step) for ratio in ratios)

    def layout(self) -> StateSlotLayout:
        """Byte map of a state slot."""
        entry_bytes = 2 * LATENT * self.state_dtype.itemsize  # a latent, and a gate for each of its values
        compression = [
            CompressionState(CompressionRing(ratio, self.geometry.tokens_per_step), entry_bytes, len(list(layers)))
            for ratio, layers in groupby(self.ratios[layer] for layer in self.compressing)
        ]
        consumers = self.layers - self.producers
        return StateSlotLayout(
            self.geometry, self.producers, consumers, self.draft_layers, compression=tuple(compression)
        )
