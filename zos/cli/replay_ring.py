"""The replay's ring: a synthetic latent of every token, stored and loaded as a model's first layer would."""

from __future__ import annotations

import torch

from zos.cache import SwaCache
from zos.cli.latents import WIDTH, Latents
from zos.layout import StateSlotLayout
from zos.metadata import DecodeMetadata, PrefillMetadata, StepMetadata
from zos.service import MetadataService


class ReplayRing:
    """One layer of rings, and the part of a step that reads and writes it; all of it may be captured.

    Parameters
    ----------
    service : MetadataService
        Whose metadata say where.
    prefill_rows : int
        Most rows of a prefill batch.

    Attributes
    ----------
    cache : SwaCache
        Of that one layer.
    layer : torch.Tensor
        uint8 [capacity, ring slots, 1, entry bytes].
    buffer : torch.Tensor
        bf16 [prefill_rows * W + max_prefill_tokens, 512]: what the queries of a prefill step of B rows see: B * W rows of history,
        then the step's own tokens as a reader of the ring will see them.
    """

    def __init__(self, service: MetadataService, prefill_rows: int) -> None:
        self.cache = one_layer(service)
        self.layer = self.cache.layer(0)
        self._window = service.geometry.window
        rows = prefill_rows * self._window + service.max_prefill_tokens
        self.buffer = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=service.device)
        self._latents = Latents(service.device)

    def decode(self, metadata: DecodeMetadata, num_kept: torch.Tensor) -> None:
        """Store all tokens of a decode step; one that num_kept (int32 [B]) leaves out is a rejected draft."""
        torch.ops.zos.swa_ring_store(self._tokens(metadata, num_kept), metadata.swa_write_slot, self.layer)

    def prefill(self, metadata: PrefillMetadata) -> None:
        """Load the history, then store the chunks, which may overwrite it."""
        first = metadata.batch * self._window  # row of section 2
        torch.ops.zos.swa_ring_load(self.layer, metadata.swa_load_plan, self.buffer, self._window)
        own = self.buffer[first : first + metadata.tokens]
        tokens = self._tokens(metadata, metadata.seqlens_q)
        torch.ops.zos.swa_ring_store(tokens, metadata.swa_write_slot, self.layer, own)

    def _tokens(self, metadata: StepMetadata, num_kept: torch.Tensor) -> torch.Tensor:
        """bf16 [T, 512]: latents of a step's tokens; those of padding are never stored."""
        row = metadata.token_row.long().clamp(min=0)
        _, generation, q_start, _ = metadata.tickets.long()[row].unbind(1)
        rejected = metadata.positions - q_start >= num_kept[row]
        return self._latents.on_device(metadata.token_state_id.long(), generation, metadata.positions, rejected)


def one_layer(service: MetadataService) -> SwaCache:
    """Rings of a service's states in one layer."""
    return SwaCache(StateSlotLayout(service.geometry, stored_layers=1), service.capacity, service.device)
