"""Test that the block drafter drafts what a dense run of it says, whatever was kept and rejected before."""

from __future__ import annotations

import numpy as np
import torch

import zos
from tests.v4 import SMALL, KnownDrafter, generate, knowing, mixed, random_prompts, tiny_model
from zos.v4.dense import dense_drafts, dense_forward
from zos.v4.drafter import BlockDrafter, DraftModel
from zos.v4.generator import Generator
from zos.v4.speculative import Drafter, Verified
from zos.v4.state import V4State

TOKENS, PROMPTS = 30, 5


class Watched(Drafter):
    """Notes what a block drafter says, and lets another's drafts be verified, so that some are kept and some are not."""

    def __init__(self, block: BlockDrafter, other: KnownDrafter) -> None:
        self.block, self.other = block, other
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # (length after the step [B], drafts [B, Q - 1])

    def observe(self, positions: torch.Tensor, write_slot: torch.Tensor, hidden: torch.Tensor) -> None:
        """As Drafter.observe."""
        self.block.observe(positions, write_slot, hidden)

    def __call__(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """As Drafter."""
        md = verified.metadata
        length = torch.where(md.seqlens_q > 0, md.seqlens_k - md.seqlens_q + verified.num_kept, 0)
        self.seen.append((length.clone(), self.block(verified)[0].clone()))
        return self.other(verified)


def test_drafts_are_the_dense_runs(seed: int) -> None:
    """A context vector of a rejected draft, a slot of the block read before it is written, or a causal block gives other drafts."""
    rng = np.random.default_rng(seed)
    model = tiny_model("cpu", seed, SMALL, draft_layers=2)
    draft_model = DraftModel(model.config, seed=seed + 1)
    prompts = random_prompts(PROMPTS, 40, rng)
    _, plain = generate(model, prompts, TOKENS, max_batch=PROMPTS, chunk=17)

    def make(service: zos.MetadataService, state: V4State) -> Watched:
        other = knowing(plain, mixed)(service, state)
        assert isinstance(other, KnownDrafter)
        return Watched(BlockDrafter(model, draft_model, service, state), other)

    generator = Generator(model, 40 + TOKENS, PROMPTS, 17, make_drafter=make)
    generations = [generator.submit(prompt, TOKENS) for prompt in prompts]
    generator.run()
    assert [g.generated for g in generations] == [g.generated for g in plain]
    watched, compared = generator._drafter, 0
    assert isinstance(watched, Watched)
    for state_id, generation in enumerate(generations):
        ids = torch.tensor(generation.prompt + generation.generated)
        hidden = dense_forward(model, ids).hidden
        for length, drafts in watched.seen:
            n = int(length[state_id])
            if 0 < n < len(ids):
                expected = dense_drafts(model, draft_model, ids[:n], int(ids[n]), hidden)
                assert drafts[state_id].tolist() == expected.tolist(), f"prompt {state_id} at {n}"
                compared += 1
    assert compared > PROMPTS * TOKENS / 4


def test_tokens_with_the_drafter(device: str, seed: int) -> None:
    """The block's ring writes touch no ring of the target: captured or not, tokens are those without drafts."""
    model = tiny_model(device, seed, SMALL)
    draft_model = DraftModel(model.config, device, seed + 1)
    prompts = random_prompts(PROMPTS, 40, np.random.default_rng(seed))
    _, plain = generate(model, prompts, TOKENS, max_batch=3, chunk=17)
    _, drafted = generate(
        model, prompts, TOKENS, max_batch=3, chunk=17,
        make_drafter=lambda service, state: BlockDrafter(model, draft_model, service, state),
    )  # fmt: skip
    assert [g.generated for g in drafted] == [g.generated for g in plain]
