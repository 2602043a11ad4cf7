"""Test that a sequence which starts after a prefix hit gives the dense twin's logits under the same truncated visibility."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zos
from tests.v4 import SMALL, forced_logits, tiny_model
from zos.v4.dense import Visibility, dense_forward
from zos.v4.model import V4Model
from zos.v4.state import V4State

NAN_BYTE = 0xFF
SAME_IN_FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}


def replayed(
    model: V4Model,
    sequences: list[torch.Tensor],
    hits: list[int],
    rng: np.random.Generator,
    chunk: int,
    **options: bool,
) -> list[torch.Tensor]:
    """Logits of sequences whose first `hits` tokens a prefix cache had, as compressed entries alone; all other memory is NaN."""

    def admit(svc: zos.MetadataService, state: V4State, row: int) -> None:
        if row == 0:
            state.cache.slab.fill_(NAN_BYTE)
            for compressed in state.compressed.values():
                compressed.fill_(torch.nan)
        ids, hit = sequences[row], hits[row]
        for layer, entries in dense_forward(model, ids[:hit]).compressed.items():
            state.compressed[layer][row, : len(entries)] = entries
        svc.admit(row, prefix_hit=hit, prompt_end=hit + 20, chunk_q=chunk, stop_at=len(ids))

    return forced_logits(model, sequences, [hit + 20 for hit in hits], rng, chunk, admit, **options)


def truncated(model: V4Model, ids: torch.Tensor, hit: int, consumer_start: int | None = None) -> torch.Tensor:
    """The dense twin's logits from the first recomputed position on."""
    start = zos.plan_bounded_replay(hit, window=model.config.geometry.window).q_start
    cached = {layer: entries for layer, entries in dense_forward(model, ids[:hit]).compressed.items()}
    consumers = start if consumer_start is None else consumer_start
    return dense_forward(model, ids, Visibility(start, start, consumers, cached)).logits


@pytest.mark.parametrize("chunk", [5, 60])
def test_bounded_replay(device: str, chunk: int, seed: int) -> None:
    """Recomputed tokens read nothing below the window before the hit, and overwrite no entry that the cache had: an odd hit leaves
    an entry whose first token is recomputed only.
    """
    rng = np.random.default_rng(seed)
    model, window = tiny_model(device, seed, SMALL), SMALL.window
    hits = [window + 1, 2 * int(rng.integers(10, 30)), 2 * int(rng.integers(10, 30)) + 1]
    sequences = [torch.from_numpy(rng.integers(0, 256, hit + 60)).to(device) for hit in hits]
    for ids, hit, logits in zip(sequences, hits, replayed(model, sequences, hits, rng, chunk), strict=True):
        assert logits[: hit - window].isnan().all()
        torch.testing.assert_close(logits[hit - window :], truncated(model, ids, hit), **SAME_IN_FLOAT64)
        cold = dense_forward(model, ids).logits[hit - window :]
        assert (logits[hit - window :] - cold).abs().max() > 1e-3  # the truncation is no nothing


@pytest.mark.parametrize("chunk", [5, 60])
def test_tail(device: str, chunk: int, seed: int) -> None:
    """Consumer layers that run on a prompt's last window alone give the logits of a dense run whose consumers see only that."""
    rng = np.random.default_rng(seed)
    model, window = tiny_model(device, seed, SMALL), SMALL.window
    ends = [window - 3, 40, 40 + int(rng.integers(1, 20))]
    sequences = [torch.from_numpy(rng.integers(0, 256, end + 2 * window)).to(device) for end in ends]
    found = forced_logits(model, sequences, ends, rng, chunk, tail=True)
    for ids, end, logits in zip(sequences, ends, found, strict=True):
        start = max(0, end - window)
        assert logits[:start].isnan().all()
        expected = dense_forward(model, ids, Visibility(consumer_start=start)).logits
        torch.testing.assert_close(logits[start:], expected[start:], **SAME_IN_FLOAT64)
        if start:
            assert (logits[start:] - dense_forward(model, ids).logits[start:]).abs().max() > 1e-3


def test_bounded_replay_with_tail(device: str, seed: int) -> None:
    """Both truncations at once, as after a prefix hit: producers from the hit's window on, consumers from the prompt's."""
    rng = np.random.default_rng(seed)
    model, window = tiny_model(device, seed, SMALL), SMALL.window
    hits = [window + 5, 2 * int(rng.integers(10, 30)) + 1]
    sequences = [torch.from_numpy(rng.integers(0, 256, hit + 60)).to(device) for hit in hits]
    for ids, hit, logits in zip(sequences, hits, replayed(model, sequences, hits, rng, 9, tail=True), strict=True):
        start, begin = hit + 20 - window, hit - window
        expected = truncated(model, ids, hit, consumer_start=start)
        assert logits[:start].isnan().all()
        torch.testing.assert_close(logits[start:], expected[start - begin :], **SAME_IN_FLOAT64)


@pytest.mark.parametrize("producers", [2, 4])
@pytest.mark.parametrize("sink", [True, False])
def test_tail_of_any_model(device: str, producers: int, sink: bool, seed: int) -> None:
    """A model whose layers are all producers takes the tail's tokens for its logits, too; without sinks a query of the dense twin
    that sees nothing gives zeros, not NaN for all that come after it.
    """
    rng = np.random.default_rng(seed)
    model, window = tiny_model(device, seed, SMALL, producers=producers, attention_sink=sink), SMALL.window
    ends = [window - 3, 40 + int(rng.integers(1, 20))]
    sequences = [torch.from_numpy(rng.integers(0, 256, end + 5)).to(device) for end in ends]
    for ids, end, logits in zip(sequences, ends, forced_logits(model, sequences, ends, rng, 9, tail=True), strict=True):
        start = max(0, end - window)
        assert logits[:start].isnan().all()
        expected = dense_forward(model, ids, Visibility(consumer_start=start)).logits
        torch.testing.assert_close(logits[start:], expected[start:], **SAME_IN_FLOAT64)
