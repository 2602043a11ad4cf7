"""V4Model: embedding, layers, head, with seeded random weights."""

from __future__ import annotations

import torch
from torch import nn

from zos.metadata import StepMetadata
from zos.v4.config import V4Config
from zos.v4.layers import Layer, RMSNorm, linear
from zos.v4.state import V4State
from zos.v4.step import Step

NORM_SPREAD = 0.1  # of the norms' weights around 1, so that one left out shows
QUERY_GAIN = 1.5  # scores so sharp that what a sequence attends to decides its next token, not its last token alone


class V4Model(nn.Module):
    """A V4.1-shaped decoder.

    Parameters
    ----------
    config : V4Config
        Sizes and type.
    device : torch.device or str
        Where the weights live.
    seed : int
        Of the weights.

    Examples
    --------
    >>> model = V4Model(V4Config.tiny())
    >>> model.logits(torch.zeros(3, 64, dtype=torch.float64)).shape
    torch.Size([3, 256])
    """

    def __init__(self, config: V4Config, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.embedding = nn.Embedding(config.vocabulary, config.dim, dtype=config.dtype)
            self.layers = nn.ModuleList(Layer(number, config) for number in range(config.layers))
            self.norm = RMSNorm(config.dim, config)
            self.head = linear(config.dim, config.vocabulary, config)
        randomise(self, torch.Generator(device).manual_seed(seed))

    def forward(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        """Final hidden states [n, dim] of those tokens that the step's consumers take, of int64 [T]. May be captured."""
        x = self.embedding(input_ids).to(self.config.state_dtype)  # the residual stream is not rounded between layers
        producers = self.config.producers
        for layer in self.layers[:producers]:
            x = layer(x, step)
        step = step.consumers
        x = step.selected(x)
        for layer in self.layers[producers:]:
            x = layer(x, step)
        normed: torch.Tensor = self.norm(x)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., vocabulary] of final hidden states [..., dim]."""
        scores: torch.Tensor = self.head(hidden)
        return scores


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights; projections keep the variance of what they get, but for queries."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        parameter.normal_(generator=generator)
        owner = name.split(".")[-2:][0]
        if owner.endswith("norm"):
            parameter.mul_(NORM_SPREAD).add_(1)
        elif owner.endswith("proj") or owner == "head":
            parameter.mul_((QUERY_GAIN if owner == "q_b_proj" else 1) * parameter.shape[1] ** -0.5)


def input_ids(metadata: StepMetadata, state: V4State, prompt_end: torch.Tensor) -> torch.Tensor:
    """Input ids int64 [T] of a prefill step: the prompt's below prompt_end (int32 [capacity]), the table's for rows that decode."""
    state_id = metadata.token_state_id.long().clamp(min=0)
    prompt = state.prompts[state_id, metadata.positions.clamp(max=state.prompts.shape[1] - 1)]
    carried = torch.zeros_like(prompt) if metadata.input_ids is None else metadata.input_ids
    return torch.where(metadata.positions < prompt_end[state_id], prompt, carried)
