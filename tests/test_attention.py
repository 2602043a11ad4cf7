"""Test that every way to a query's keys gives the attention of a dense window over the whole sequence.

The latent is key and value of all heads (MQA). Decode queries read the ring through `kv_swa_index`; the same queries in a prefill
batch read the loaded history and the step's own tokens through the pivots and through `kv_swa_full_index`. Slots never written hold
NaN, so one read too many shows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zos
from tests.reference import kept_tokens, random_steps

ENTRY = zos.EntryFormat.mxfp8()
LATENT = ENTRY.fp8_values
HEADS = 4
NAN_BYTE = 0xFF  # an entry of these has elements and scales that are NaN
BATCH = [2, -1, 0, 4, 3, -1, 1]  # state 4 is never admitted
STATES = 5
ROUNDS = 10  # of a prefill and a decode step
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # of values around 1; a wrong key of 128 shifts them by 1e-2


def attend(queries: torch.Tensor, buffer: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the named rows of a buffer, -1 naming none: fp32 [n, H, D], and the log of the weights' sum [n, H]."""
    seen = index >= 0
    keys = buffer[index.clamp(min=0).long()].float().masked_fill(~seen[:, :, None], 0)
    scores = torch.einsum("nhd,nkd->nhk", queries, keys) * LATENT**-0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    log_sum = torch.logsumexp(scores, 2)
    weights = torch.where(seen[:, None], torch.exp(scores - log_sum[:, :, None]), 0)
    return torch.einsum("nhk,nkd->nhd", weights, keys), log_sum


def attend_sections(queries: torch.Tensor, buffer: torch.Tensor, pivots: torch.Tensor, window: int) -> torch.Tensor:
    """Attention over the two sections that the pivots name, each by itself and then merged, as a kernel does."""
    k = torch.arange(window, device=pivots.device)
    parts = []
    for start, length in (pivots[:, :2].unbind(1), pivots[:, 2:].unbind(1)):
        parts.append(attend(queries, buffer, torch.where(k < length[:, None], start[:, None] + k, -1)))
    log_sum = torch.logaddexp(parts[0][1], parts[1][1])
    return sum(out * torch.exp(part - log_sum)[:, :, None] for out, part in parts)


def attend_dense(
    queries: torch.Tensor, latents: torch.Tensor, first: int, valid_start: int, window: int
) -> torch.Tensor:
    """Attention of the queries at positions first … over a sequence's latents from position 0 on, by a mask: fp32 [n, H, D]."""
    p = torch.arange(first, first + len(queries), device=queries.device)[:, None]
    k = torch.arange(len(latents), device=queries.device)
    mask = (k <= p) & (k >= (p - window + 1).clamp(min=max(valid_start, 0)))
    scores = (queries @ latents.T) * LATENT**-0.5
    return torch.softmax(scores.masked_fill(~mask[:, None], -torch.inf), 2) @ latents


def dequantised(ring: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a reader of the whole ring cache finds, by torch's own float8: [states * R, D]."""
    entries = ring.reshape(-1, ENTRY.entry_bytes)
    elements = entries[:, :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scales = torch.pow(2.0, entries[:, LATENT:].double() - 127).float()
    scales = scales.masked_fill(entries[:, LATENT:] == NAN_BYTE, torch.nan)
    return (elements.reshape(len(entries), -1, ENTRY.scale_block) * scales[:, :, None]).reshape(-1, LATENT).to(dtype)


def random_latents(rows: int, draws: torch.Generator) -> torch.Tensor:
    """Normal rows of magnitudes 1/8 … 1, so that no key has all the weight: fp32 [rows, D] on the CPU."""
    magnitude = torch.exp2(3 * torch.rand(rows, 1, generator=draws) - 3)
    return torch.randn(rows, LATENT, generator=draws) * magnitude


def admit(svc: zos.MetadataService, chunk: int, found: torch.Tensor) -> None:
    """Four sequences: from the start, with a window from elsewhere, after a prefix hit, without a prompt."""
    prompt = 2 * chunk + svc.geometry.window + 3
    first, end = int(found[0]), int(found[-1]) + 1
    svc.admit(0, prompt_end=prompt, chunk_q=chunk)
    svc.admit(1, q_start=end, swa_valid_start=first, prompt_end=end + chunk + 1, chunk_q=chunk)
    svc.admit(2, prefix_hit=2 * prompt, prompt_end=2 * prompt + chunk, chunk_q=max(1, chunk // 3))
    svc.admit(3, seqlen_q=1)
    svc.set_batch(BATCH)
    svc.set_prefill_batch(BATCH)
    svc.flush()


def dense_results(
    svc: zos.MetadataService,
    metadata: zos.PrefillMetadata,
    queries: torch.Tensor,
    kept_latents: torch.Tensor,
    own: torch.Tensor,
) -> torch.Tensor:
    """What the step's queries must get, of the latents kept before it and its own tokens' (drafts too): fp32 [T, H, D]."""
    results, ends = torch.full_like(queries, torch.nan), metadata.cu_seqlens_q.tolist()
    for row, (state_id, _, q_start, seqlen_q) in enumerate(metadata.tickets.tolist()):
        if seqlen_q > 0:
            places = slice(ends[row], ends[row] + seqlen_q)
            latents = torch.cat([kept_latents[state_id, :q_start], own[places]])
            valid_start = int(svc.table.swa_valid_start[state_id])
            results[places] = attend_dense(queries[places], latents, q_start, valid_start, svc.geometry.window)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("window", "drafts", "ring", "chunk", "token_layout"),
    [
        (8, 3, 11, 3, "packed"),
        (8, 3, 12, 8, "strided"),
        (8, 3, 12, 9, "packed"),
        (8, 3, 11, 11, "strided"),
        (8, 3, 12, 13, "packed"),
        (8, 3, 11, 40, "strided"),
        (128, 5, 134, 100, "packed"),
        (128, 5, 133, 200, "strided"),
    ],
)
def test_every_way_to_the_keys(
    device: str, window: int, drafts: int, ring: int, chunk: int, token_layout: str, dtype: torch.dtype, seed: int
) -> None:
    """Chunks below and above window and ring, rejected drafts, padding, missing history: a query's result is always the same."""
    rng, draws = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    limit = STATES * max(chunk, drafts + 1)
    geometry = zos.RingGeometry(window, drafts, ring)
    svc = zos.MetadataService(STATES, len(BATCH), geometry, device, max_prefill_tokens=limit, token_layout=token_layout)
    found = torch.arange(window // 2, window + 2, device=device)  # positions of state 1 that an external store had
    admit(svc, chunk, found)
    decode_ring = torch.full((STATES, ring, 1, ENTRY.entry_bytes), NAN_BYTE, dtype=torch.uint8, device=device)
    found_latents = random_latents(len(found), draws).to(device, dtype)
    torch.ops.zos.swa_ring_store(found_latents, ring + found % ring, decode_ring)
    prefill_ring = decode_ring.clone()  # of an engine that decodes in prefill batches alone
    longest = 3 * (2 * chunk + window) + 2 * ROUNDS * (drafts + 1)
    kept_latents = torch.zeros(STATES, longest, LATENT, device=device)  # as readers see them, by position
    kept_latents[1, found] = dequantised(decode_ring[1, found % ring], dtype).float()
    history_rows, compared = len(BATCH) * window, 0

    for _, kept in random_steps(svc, ROUNDS, rng):
        decode, prefill = svc.prepare(), svc.prepare_prefill(full_index=True)  # the same queries; moves no sequence
        values = random_latents(prefill.tokens, draws).to(device, dtype)
        queries = torch.randn(prefill.tokens, HEADS, LATENT, generator=draws).to(device)
        row = prefill.token_row.long()
        moves = (torch.from_numpy(kept).to(device) > 0)[row]  # a long chunk is stored in the step that commits it

        buffer = torch.full((history_rows + prefill.tokens, LATENT), torch.nan, dtype=dtype, device=device)
        own = buffer[history_rows:]
        torch.ops.zos.swa_ring_load(prefill_ring, prefill.swa_load_plan, buffer, window)
        torch.ops.zos.swa_ring_store(values, prefill.swa_write_slot.masked_fill(~moves, -1), prefill_ring, own)
        expected = dense_results(svc, prefill, queries, kept_latents, own.float())
        live = (row >= 0).nonzero().flatten()
        by_pivots = attend_sections(queries[live], buffer, prefill.kv_swa_full_index_pivots[live], window)
        torch.testing.assert_close(by_pivots, expected[live], **TOLERANCE)
        assert prefill.kv_swa_full_index is not None
        by_full_index, _ = attend(queries[live], buffer, prefill.kv_swa_full_index[live])
        torch.testing.assert_close(by_full_index, expected[live], **TOLERANCE)

        live = (decode.token_row >= 0).nonzero().flatten()
        decode_row = decode.token_row[live].long()
        place = prefill.cu_seqlens_q[decode_row] + live - decode.cu_seqlens_q[decode_row]  # in the prefill batch
        queries, expected = queries[place], expected[place]
        alone = moves & (decode.seqlens_q[row] == 0)  # chunks too long for the decode batch
        torch.ops.zos.swa_ring_store(values, prefill.swa_write_slot.masked_fill(~alone, -1), decode_ring)
        torch.ops.zos.swa_ring_store(values[place], decode.swa_write_slot[live], decode_ring)
        by_index, _ = attend(queries, dequantised(decode_ring, dtype), decode.kv_swa_index[live])
        torch.testing.assert_close(by_index, expected, **TOLERANCE)
        step_buffer = torch.full((history_rows + decode.tokens, LATENT), torch.nan, dtype=dtype, device=device)
        step_buffer[:history_rows], step_buffer[history_rows + live] = buffer[:history_rows], own[place]
        by_pivots = attend_sections(queries, step_buffer, decode.kv_swa_full_index_pivots[live], window)
        torch.testing.assert_close(by_pivots, expected, **TOLERANCE)

        is_kept = torch.from_numpy(kept_tokens(prefill, kept)).to(device)
        kept_latents[prefill.token_state_id[is_kept].long(), prefill.positions[is_kept]] = own[is_kept].float()
        compared += len(place)
    svc.check()
    assert compared > ROUNDS * STATES and (svc.table.q_start[:4] > svc.table.prompt_end[:4]).all()
