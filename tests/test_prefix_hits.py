"""Test that a prefix hit is what earlier prompts' blocks cover, and not a token more."""

from __future__ import annotations

import numpy as np
import pytest

from zos.cli.prefix_hits import PrefixHits
from zos.cli.traces import Request


def admitted(hits: PrefixHits, prompt: int, *blocks: int) -> int:
    return hits.admit(Request(0.0, prompt, 1, tuple(blocks)))


@pytest.mark.parametrize(
    ("prompt", "blocks", "hit"),
    [
        (1500, (1, 2, 3), 1500),  # the last block is partial
        (1536, (1, 2, 3), 1536),
        (2000, (1, 2, 3, 9), 1536),
        (2000, (1, 9, 2, 3), 512),  # only the leading run
        (2000, (9, 1, 2, 3), 0),
        (300, (1,), 300),
        (1, (1,), 1),
        (2000, (), 0),
        (0, (1,), 0),
    ],
)
def test_hit(prompt: int, blocks: tuple[int, ...], hit: int) -> None:
    """A block counts only behind blocks that were hit too, and never past the prompt."""
    hits = PrefixHits()
    assert admitted(hits, 1500, 1, 2, 3) == 0
    assert admitted(hits, prompt, *blocks) == hit


def test_every_block_counts_as_seen() -> None:
    """Blocks behind the first miss are there for the next request as well."""
    hits = PrefixHits()
    assert admitted(hits, 1024, 1, 2) == 0
    assert admitted(hits, 2048, 1, 9, 2, 8) == 512
    assert admitted(hits, 2048, 1, 9, 2, 8) == 2048
    assert PrefixHits().admit(Request(0.0, 2048, 1, (1, 9, 2, 8))) == 0, "caches share nothing"


def test_random_prompts(seed: int) -> None:
    """Against a model of tokens: a cache of every prefix of whole blocks ever admitted."""
    rng = np.random.default_rng(seed)
    hits, prefixes = PrefixHits(), set[tuple[int, ...]]()
    for _ in range(200):
        parent = max(prefixes, key=lambda _: rng.random()) if prefixes and rng.random() < 0.8 else ()
        fresh = rng.integers(
            10**12, size=rng.integers(0, 4)
        ).tolist()  # never the same twice, so a prefix tells a block
        blocks = (*parent, *fresh)
        prompt = max(0, len(blocks) * 512 - int(rng.integers(512)))
        known = max((n for n in range(len(blocks) + 1) if n == 0 or blocks[:n] in prefixes), default=0)
        assert admitted(hits, prompt, *blocks) == min(known * 512, prompt)
        prefixes |= {blocks[:n] for n in range(1, len(blocks) + 1)}
