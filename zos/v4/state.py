"""V4State: what the model keeps of its sequences: rings, compression state, compressed entries and prompts, by state id."""

from __future__ import annotations

import torch

from zos.cache import SwaCache
from zos.devices import resolve_device
from zos.v4.config import LATENT, V4Config


class V4State:
    """The memory of all sequences.

    One state more than `capacity` takes what padding tokens write, so that writes need no decision of the host.

    Parameters
    ----------
    config : V4Config
        Sizes.
    capacity : int
        Number of states.
    max_length : int
        Longest sequence in tokens.
    device : torch.device or str
        Where it lives.

    Attributes
    ----------
    cache : SwaCache
        Rings and compression state.
    rings : list of torch.Tensor
        By layer, draft layers last: uint8 [capacity + 1, R, 1, 528].
    unpooled : dict of int to torch.Tensor
        By compressing layer: its latest tokens, float32 or float64 [capacity + 1, C, 2 * 512], views of the cache.
    compressed : dict of int to torch.Tensor
        By compressing layer: its entries in the model's type, [capacity + 1, entries, 512].
    prompts : torch.Tensor
        int64 [capacity + 1, max_length]: prompt ids by position.
    scratch : int
        The state of padding tokens.
    """

    def __init__(self, config: V4Config, capacity: int, max_length: int, device: torch.device | str) -> None:
        device = resolve_device(device)
        states = capacity + 1
        self.scratch = capacity
        self.cache = SwaCache(config.layout(), states, device)
        self.rings = [self.cache.layer(ring) for ring in range(config.layers + config.draft_layers)]
        self.unpooled = {
            layer: self.cache.compression(place).view(config.state_dtype)
            for place, layer in enumerate(config.compressing)
        }
        longest = max_length + config.geometry.draft_tokens  # the last step's drafts may complete entries past the end
        self.compressed = {
            layer: torch.zeros(states, longest // config.ratios[layer], LATENT, dtype=config.dtype, device=device)
            for layer in config.compressing
        }
        self.prompts = torch.zeros(states, max_length, dtype=torch.int64, device=device)

    def set_prompt(self, state_id: int, ids: torch.Tensor) -> None:
        """Keep the ids int64 [n] of a state's prompt, from position 0 on."""
        self.prompts[state_id, : len(ids)] = ids
