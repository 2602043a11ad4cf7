"""Argument checks of the operators on ring entries: store, load, snapshot, decode attention."""

from __future__ import annotations

import torch

from device_kernels import decode_attention
from device_kernels.entry import DTYPE_NAMES
from host_fallback.ring_snapshot import PLAN_WORDS, PROGRESS_WORDS, SLOT_WORDS
from zos.arguments import INT32_LARGEST, whole_number
from zos.checks import INT32, INT64, expect, expect_table
from zos.entry import EntryFormat

MOST_LAYERS = 65_535  # of a ring store or load: the grid's second axis
SCALE_BLOCK = EntryFormat.mxfp8().scale_block  # values that share a scale byte


def _expect_cache(swa_cache: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Check a cache view against the [T, D] or, of several layers, [L, T, D] tensor on its other side."""
    if values.dtype not in DTYPE_NAMES:
        raise ValueError(f"Invalid dtype of {name}: expected float32, float16 or bfloat16, got {values.dtype}")
    if values.dim() not in (2, 3) or values.shape[-1] < SCALE_BLOCK or values.shape[-1] % SCALE_BLOCK:
        raise ValueError(
            f"Invalid shape of {name}: expected [T, D] or [L, T, D], D a multiple of {SCALE_BLOCK}, "
            f"got {list(values.shape)}"
        )
    expect(name, values, values.dtype, tuple(values.shape), values.device)
    if swa_cache.dtype is not torch.uint8:
        raise ValueError(f"Invalid dtype of swa_cache: expected {torch.uint8}, got {swa_cache.dtype}")
    if swa_cache.device != values.device:
        raise ValueError(f"Invalid device of swa_cache: expected {values.device}, got {swa_cache.device}")
    width = values.shape[-1]
    entry = width + width // SCALE_BLOCK
    layers = list(values.shape[:-2])
    if swa_cache.dim() != len(layers) + 4 or list(swa_cache.shape) != [*layers, *swa_cache.shape[-4:-2], 1, entry]:
        expected = ", ".join([*map(str, layers), "S", "R", "1", str(entry)])
        raise ValueError(f"Invalid shape of swa_cache: expected [{expected}], got {list(swa_cache.shape)}")
    if layers and layers[0] > MOST_LAYERS:
        raise ValueError(f"Invalid shape of {name}: L = {layers[0]} exceeds {MOST_LAYERS} layers, a launch's most")
    states, ring = swa_cache.shape[-4:-2]
    if ring < 1 or states * ring > INT32_LARGEST:
        raise ValueError(f"Invalid shape of swa_cache: S * R = {states * ring} must be 1 … 2^31 - 1")
    if swa_cache.stride(-1) != 1:
        raise ValueError(
            f"Invalid stride of swa_cache: expected the bytes of an entry one after the other, got {swa_cache.stride()}"
        )
    extent = 1  # bytes of all entries along the dimensions of shorter strides, from the first to behind the last
    for stride, size in sorted(zip(swa_cache.stride(), swa_cache.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"Invalid stride of swa_cache: entries of {entry} bytes overlap in {swa_cache.stride()}"
                )
            extent += stride * (size - 1)


def check_swa_ring_store(
    values: torch.Tensor, write_slot: torch.Tensor, swa_cache: torch.Tensor, cast_back: torch.Tensor | None
) -> None:
    """Raise ValueError unless the arguments of swa_ring_store fit each other."""
    _expect_cache(swa_cache, values, "values")
    expect("write_slot", write_slot, INT64, (values.shape[-2],), values.device)
    if cast_back is not None:
        expect("cast_back", cast_back, values.dtype, tuple(values.shape), values.device)


def check_swa_ring_load(swa_cache: torch.Tensor, load_plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
    """Raise ValueError unless the arguments of swa_ring_load fit each other."""
    _expect_cache(swa_cache, out, "out")
    whole_number("window", window, 1)
    rows = load_plan.shape[0] if load_plan.dim() else 0
    expect("load_plan", load_plan, INT32, (rows, 3, 4), out.device)
    if out.shape[-2] < whole_number("B * window", rows * window, 0):
        raise ValueError(
            f"Invalid shape of out: expected B * window = {rows * window} rows or more, got {out.shape[-2]}"
        )


def check_swa_decode_attention(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    tokens_per_step: int,
) -> None:
    """Raise ValueError unless the arguments of swa_decode_attention fit each other and, on CUDA, the kernel."""
    if q.dim() != 3:
        raise ValueError(f"Invalid shape of q: expected [T, H, D], got {list(q.shape)}")
    tokens, heads, width = q.shape
    expect("q", q, q.dtype, tuple(q.shape), q.device)
    _expect_cache(swa_cache, q.view(tokens * heads, width), "q")
    whole_number("T * H", tokens * heads, 0)
    columns = kv_swa_index.shape[1] if kv_swa_index.dim() == 2 else 0
    expect("kv_swa_index", kv_swa_index, INT32, (tokens, columns), q.device)
    expect("swa_len", swa_len, INT32, (tokens,), q.device)
    if sink is not None:
        expect("sink", sink, torch.float32, (heads,), q.device)
    expect("out", out, q.dtype, tuple(q.shape), q.device)
    expect("lse", lse, torch.float32, (tokens, heads), q.device)
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale={softmax_scale} must be above 0")
    whole_number("tokens_per_step", tokens_per_step, 1)
    if q.device.type == "cuda":
        _expect_attention_kernel(q, swa_cache)


def _expect_attention_kernel(q: torch.Tensor, swa_cache: torch.Tensor) -> None:
    """Check what only the kernel asks for."""
    if q.dtype is not torch.bfloat16:
        raise ValueError(f"Invalid dtype of q: the kernel takes {torch.bfloat16}, got {q.dtype}")
    tile, width = decode_attention.HEADS_OF_A_TILE, decode_attention.WIDTH
    if q.shape[1] % tile or q.shape[2] != width:
        raise ValueError(
            f"Invalid shape of q: the kernel takes [T, H, {width}], H a multiple of {tile}, got {list(q.shape)}"
        )
    if swa_cache.shape[1] > decode_attention.LARGEST_RING:
        raise ValueError(
            f"Invalid shape of swa_cache: the kernel takes rings of at most {decode_attention.LARGEST_RING} slots, "
            f"got {swa_cache.shape[1]}"
        )
    if not decode_attention.fits(q.device):
        raise ValueError(
            f"{q.device} has less shared memory a block than the {decode_attention.SHARED_BYTES} B of a ring"
        )


def check_swa_ring_snapshot(
    records: torch.Tensor,
    tickets: torch.Tensor,
    marks: torch.Tensor,
    states: torch.Tensor,
    snapshots: torch.Tensor,
    slots: torch.Tensor,
    taken: torch.Tensor,
    plan: torch.Tensor,
    progress: torch.Tensor,
    skipped: torch.Tensor,
    overshoot: int,
) -> None:
    """Raise ValueError unless the arguments of swa_ring_snapshot fit each other."""
    expect_table(records, None, 1)
    device, rows = records.device, tickets.numel() // 4
    expect("tickets", tickets, INT32, (rows, 4), device)
    expect("marks", marks, INT32, (rows,), device)
    if snapshots.dim() != 2 or not snapshots.numel():
        raise ValueError(f"Invalid shape of snapshots: expected [N, state bytes], got {list(snapshots.shape)}")
    count, state_bytes = snapshots.shape
    expect("snapshots", snapshots, torch.uint8, (count, state_bytes), device)
    least = max(1, records.shape[0])
    if states.dim() != 2 or states.shape[0] < least or states.shape[1] != state_bytes:
        expected = f"[{least} or more, {state_bytes}]"
        raise ValueError(f"Invalid shape of states: expected {expected}, got {list(states.shape)}")
    expect("states", states[0], torch.uint8, (state_bytes,), device)
    expect("slots", slots, INT64, (count, SLOT_WORDS), device)
    expect("taken", taken, INT64, (count,), device)
    expect("plan", plan, INT64, (count, PLAN_WORDS), device)
    expect("progress", progress, INT64, (PROGRESS_WORDS,), device)
    expect("skipped", skipped, INT64, (1,), device)
    whole_number("overshoot", overshoot, 0)
