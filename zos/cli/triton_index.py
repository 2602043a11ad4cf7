"""The SWA index by Triton the way public engines write it, for benchmarks: clear, map tokens, judge, then a program a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from zos.table import COLUMNS, RECORD_WORDS, Phase

BLOCK = 256
CLEAR_BLOCK = 1024


@triton.jit
def _clear(out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, -1, mask=at < count)


@triton.jit
def _map_tokens(  # type: ignore[no-untyped-def]
    records,
    state_ids,
    mapping,
    count,
    STEP: tl.constexpr,
    WORDS: tl.constexpr,
    Q_START: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    state = tl.load(state_ids + at // STEP, mask=there, other=-1)
    q_start = tl.load(records + tl.maximum(state, 0) * WORDS + Q_START, mask=there, other=0)
    tl.store(mapping + 2 * at, state, mask=there)
    tl.store(mapping + 2 * at + 1, q_start + at % STEP, mask=there)


@triton.jit
def _judge(  # type: ignore[no-untyped-def]
    records,
    mapping,
    lengths,
    count,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    WORDS: tl.constexpr,
    PHASE: tl.constexpr,
    LIVE: tl.constexpr,
    SEQLEN_Q: tl.constexpr,
    VALID_START: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    state = tl.load(mapping + 2 * at, mask=there, other=-1)
    position = tl.load(mapping + 2 * at + 1, mask=there, other=0)
    record = records + tl.maximum(state, 0) * WORDS
    live = (state >= 0) & (tl.load(record + PHASE) == LIVE) & (at % STEP < tl.load(record + SEQLEN_Q))
    begin = tl.maximum(tl.maximum(position - WINDOW + 1, tl.load(record + VALID_START)), 0)
    tl.store(lengths + at, tl.where(live, position - begin + 1, 0), mask=there)


@triton.jit
def _write_index(mapping, lengths, out, RING: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0)
    state, position = tl.load(mapping + 2 * token), tl.load(mapping + 2 * token + 1)
    length = tl.load(lengths + token)
    k = tl.arange(0, WIDTH)
    slot = state * RING + (position - length + 1 + k) % RING
    tl.store(out + token * WINDOW + k, slot, mask=k < length)


def triton_index(
    records: torch.Tensor, state_ids: torch.Tensor, index: torch.Tensor, ring: int, tokens_per_step: int
) -> Callable[[], None]:
    """Return what launches the kernels that write a strided batch's index int32 [B * Q, W] of sound rows."""
    tokens, window = index.shape
    mapping = torch.empty(tokens, 2, dtype=torch.int32, device=index.device)  # (state id, position)
    lengths = torch.empty(tokens, dtype=torch.int32, device=index.device)
    grid, width = (triton.cdiv(tokens, BLOCK),), triton.next_power_of_2(window)
    columns = {name: COLUMNS[name] for name in ("q_start", "phase", "seqlen_q", "swa_valid_start")}

    def launch() -> None:
        _clear[(triton.cdiv(index.numel(), CLEAR_BLOCK),)](index, index.numel(), BLOCK=CLEAR_BLOCK)
        _map_tokens[grid](
            records, state_ids, mapping, tokens, STEP=tokens_per_step, WORDS=RECORD_WORDS, Q_START=columns["q_start"],
            BLOCK=BLOCK,
        )  # fmt: skip
        _judge[grid](
            records, mapping, lengths, tokens, STEP=tokens_per_step, WINDOW=window, WORDS=RECORD_WORDS,
            PHASE=columns["phase"], LIVE=int(Phase.LIVE), SEQLEN_Q=columns["seqlen_q"],
            VALID_START=columns["swa_valid_start"], BLOCK=BLOCK,
        )  # fmt: skip
        _write_index[(tokens,)](mapping, lengths, index, RING=ring, WINDOW=window, WIDTH=width)

    return launch
