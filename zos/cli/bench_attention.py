"""`zos bench`: decode attention beside the same in torch and beside a device copy of the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zos.attention import reference_decode_attention
from zos.cache import SwaCache
from zos.layout import StateSlotLayout
from zos.service import MetadataService

HEADS = 64
NODES = 3  # a node is long enough

Figure = tuple[str, str, int, float, str, float]  # bench, variant, rows, median µs, reference, its µs
Launches = dict[str, Callable[[], object]]
Medians = Callable[[Launches, int, int], dict[str, float]]


def bench_attention(size: int, replays: int, graph_medians: Medians) -> Iterator[Figure]:
    """Attention of `size` rows over full windows: whole rows strided, and ragged rows packed."""
    for token_layout, variant in (("strided", "6 queries a row"), ("packed", "1 to 6 queries a row")):
        launches = attention_launches(size, token_layout)
        medians = graph_medians(launches, replays, NODES)
        for name in list(launches)[1:]:
            yield ("swa_decode_attention", f"{variant}, {HEADS} heads", size, medians["ours"], name, medians[name])


def attention_launches(size: int, token_layout: str) -> Launches:
    """The operator on a prepared batch and a full ring, and what it is held against."""
    svc = MetadataService(capacity=2 * size, max_batch=size, device="cuda", token_layout=token_layout)
    step, window, ring = svc.geometry.tokens_per_step, svc.geometry.window, svc.geometry.ring
    for row in range(size):
        svc.admit(
            2 * row, q_start=10 * window + 7 * row, seqlen_q=step if token_layout == "strided" else 1 + row % step
        )
    svc.set_batch(range(0, 2 * size, 2))
    metadata = svc.prepare()
    cache = SwaCache(StateSlotLayout(stored_layers=1), num_state_slots=2 * size, device="cuda")
    layer, width = cache.layer(0), cache.layout.entry.fp8_values
    draws = torch.Generator("cuda").manual_seed(size)
    entries = torch.randn(2 * size * ring, width, device="cuda", generator=draws)
    torch.ops.zos.swa_ring_store(entries, torch.arange(2 * size * ring, device="cuda"), layer)
    q = torch.randn(metadata.tokens, HEADS, width, device="cuda", generator=draws).bfloat16()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    index, lengths, scale = metadata.kv_swa_index, metadata.swa_len, width**-0.5

    moved = 2 * int(metadata.num_tokens) * HEADS * width * q.element_size()  # queries and outputs
    moved += size * ring * cache.layout.entry.entry_bytes  # each ring once
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def ours() -> None:
        torch.ops.zos.swa_decode_attention(q, layer, index, lengths, None, out, lse, scale, step)

    return {
        "ours": ours,
        "torch, captured": lambda: reference_decode_attention(q, layer, index, lengths, scale),
        "device copy of as many bytes": lambda: target.copy_(source),
    }
