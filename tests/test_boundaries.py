"""Test that chunks end at the boundaries of snapshots, and that commit marks the rows whose rings are whole there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array
from tests.twins import Twins

EVERY = (1, 7, 128, 512)
LIMIT = 300  # max_prefill_tokens: shorter than some distances between boundaries, longer than others


def service(device: str, every: int, **options: Any) -> zos.MetadataService:
    return zos.MetadataService(
        16, 4, device=device, max_prefill_tokens=LIMIT, compression_ratios=(), snapshot_every=every, **options
    )


def chunks(svc: zos.MetadataService, state_id: int) -> list[tuple[int, int]]:
    """Half-open ranges of positions of a sequence's chunks, until its prompt is complete."""
    found = []
    svc.set_prefill_batch([state_id])
    svc.flush()
    while int(svc.table.q_start[state_id]) < int(svc.table.prompt_end[state_id]):
        metadata = svc.prepare_prefill()
        q = int(metadata.seqlens_q[0])
        found.append((int(metadata.seqlens_k[0]) - q, int(metadata.seqlens_k[0])))
        svc.commit(metadata, metadata.seqlens_q)
    return found


@pytest.mark.parametrize("every", EVERY)
def test_chunks_end_at_boundaries(device: str, every: int, seed: int) -> None:
    """A chunk that passes a boundary has overwritten the window before it; one that ends early for nothing costs a step."""
    rng = np.random.default_rng([seed, every])
    svc, prompt = service(device, every), min(1500, 40 * every)  # tokens: many chunks, or several boundaries
    for chunk_q in (0, 1, every - 1, every, every + 1, LIMIT, *rng.integers(1, LIMIT, 4).tolist()):
        chunk_q = min(chunk_q, LIMIT)
        start = int(rng.choice([0, every, rng.integers(0, 3 * every)]))
        end = start + int(rng.integers(1, min(prompt, 40 * (chunk_q or LIMIT)) + 1))
        svc.admit(3, start, prompt_end=end, chunk_q=chunk_q)
        admitted = chunks(svc, 3)
        svc.reset(3, prompt_end=end - start)
        for first, last, found in ((start, end, admitted), (0, end - start, chunks(svc, 3))):
            assert [at for at, _ in found] == [first, *(to for _, to in found[:-1])] and found[-1][1] == last
            for at, to in found:
                boundary = next(b for b in range(at + 1, at + every + 1) if b % every == 0)
                assert to == min(boundary, last, at + (chunk_q or LIMIT)), f"chunk {at} … {to} of chunk_q={chunk_q}"
        svc.release(3)


def test_a_callers_own_length_is_not_cut(device: str) -> None:
    """Who says how long a chunk is gets it, and the chunk after it ends at a boundary again."""
    svc = service(device, 100)
    svc.admit(3, seqlen_q=130, prompt_end=500)
    svc.admit(4, prompt_end=500)
    svc.set_seqlen_q(4, 150)
    assert chunks(svc, 3)[:2] == [(0, 130), (130, 200)]
    assert chunks(svc, 4)[:2] == [(0, 150), (150, 200)]


def test_off_by_default(device: str) -> None:
    """Without boundaries nothing is cut and no memory is spent on marks."""
    svc = service(device, 0)
    svc.admit(3, prompt_end=500)
    assert chunks(svc, 3) == [(0, 300), (300, 500)]
    svc.set_batch([3], batch=1)
    assert svc.prepare().marks is None


@pytest.mark.parametrize(
    ("columns", "kept", "mark"),
    [
        ({"q_start": 126}, 1, -1),  # one short of it
        ({"q_start": 126}, 2, 128),  # exactly there, four drafts past it in the ring
        ({"q_start": 127}, 6, 128),
        ({"q_start": 128}, 6, -1),  # a boundary is reached once
        ({"q_start": 126, "stop_at": 128}, 6, 128),  # it ends there, and its state is worth keeping
        ({"q_start": 126, "stop_at": 127}, 6, -1),
        ({"q_start": 0, "prompt_end": 300}, 0, 128),  # a chunk of 128 that ends there
        ({"q_start": 0, "prompt_end": 300, "seqlen_q": 134}, 0, 128),  # past it, by no more than a ring has spare
        ({"q_start": 0, "prompt_end": 300, "seqlen_q": 135}, 0, -1),
        ({"q_start": 100, "prompt_end": 300, "seqlen_q": 156}, 0, 256),  # past two of them: the last
        ({"q_start": 384, "swa_valid_start": 384}, 0, -1),
        ({"q_start": 383, "swa_valid_start": 257}, 1, 384),  # the query at 384 sees 257 …
        ({"q_start": 383, "swa_valid_start": 258}, 1, -1),  # … which is missing
    ],
)
def test_marks(device: str, columns: dict[str, int], kept: int, mark: int) -> None:
    """A mark where the ring is not whole would store a state that nobody can use; a missing one loses a prefix hit."""
    svc = service(device, 128)
    svc.admit(3, **columns)
    svc.set_prefill_batch([3, -1])
    metadata = svc.prepare_prefill()
    svc.commit(metadata, torch.tensor([kept, 5], dtype=torch.int32, device=device))
    assert metadata.marks is not None and metadata.marks.tolist() == [mark, -1]
    svc.commit(metadata, torch.tensor([kept, 5], dtype=torch.int32, device=device))  # a duplicate
    assert metadata.marks.tolist() == [-1, -1]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("geometry", [zos.RingGeometry(), zos.RingGeometry(7, 3, 12), zos.RingGeometry(16, 5)])
def test_marks_equal_the_oracle(device: str, every: int, geometry: zos.RingGeometry, seed: int) -> None:
    """Any chunks, rejections, lengths, late results and resets: the marks of every commit, and the lengths after it."""
    rng = np.random.default_rng([seed, every, geometry.ring])
    twins = Twins(device, capacity=8, queue=False, geometry=geometry, max_prefill_tokens=LIMIT, snapshot_every=every)
    step, met = geometry.tokens_per_step, Counter[bool]()

    def admit(state_id: int) -> None:
        start, prompt = (int(rng.integers(0, 2 * every + 2)) for _ in range(2))
        valid = int(rng.integers(0, start + 1)) if rng.random() < 0.3 else 0
        chunk = int(rng.integers(0, LIMIT + 1))
        twins.edit("admit", state_id, start, swa_valid_start=valid, prompt_end=start + prompt, chunk_q=chunk)

    for state_id in range(8):
        admit(state_id)
    for _ in range(60):
        ids = rng.permutation(8).tolist()
        prefill = bool(rng.random() < 0.5)
        if prefill:
            twins.set_prefill_batch(ids[:4])
        else:
            twins.set_batch(ids[:4])
        if rng.random() < 0.2:
            twins.edit("set_seqlen_q", ids[0], int(rng.integers(0, LIMIT + 1)))
        if rng.random() < 0.2:
            twins.edit("reset", ids[1], int(rng.integers(0, 2 * every + 1)))
        if rng.random() < 0.1:
            twins.edit("release", ids[2])
            admit(ids[2])
        prepared = twins.prepare(prefill=prefill)
        for _ in range(rng.integers(1, 3)):
            lengths = np.array(prepared.tickets)[:, 3].clip(0)
            kept = np.where(lengths > step, lengths, np.minimum(rng.integers(0, step + 1, 4), lengths))
            twins.commit(prepared, kept)  # which compares the marks
            assert prepared.metadata.marks is not None
            met.update((as_array(prepared.metadata.marks) >= 0).tolist())
        twins.read()
    assert met[True] and met[False]
