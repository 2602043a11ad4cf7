"""Test that rings, chunks, drafts and refilled batches generate what the dense twin does, token by token and logit by logit.

ZOS_V4_FULL=1 runs the full size: 64 prompts of 1 … 2,000 tokens with 512 generated each.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

import zos
from tests.v4 import (
    SMALL,
    Guess,
    assert_dense_greedy,
    forced_logits,
    generate,
    knowing,
    mixed,
    of_random_lengths,
    random_prompts,
    right,
    tiny_model,
    wrong,
)
from zos.v4.dense import dense_forward
from zos.v4.generator import Generator

FULL = bool(os.environ.get("ZOS_V4_FULL"))
PROMPTS, LONGEST, TOKENS, BATCH, CHUNK = (64, 2000, 512, 64, 256) if FULL else (5, 300, 24, 4, 90)
SAME_IN_FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}  # of logits around 1: sums in another order, no other byte
BF16_ERROR = 2e-2  # relative, of all logits in their norm; of one in the largest of its token


def test_generates_what_dense_greedy_does(device: str, seed: int) -> None:
    """A wrong slot, window, entry, rotation or sink shifts logits until some token differs."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed)
    prompts = random_prompts(PROMPTS, LONGEST, rng)
    _, plain = generate(model, prompts, TOKENS, max_batch=BATCH, chunk=CHUNK)
    for generation in plain:
        assert_dense_greedy(model, generation)
    assert (
        len({token for generation in plain for token in generation.generated})
        > min(TOKENS, model.config.vocabulary) / 2
    )  # not one forever
    _, drafted = generate(
        model, prompts, TOKENS, max_batch=PROMPTS, chunk=CHUNK, make_drafter=knowing(plain, of_random_lengths)
    )
    assert [g.generated for g in drafted] == [g.generated for g in plain]


@pytest.mark.parametrize("guess", [right, wrong, mixed, of_random_lengths])
def test_any_drafts_give_the_same_tokens(device: str, guess: Guess, seed: int) -> None:
    """A rejected draft's vector that stays visible, or a kept one that was overwritten, would change what follows."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed, SMALL)
    prompts = random_prompts(6, 60, rng)
    _, plain = generate(model, prompts, 48, max_batch=6, chunk=25)
    drafts = SMALL.draft_tokens
    generator, drafted = generate(model, prompts, 48, max_batch=6, chunk=25, make_drafter=knowing(plain, guess))
    for before, after in zip(plain, drafted, strict=True):
        assert after.generated == before.generated
        assert_dense_greedy(model, after)
    mean = generator.tokens_kept / generator.rows_served
    least, most = {right: (drafts - 0.2, drafts + 1), wrong: (1, 1)}.get(guess, (1.2, drafts))
    assert least <= mean <= most


def test_any_chunk_and_batch_give_the_same_tokens(device: str, seed: int) -> None:
    """Chunks below and above window and ring, rows alone and together, slots that other sequences had before."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed, SMALL)
    prompts = random_prompts(7, 70, rng)
    _, expected = generate(model, prompts, 20, max_batch=7, chunk=70)
    for generation in expected:
        assert_dense_greedy(model, generation)
    for chunk, batch, prefill_rows in ((1, 7, 7), (5, 3, 2), (13, 1, 1), (int(rng.integers(2, 70)), 4, 3)):
        _, found = generate(model, prompts, 20, max_batch=batch, chunk=chunk, prefill_rows=prefill_rows)
        assert [g.generated for g in found] == [g.generated for g in expected], f"chunk={chunk}, batch={batch}"


SHAPES: list[dict[str, object]] = [
    {"ratios": (1,), "producers": 1},
    {"ratios": (0, 0), "producers": 1},
    {"ratios": (3, 3, 0, 0, 3), "producers": 2},
    {"ratios": (4, 2, 2, 4), "producers": 2},
    {"ratios": (2, 0), "producers": 2, "attention_sink": False},
    {"draft_layers": 0},
    {"draft_layers": 2},
]
GEOMETRIES = [
    zos.RingGeometry(1, 0),
    zos.RingGeometry(2, 1, 4),
    zos.RingGeometry(12, 3, 16),
    zos.RingGeometry(13, 16, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_models_of_any_shape(device: str, shape: dict[str, object], seed: int) -> None:
    """Neither a number of layers, a ratio, a half without consumers nor a window is taken for granted."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed, GEOMETRIES[rng.integers(len(GEOMETRIES))], **shape)
    prompts = random_prompts(4, 40, rng)
    _, generations = generate(model, prompts, 15, max_batch=2, chunk=int(rng.integers(1, 30)), prefill_rows=2)
    for generation in generations:
        assert_dense_greedy(model, generation)


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([], 5, "0 ids and 5 tokens"),
        ([1] * 46, 5, "46 ids and 5 tokens"),
        ([1], 0, "tokens=0"),
        ([1, 256], 5, r"prompt\[1\]=256"),
        ([-1], 5, r"prompt\[0\]=-1"),
        ([1.5], 5, r"prompt\[0\]=1.5"),
        ("text", 5, r"prompt\[0\]=.t"),
    ],
)
def test_bad_prompts_are_refused(prompt: object, tokens: int, message: str) -> None:
    """An id that the embedding lacks would fail on the device, with every other sequence."""
    generator = Generator(tiny_model("cpu", 0), max_length=50, max_batch=1)
    with pytest.raises(ValueError, match=message):
        generator.submit(prompt, tokens)  # type: ignore[arg-type]
    assert not generator.pending


@pytest.mark.parametrize("name", ["max_length", "max_batch", "chunk", "prefill_rows"])
def test_sizes_are_named(name: str) -> None:
    """A size of 0 is refused by its own name."""
    with pytest.raises(ValueError, match=f"{name}=0"):
        Generator(tiny_model("cpu", 0), **{"max_length": 50, name: 0})


def test_preempted_sequences_go_on_where_they_were(device: str, seed: int) -> None:
    """A paused row's state must neither be written by the steps it misses nor lose a draft's rejection."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed, SMALL)
    prompts = random_prompts(5, 40, rng)
    _, expected = generate(model, prompts, 40, max_batch=5, chunk=16)
    generator = Generator(model, 80, max_batch=5, chunk=16, make_drafter=knowing(expected, mixed))
    generations = [generator.submit(prompt, 40) for prompt in prompts]
    generator.run_step()
    pauses = 0
    while generator.pending:
        resting = [g.state_id for g in generations if not g.finished and rng.random() < 0.4]
        for state_id in resting:
            generator.service.pause(state_id)
        generator.run_step()
        for state_id in resting:
            if generator.service.in_use(state_id):
                generator.service.resume(state_id)
        pauses += len(resting)
    generator.service.check()
    assert [g.generated for g in generations] == [g.generated for g in expected] and pauses > 5


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("chunk", [7, 40])
def test_every_logit(device: str, chunk: int, sink: bool, seed: int) -> None:
    """Tokens alone would hide an error smaller than the gap between the two most likely; logits in float64 hide none."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed, SMALL, attention_sink=sink)
    sequences = [torch.from_numpy(rng.integers(0, 256, length)).to(device) for length in (90, 33, 61)]
    found = forced_logits(model, sequences, [50, 1, 60], rng, chunk)
    for ids, logits in zip(sequences, found, strict=True):
        torch.testing.assert_close(logits, dense_forward(model, ids).logits, **SAME_IN_FLOAT64)


def test_bfloat16_is_near(device: str, seed: int, record_property: Callable[[str, object], None]) -> None:
    """In bf16 a batch's shape may flip a byte; logits stay near all the same, and so do tokens that are not near a tie."""
    rng = np.random.default_rng(seed)
    model = tiny_model(device, seed, dtype=torch.bfloat16)
    sequences = [torch.from_numpy(rng.integers(0, 256, length)).to(device) for length in (260, 150)]
    logits = torch.cat(forced_logits(model, sequences, [200, 100], rng, 70)).float()
    expected = torch.cat([dense_forward(model, ids).logits for ids in sequences]).float()
    assert (logits - expected).norm() <= BF16_ERROR * expected.norm()
    largest, second = expected.topk(2, 1).values.unbind(1)
    decided = largest - second > 2 * BF16_ERROR * expected.abs().amax(1)
    exempted = 1 - float(decided.float().mean())
    record_property("share of tokens exempted", exempted)
    print(f"share of tokens exempted: {exempted:.2f}")
    assert (logits.argmax(1) == expected.argmax(1))[decided].all()
    assert exempted < 0.5
