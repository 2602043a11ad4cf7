"""Speculative decoding on the device: greedy verification of drafts, and the step of a loop that does it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zos.metadata import DecodeMetadata
from zos.service import MetadataService
from zos.steps import StepResult
from zos.v4.model import V4Model
from zos.v4.state import V4State
from zos.v4.step import DecodeStep


class Verified(NamedTuple):
    """What a step's verification found; row by row, on the device."""

    metadata: DecodeMetadata
    num_kept: (
        torch.Tensor
    )  # int32 [B]: tokens kept, the bonus token of the step before included; 0 for a row without tokens
    bonus: torch.Tensor  # int64 [B]: the target's token after those kept: first of the next step
    places: torch.Tensor  # int64 [B, Q]: token places of the row's tokens; past its seqlen_q any
    hidden: torch.Tensor  # [B, Q, dim]: the target's final hidden states of the step's tokens


class Drafter:
    """What guesses the tokens after the bonus token; this one guesses none."""

    def observe(self, positions: torch.Tensor, write_slot: torch.Tensor, hidden: torch.Tensor) -> None:
        """See tokens of prompts: positions int64 [T], where their ring entries go int64 [T], and final hidden states [T, dim]."""

    def __call__(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts int64 [B, Q - 1] and how many of them are meant, int [B]; capturable."""
        drafts = verified.metadata.positions.new_zeros(verified.hidden.shape[0], verified.hidden.shape[1] - 1)
        return drafts, torch.zeros_like(verified.num_kept)


def verify(ids: torch.Tensor, targets: torch.Tensor, seqlens_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy verification.

    Parameters
    ----------
    ids : torch.Tensor
        int64 [B, Q]: tokens of the step; the first is known, the rest are drafts.
    targets : torch.Tensor
        int64 [B, Q]: the target's most likely token after each.
    seqlens_q : torch.Tensor
        int32 [B]: tokens that each row has.

    Returns
    -------
    num_kept, bonus : torch.Tensor
        int32 [B]: 1 + leading drafts that are what the target says, 0 for a row without tokens; int64 [B]: the target's token after
        those.

    Examples
    --------
    >>> ids, targets = torch.tensor([[5, 7, 8]]), torch.tensor([[7, 9, 2]])
    >>> verify(ids, targets, torch.tensor([3], dtype=torch.int32))
    (tensor([2], dtype=torch.int32), tensor([9]))
    """
    draft = torch.arange(1, ids.shape[1], device=ids.device)
    right = (ids[:, 1:] == targets[:, :-1]) & (draft < seqlens_q[:, None])
    num_kept = torch.where(seqlens_q > 0, 1 + right.int().cumprod(1).sum(1), 0)
    bonus = targets.gather(1, (num_kept - 1).clamp(min=0)[:, None]).squeeze(1)
    return num_kept.int(), bonus


class SpeculativeStep:
    """The `step` of a zos.DecodeLoop: target, verification, drafts. May be captured.

    Parameters
    ----------
    model : V4Model
        The target.
    state : V4State
        What its sequences have.
    service : MetadataService
        Its table gets the next step's lengths; it must carry tokens.
    drafter : callable, optional
        Default: no drafts.
    """

    def __init__(
        self, model: V4Model, state: V4State, service: MetadataService, drafter: Drafter | None = None
    ) -> None:
        if service.table.token_ids is None:
            raise ValueError("the service carries no tokens (carry_tokens=False)")
        self._model, self._state, self._table = model, state, service.table
        self._drafter = drafter or Drafter()

    def __call__(self, metadata: DecodeMetadata) -> StepResult:
        """Run a step; kept_tokens are the ids of the tokens kept, by which position q_start + j has kept_tokens[j]."""
        assert metadata.input_ids is not None
        step = DecodeStep(self._model.config, self._state, metadata)
        hidden = self._model(metadata.input_ids, step)[step.places]
        ids = metadata.input_ids[step.places]
        num_kept, bonus = verify(ids, self._model.logits(hidden).argmax(-1), metadata.seqlens_q)
        drafts, lengths = self._drafter(Verified(metadata, num_kept, bonus, step.places, hidden))
        self._set_lengths(metadata, 1 + lengths)
        return StepResult(num_kept, None, torch.cat([bonus[:, None], drafts], 1), ids)

    def _set_lengths(self, metadata: DecodeMetadata, seqlens_q: torch.Tensor) -> None:
        """Write the next step's lengths of the rows that had tokens.

        Padding rows add nothing to some state's length: a plain write of what it has could undo the write of its own row.
        """
        state_id = metadata.state_ids.long().clamp(min=0)
        change = torch.where(metadata.seqlens_q > 0, seqlens_q - metadata.seqlens_q, 0)
        self._table.seqlen_q.index_add_(0, state_id, change.to(torch.int32))
