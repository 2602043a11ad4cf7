"""`zos generate`: generates with a random V4.1-shaped model through the service, and compares with its dense twin."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from zos.cli import InputError
from zos.cli.options import chosen_device, whole
from zos.v4.config import V4Config
from zos.v4.dense import Visibility, dense_forward
from zos.v4.drafter import BlockDrafter, DraftModel
from zos.v4.generator import Generation, Generator
from zos.v4.model import V4Model
from zos.v4.speculative import Drafter

PRESETS: dict[str, Callable[[], V4Config]] = {"tiny": V4Config.tiny, "v41_flash": V4Config.v41_flash}
BF16_ERROR = 2e-2  # of a token's largest logit: two that are nearer than twice that may change places


class Comparison(NamedTuple):
    """Generated tokens against those of the dense twin."""

    tokens: int
    different: int
    exempted: int  # different, but the dense run's two most likely are too near to tell in bf16


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="generate with a random V4.1-shaped model",
        description="Generate greedily with a V4.1-shaped model of random weights: chunked prefill, then speculative decode steps "
        "(on a GPU captured) whose state is in MXFP8 rings. The draft model's weights are random too, so few drafts are accepted. "
        "Prompts are texts, whose UTF-8 bytes are the token ids.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text, or with --ids token ids: '5 17 200'")
    parser.add_argument("--file", type=Path, metavar="FILE", help="more prompts, one a line")
    parser.add_argument("--ids", action="store_true", help="prompts are token ids")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="model (tiny, in float64)")
    parser.add_argument("--tokens", type=whole(1), default=64, metavar="N", help="to generate for each prompt (64)")
    parser.add_argument("--batch", type=whole(1, 1024), default=8, metavar="N", help="prompts at once (8)")
    parser.add_argument("--chunk", type=whole(1, 8192), default=256, metavar="N", help="prompt tokens in a step (256)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the weights (0)")
    parser.add_argument(
        "--tail", action="store_true", help="consumer layers run on each prompt's last window only (YOCO)"
    )
    parser.add_argument("--no-drafts", action="store_true", help="one token a step")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one"
    )
    parser.add_argument("--check", action="store_true", help="compare with the dense twin; exit code 1 on a difference")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, print tokens and figures; 1 if --check finds a difference."""
    config, device = PRESETS[arguments.preset](), chosen_device(arguments.device)
    prompts = read_prompts(arguments, config.vocabulary)
    model = V4Model(config, device, arguments.seed)
    longest = max(map(len, prompts))
    drafter = None if arguments.no_drafts else DraftModel(config, device, arguments.seed + 1)
    generator = Generator(
        model, longest + arguments.tokens, min(arguments.batch, len(prompts)), min(arguments.chunk, longest),
        make_drafter=lambda service, state: BlockDrafter(model, drafter, service, state) if drafter else Drafter(),
        tail=arguments.tail,
    )  # fmt: skip
    generator.loop.capture()
    generations = [generator.submit(prompt, arguments.tokens) for prompt in prompts]
    begin = time.perf_counter()
    generator.run()
    seconds = time.perf_counter() - begin
    for number, generation in enumerate(generations):
        print(f"{number}: {' '.join(map(str, generation.generated))}")
    tokens = len(prompts) * arguments.tokens
    rows = {
        "device": device,
        "prompt tokens": str(sum(map(len, prompts))),
        "generated tokens": f"{tokens}   (in {generator.steps} decode steps)",
        "tokens/s": f"{tokens / seconds:.1f}   (prefill included; {seconds:.3f} s)",
        "accepted drafts per step": f"{generator.tokens_kept / generator.rows_served - 1:.3f}",
    }
    found = compare(model, generations, arguments.tail) if arguments.check else None
    if found is not None:
        rows["different from dense"] = f"{found.different} of {found.tokens}"
        if config.dtype != torch.float64:
            rows["of these near a tie"] = str(found.exempted)
    for name, value in rows.items():
        print(f"{name:<26}{value}")
    return int(found is not None and found.different > found.exempted)


def read_prompts(arguments: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Token ids of all prompts; InputError for none, an empty one, or an id that the model has not."""
    texts = list(arguments.prompts)
    if arguments.file is not None:
        try:
            texts += arguments.file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"{arguments.file} is no UTF-8 text: {error}") from None
    if not texts:
        raise InputError("no prompts: give some, or a --file of them")
    prompts = [_ids(text) if arguments.ids else list(text.encode()) for text in texts]
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if not prompt:
            raise InputError(f"prompt {number} is empty")
        if max(prompt) >= vocabulary:
            raise InputError(f"prompt {number} ({text[:20]!r}): {max(prompt)} is no token id below {vocabulary}")
    return prompts


def _ids(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip())
    if not all(re.fullmatch("[0-9]+", word) for word in words if word):
        raise InputError(f"{text[:40]!r} is no list of token ids")
    return [int(word) for word in words if word]


def compare(model: V4Model, generations: list[Generation], tail: bool = False) -> Comparison:
    """Compare each generated token with what the dense twin says after the same tokens; `tail`: its consumers see no more."""
    counts = torch.zeros(3, dtype=torch.int64)
    for generation in generations:
        ids = torch.tensor(generation.prompt + generation.generated, device=model.head.weight.device)
        prompt = len(generation.prompt)
        seen = Visibility(consumer_start=max(0, prompt - model.config.geometry.window) if tail else 0)
        logits = dense_forward(model, ids, seen).logits[prompt - 1 : -1].double()
        different = logits.argmax(1) != ids[prompt:]
        if model.config.dtype == torch.float64:
            near = torch.zeros_like(different)
        else:
            chosen = logits.gather(1, ids[prompt:, None]).squeeze(1)
            near = logits.amax(1) - chosen <= 2 * BF16_ERROR * logits.abs().amax(1)
        counts += torch.stack([torch.ones_like(different), different, different & near], 1).sum(0).cpu()
    return Comparison(*counts.tolist())
