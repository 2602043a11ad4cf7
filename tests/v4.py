"""What the model's tests share: drafters that know the truth, and runs that feed known tokens and return every logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

import zos
from zos.v4.config import V4Config
from zos.v4.dense import dense_forward
from zos.v4.generator import Generation, Generator
from zos.v4.model import V4Model
from zos.v4.speculative import Drafter, Verified
from zos.v4.state import V4State
from zos.v4.step import DecodeStep, PrefillStep

SMALL = zos.RingGeometry(window=12, draft_tokens=3)  # wraps often, and a step costs little
Guess = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # right drafts -> drafts, lengths


def tiny_model(device: str, seed: int, geometry: zos.RingGeometry | None = None, **changes: object) -> V4Model:
    """A tiny model, its weights and its rings' sizes as a test wants them."""
    config = V4Config.tiny()
    values = {**vars(config), "geometry": geometry or config.geometry, **changes}
    return V4Model(V4Config(**values), device, seed)


def random_prompts(number: int, longest: int, rng: np.random.Generator) -> list[list[int]]:
    """Prompts of 1 … longest byte ids, one of them of length 1 and one of `longest`."""
    lengths = [1, longest, *rng.integers(1, longest + 1, max(0, number - 2)).tolist()][:number]
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def generate(
    model: V4Model, prompts: list[list[int]], tokens: int, **options: object
) -> tuple[Generator, list[Generation]]:
    """Run a generator to its end."""
    generator = Generator(model, max(map(len, prompts)) + tokens, **options)  # type: ignore[arg-type]
    generations = [generator.submit(prompt, tokens) for prompt in prompts]
    generator.run()
    return generator, generations


def assert_dense_greedy(model: V4Model, generation: Generation) -> None:
    """Every generated token is the dense run's most likely one after what comes before it, so by induction dense greedy's."""
    assert generation.finished, f"{len(generation.generated)} of {generation.tokens} tokens"
    ids = torch.tensor(generation.prompt + generation.generated, device=model.head.weight.device)
    prompt = len(generation.prompt)
    expected = dense_forward(model, ids).logits[prompt - 1 : -1].argmax(-1)
    wrong = (expected != ids[prompt:]).nonzero().flatten().tolist()
    assert not wrong, f"prompt of {prompt}: {len(wrong)} tokens differ, the first at {wrong[0]}"


class KnownDrafter(Drafter):
    """A drafter that knows what each state's sequence becomes, and a rule of what to make of it.

    `truth` is int64 [states, positions]; `guess` gets the right drafts int64 [B, Q - 1].
    """

    def __init__(self, truth: torch.Tensor, guess: Guess) -> None:
        self.truth, self.guess = truth, guess

    def __call__(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """As zos.v4.speculative.Drafter."""
        md = verified.metadata
        bonus_position = (md.seqlens_k - md.seqlens_q + verified.num_kept).long()
        ahead = torch.arange(1, verified.hidden.shape[1], device=bonus_position.device)
        position = (bonus_position[:, None] + ahead).clamp(max=self.truth.shape[1] - 1)
        return self.guess(self.truth[md.state_ids.long().clamp(min=0)[:, None], position])


def right(drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All of them."""
    return drafts, torch.full_like(drafts[:, 0], drafts.shape[1])


def wrong(drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """None of them."""
    return right((drafts + 1) % 256)


def mixed(drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each right with a chance of three in four."""
    return right(torch.where(torch.rand(drafts.shape, device=drafts.device) < 0.75, drafts, (drafts + 1) % 256))


def of_random_lengths(drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `mixed`, and each row has a number of its own, from none to all."""
    return mixed(drafts)[0], torch.randint(0, drafts.shape[1] + 1, drafts.shape[:1], device=drafts.device)


def knowing(generations: list[Generation], guess: Guess) -> Callable[[zos.MetadataService, V4State], Drafter]:
    """`make_drafter` of a Generator whose states are those of these generations, in their order."""

    def make(service: zos.MetadataService, state: V4State) -> Drafter:
        longest = max(len(g.prompt) + len(g.generated) for g in generations)
        truth = torch.zeros(service.capacity, longest, dtype=torch.int64)
        for row, generation in zip(truth, generations, strict=False):
            ids = generation.prompt + generation.generated
            row[: len(ids)] = torch.tensor(ids)
        return KnownDrafter(truth.to(service.device), guess)

    return make


def forced_logits(
    model: V4Model,
    sequences: Sequence[torch.Tensor],
    prompt_ends: Sequence[int],
    rng: np.random.Generator,
    chunk: int,
    admit: Callable[[zos.MetadataService, V4State, int], None] | None = None,
    tail: bool = False,
) -> list[torch.Tensor]:
    """Logits [n, vocabulary] of every position of known sequences int64 [n], NaN where none were made.

    Prompts go through chunks, the rest through decode steps in which a random number of tokens is kept and the drafts after those
    are random ids. With `tail` consumer layers run on the last window of each prompt only. `admit(service, state, row)` puts
    sequence `row` into state `row`, where that is not from its start.
    """
    config, device = model.config, model.head.weight.device
    rows, step = len(sequences), config.geometry.tokens_per_step
    svc = zos.MetadataService(
        rows, rows, config.geometry, device, chunk * rows, compression_ratios=config.compression_rings()
    )
    state = V4State(config, rows, max(map(len, sequences)), device)
    for row, (ids, prompt_end) in enumerate(zip(sequences, prompt_ends, strict=True)):
        state.set_prompt(row, ids)  # all of it, so that ids can be found by position
        if admit is not None:
            admit(svc, state, row)
        else:
            svc.admit(row, prompt_end=prompt_end, chunk_q=chunk, stop_at=len(ids))
    found = [
        torch.full((len(ids), config.vocabulary), torch.nan, dtype=config.dtype, device=device) for ids in sequences
    ]
    svc.set_batch(range(rows))
    svc.set_prefill_batch(range(rows))
    svc.flush()
    while bool((svc.table.phase == zos.Phase.LIVE).any()):
        prefilling = bool((svc.table.q_start < svc.table.prompt_end).any())
        md: zos.DecodeMetadata | zos.PrefillMetadata = svc.prepare_prefill(tail=tail) if prefilling else svc.prepare()
        lengths = md.seqlens_q.cpu().numpy()
        drawn = rng.integers(1, np.minimum(np.maximum(lengths, 1), step) + 1)
        chunks = (svc.table.q_start < svc.table.prompt_end).cpu().numpy()
        kept = torch.from_numpy(np.where(lengths == 0, 0, np.where(chunks, lengths, drawn)).astype(np.int32)).to(device)
        live, row = md.token_row >= 0, md.token_row.long().clamp(min=0)
        position = md.positions.clamp(max=state.prompts.shape[1] - 1)
        is_kept = live & (md.positions < (md.seqlens_k - md.seqlens_q + kept)[row])
        noise = torch.from_numpy(rng.integers(0, config.vocabulary, md.tokens)).to(device)
        ids = torch.where(is_kept, state.prompts[row, position], noise)
        view = PrefillStep(config, state, md) if isinstance(md, zos.PrefillMetadata) else DecodeStep(config, state, md)
        logits, taken = model.logits(model(ids, view)), view.consumers
        for place in taken.selected(is_kept).nonzero().flatten().tolist():
            of_row, at = found[taken._row[place]], taken.positions[place]
            if taken._live[place] and at < len(of_row):
                of_row[at] = logits[place]
        svc.commit(md, kept)
    svc.check()
    return found
