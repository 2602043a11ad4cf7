"""BlockDrafter: a DFlash-style draft model that guesses all drafts of a step at once, in a block that is not causal."""

from __future__ import annotations

import torch
from torch import nn

from zos.service import MetadataService
from zos.v4.config import V4Config
from zos.v4.layers import Layer, RMSNorm, linear
from zos.v4.model import V4Model, randomise
from zos.v4.speculative import Drafter, Verified
from zos.v4.state import V4State
from zos.v4.step import BlockStep


class DraftModel(nn.Module):
    """The draft model's own weights, random; embedding and head are the target's."""

    def __init__(self, config: V4Config, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__()
        with torch.device(device):
            self.mask_embedding = nn.Parameter(torch.zeros(config.dim, dtype=config.dtype))
            self.context_proj = linear(config.dim, config.dim, config)
            self.layers = nn.ModuleList(Layer(config.layers + number, config) for number in range(config.draft_layers))
            self.norm = RMSNorm(config.dim, config)
        randomise(self, torch.Generator(device).manual_seed(seed))


class BlockDrafter(Drafter):
    """Drafts with layers whose rings hold vectors made of the target's final hidden states.

    A block's first row is the bonus token, the others are masks; each sees the window of context before the block and the whole
    block, and names the token of its own position.

    Parameters
    ----------
    target : V4Model
        Whose tokens are drafted.
    model : DraftModel
        On the same device.
    service : MetadataService
        Whose sequences it drafts for.
    state : V4State
        What those have, draft rings included.
    """

    def __init__(self, target: V4Model, model: DraftModel, service: MetadataService, state: V4State) -> None:
        self._target, self._model, self._service, self._state = target, model, service, state

    def observe(self, positions: torch.Tensor, write_slot: torch.Tensor, hidden: torch.Tensor) -> None:
        """As Drafter.observe: write the tokens' context vectors to every draft ring."""
        context = self._model.context_proj(hidden)
        for layer in self._model.layers:
            assert isinstance(layer, Layer)
            vectors = layer.attention.window_vectors(layer.attention_norm(context), positions)
            ring = self._state.rings[layer.attention.number]
            torch.ops.zos.swa_ring_store(vectors.to(self._target.config.ring_dtype), write_slot, ring)

    def __call__(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """As Drafter: all drafts of every row that had tokens."""
        md, num_kept = verified.metadata, verified.num_kept
        rows, width = verified.places.shape
        kept = torch.arange(width, device=num_kept.device) < num_kept[:, None]
        write_slot = torch.where(kept, md.swa_write_slot[verified.places], -1)
        self.observe(md.positions[verified.places].flatten(), write_slot.flatten(), verified.hidden.flatten(0, 1))
        # The block's vectors take the slots of the drafts that were rejected, so they come after the context's.
        step = BlockStep(self._target.config, self._state, self._service.view_block(md, num_kept))
        x = self._model.mask_embedding.repeat(rows, width, 1)
        x[:, 0] = self._target.embedding(verified.bonus)
        x = x.flatten(0, 1).to(self._target.config.state_dtype)
        for layer in self._model.layers:
            x = layer(x, step)
        drafts = self._target.logits(self._model.norm(x)).argmax(-1).view(rows, width)[:, 1:]
        return drafts, torch.where(num_kept > 0, width - 1, 0)
