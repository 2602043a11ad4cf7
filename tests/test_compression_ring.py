"""Test that compression rings hold every token that a pooled entry needs, whatever chunks, drafts and rejections came before.

Tokens have random fp32 latents, rejected drafts others than the tokens kept in their place. A compressor pools what it finds in the
ring into a compressed cache; its entries must be, bit for bit, those of a run without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal, kept_tokens, random_steps
from zos.metadata import StepMetadata

WIDTH = 8  # of a latent
SEQUENCES = 12
SPARE_STATES = 2  # never admitted
LONGEST_CHUNK = 256
LENGTH = 700  # positions that have latents
RINGS = [zos.CompressionRing(2), zos.CompressionRing(4, overlap=True), zos.CompressionRing(128)]
IDS = [f"ratio {ring.ratio}" for ring in RINGS]
Steps = Iterator[tuple[StepMetadata, np.ndarray]]  # metadata and the tokens kept of each row, as of random_steps


def pooled_tokens(ring: zos.CompressionRing) -> int:
    """Tokens that an entry pools: its own, with overlap as many before them."""
    return ring.ratio * (2 if ring.overlap else 1)


def pool(tokens: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Mean of each entry's tokens, summed in their order so that it has one value: [n, tokens, D], bool [n, tokens] -> [n, D]."""
    total = reduce(torch.add, tokens.masked_fill(~exists[:, :, None], 0).unbind(1))
    return total / exists.sum(1, keepdim=True)


def write_slots(metadata: StepMetadata, ring: zos.CompressionRing) -> torch.Tensor:
    """The service's slots."""
    return metadata.compression_write_slot[ring.ratio]


class Compressor:
    """A ring of each state's latest latents, and the entries pooled from them; what was never written is NaN."""

    def __init__(
        self,
        ring: zos.CompressionRing,
        svc: zos.MetadataService,
        entries: int | None = None,
        slots: Callable[[StepMetadata, zos.CompressionRing], torch.Tensor] = write_slots,
    ) -> None:
        self.ring, self.slots, self.entries = ring, slots, entries or ring.entries
        # fp32 [states, entries, D], fp32 [states, pooled entries, D]
        self.held = torch.full((svc.capacity, self.entries, WIDTH), torch.nan, device=svc.device)
        self.pooled = torch.full((svc.capacity, LENGTH // ring.ratio, WIDTH), torch.nan, device=svc.device)

    def step(self, metadata: StepMetadata, latents: torch.Tensor) -> None:
        """Run a step. A decode step writes first and pools what the ring holds. A prefill step takes its own tokens, of which the
        ring may not hold all, as they are and only those before them from the ring; then it writes.
        """
        if isinstance(metadata, zos.PrefillMetadata):
            self._pool(metadata, latents)
            self._write(metadata, latents)
        else:
            self._write(metadata, latents)
            self._pool(metadata, None)

    def _write(self, metadata: StepMetadata, latents: torch.Tensor) -> None:
        slots = self.slots(metadata, self.ring)
        self.held.view(-1, WIDTH)[slots[slots >= 0]] = latents[slots >= 0]

    def _pool(self, metadata: StepMetadata, own: torch.Tensor | None) -> None:
        """Pool the entries that this step completes, from the ring and, where given, the step's own tokens."""
        index = metadata.compression_index[self.ring.ratio]
        place = (index >= 0).nonzero()
        state_id = metadata.token_state_id[place].long()
        position = metadata.positions[place] - torch.arange(pooled_tokens(self.ring) - 1, -1, -1, device=place.device)
        tokens = self.held[state_id, position % self.entries]
        if own is not None:
            place_of = place - (metadata.positions[place] - position)
            of_row = place_of >= metadata.cu_seqlens_q[metadata.token_row[place].long()]
            tokens = torch.where(of_row[:, :, None], own[place_of.clamp(min=0)], tokens)
        self.pooled[state_id[:, 0], index[place[:, 0]]] = pool(tokens, position >= 0)


def service(device: str) -> zos.MetadataService:
    """A service for all the rings at once."""
    tokens = SEQUENCES * LONGEST_CHUNK
    return zos.MetadataService(
        SEQUENCES + SPARE_STATES, SEQUENCES, device=device, max_prefill_tokens=tokens, compression_ratios=RINGS
    )


def run(compressors: list[Compressor], steps: Steps, latents: torch.Tensor, generator: torch.Generator) -> None:
    """Run steps through compressors: kept tokens with their latents, rejected ones with noise."""
    for metadata, kept in steps:
        noise = torch.randn(metadata.tokens, WIDTH, generator=generator).to(latents.device)
        state_id, position = metadata.token_state_id.long(), metadata.positions
        is_kept = torch.from_numpy(kept_tokens(metadata, kept)).to(latents.device)
        tokens = torch.where(is_kept[:, None], latents[state_id, position], noise)
        for compressor in compressors:
            compressor.step(metadata, tokens)


def kept_whole(svc: zos.MetadataService, prepare: Callable[[], StepMetadata]) -> Steps:
    """Steps of one kind, all of whose tokens are kept, until every sequence has stopped."""
    while (metadata := prepare()).num_tokens.item() > 0:
        yield metadata, as_array(metadata.seqlens_q)
        svc.commit(metadata, metadata.seqlens_q)


def random_latents(generator: torch.Generator, device: str) -> torch.Tensor:
    """Latents of kept tokens by state and position: fp32 [states, LENGTH, D]."""
    return torch.randn(SEQUENCES + SPARE_STATES, LENGTH, WIDTH, generator=generator).to(device)


def dense(ring: zos.CompressionRing, latents: torch.Tensor) -> torch.Tensor:
    """All pooled entries, from the list of all latents: [states, LENGTH / ratio, D]."""
    last = torch.arange(ring.ratio - 1, LENGTH, ring.ratio, device=latents.device)
    position = last[:, None] - torch.arange(pooled_tokens(ring) - 1, -1, -1, device=latents.device)
    return torch.stack([pool(tokens[position.clamp(min=0)], position >= 0) for tokens in latents])


def test_any_history(device: str, seed: int) -> None:
    """Prompts in chunks (some after a prefix hit), decode steps in both kinds of batch, drafts and rejections: the entries of the
    plain runs; entries that the prefix cache had, and states never admitted, stay untouched.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    latents = random_latents(generator, device)
    svc = service(device)
    ids = [int(state_id) for state_id in rng.permutation(svc.capacity)[:SEQUENCES]]
    cached_end = [0] * svc.capacity
    for state_id in ids:
        prompt = int(rng.integers(0, 400))
        hit = int(rng.integers(0, prompt + 1)) if rng.random() < 0.3 else 0
        cached_end[state_id] = zos.plan_bounded_replay(hit, prompt).kv_cached_end
        svc.admit(state_id, prefix_hit=hit, prompt_end=prompt, chunk_q=int(rng.choice([1, 5, 60, 140, LONGEST_CHUNK])))
    svc.set_batch(ids)
    svc.set_prefill_batch(ids)
    svc.flush()
    compressors = [Compressor(ring, svc) for ring in RINGS]
    run(compressors, random_steps(svc, 40, rng), latents, generator)
    svc.check()
    q_start = svc.table.q_start.tolist()

    plain = service(device)  # one token a step
    chunked = service(device)  # the whole sequence as a prompt
    for state_id in ids:
        plain.admit(state_id, seqlen_q=1, decode_q=1, stop_at=q_start[state_id])
        stop, chunk = q_start[state_id], int(rng.integers(1, LONGEST_CHUNK + 1))
        chunked.admit(state_id, prompt_end=stop, stop_at=stop, chunk_q=chunk)
    plain.set_batch(ids)
    chunked.set_prefill_batch(ids)
    plain_runs = {"one token a step": (plain, plain.prepare), "chunks": (chunked, chunked.prepare_prefill)}
    for name, (other, prepare) in plain_runs.items():
        expected = [Compressor(ring, other) for ring in RINGS]
        run(expected, kept_whole(other, prepare), latents, generator)
        assert other.table.q_start.tolist() == q_start
        for compressor, without_drafts in zip(compressors, expected, strict=True):
            ratio, reference = compressor.ring.ratio, dense(compressor.ring, latents)
            for state_id in ids:
                done, cached = q_start[state_id] // ratio, cached_end[state_id] // ratio
                what = f"entries of ratio {ratio} of state {state_id}, {name}"
                entries = without_drafts.pooled[state_id, :done]
                assert_bitwise_equal(entries, reference[state_id, :done], f"plain {what}")
                assert_bitwise_equal(compressor.pooled[state_id, cached:done], entries[cached:], what)
                assert compressor.pooled[state_id, :cached].isnan().all(), f"cached {what}"
    spare = [state_id for state_id in range(svc.capacity) if state_id not in ids]
    for compressor in compressors:
        assert compressor.held[spare].isnan().all() and compressor.pooled[spare].isnan().all()


@pytest.mark.parametrize("ring", RINGS, ids=IDS)
def test_one_entry_fewer_corrupts(device: str, ring: zos.CompressionRing, seed: int) -> None:
    """Where only the first token of a step is kept, the least ring still has all that an entry pools, a shorter one has not."""
    generator = torch.Generator().manual_seed(seed)
    latents = random_latents(generator, device)
    svc = service(device)
    short = ring.entries - 1  # refused by the library: its slots are worked out here

    def short_slots(metadata: StepMetadata, ring: zos.CompressionRing) -> torch.Tensor:
        row = metadata.token_row.long()
        j = torch.arange(metadata.tokens, device=device) - metadata.cu_seqlens_q[row]
        written = (row >= 0) & (j >= metadata.seqlens_q[row] - short)
        return torch.where(written, metadata.token_state_id * short + metadata.positions % short, -1)

    prompt = 3 * ring.ratio - 2
    svc.admit(3, prompt_end=prompt, stop_at=prompt + 2 * ring.ratio)
    svc.set_batch([3])
    svc.set_prefill_batch([3])
    least, fewer = Compressor(ring, svc), Compressor(ring, svc, short, short_slots)

    def steps() -> Steps:
        metadata: StepMetadata = svc.prepare_prefill()
        while metadata.num_tokens.item() > 0:
            decode = isinstance(metadata, zos.DecodeMetadata)
            kept = torch.ones_like(metadata.seqlens_q) if decode else metadata.seqlens_q
            yield metadata, as_array(kept)
            svc.commit(metadata, kept)
            metadata = svc.prepare()

    run([least, fewer], steps(), latents, generator)
    q_start = int(svc.table.q_start[3])
    assert q_start == prompt + 2 * ring.ratio
    expected = dense(ring, latents)[3, : q_start // ring.ratio]
    assert_bitwise_equal(least.pooled[3, : len(expected)], expected, "entries")
    wrong = (fewer.pooled[3, : len(expected)] != expected).any(1).nonzero().flatten().tolist()
    decoded = list(range(prompt // ring.ratio, q_start // ring.ratio))
    assert wrong == decoded, "every entry that a decode step completed lacks a token; those of the chunk do not"
