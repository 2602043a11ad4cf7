"""Argument checks of the operators: shape, dtype, device, stride and address, before anything is launched."""

from __future__ import annotations

from typing import Any

import torch

from device_kernels import decode_attention
from device_kernels.decode_metadata import chunk_count
from device_kernels.entry import DTYPE_NAMES
from device_kernels.metadata import MAX_COMPRESSIONS
from host_fallback.mailbox import MAIL_HEADER_WORDS, record_words
from host_fallback.ring_snapshot import PLAN_WORDS, PROGRESS_WORDS, SLOT_WORDS
from zos.arguments import INT32_LARGEST, whole_number
from zos.entry import EntryFormat
from zos.table import RECORD_WORDS

EDIT_WORDS = 16
BUFFER_HEADER_WORDS = 16
LEAST_BUFFER_WORDS = BUFFER_HEADER_WORDS + 16 * EDIT_WORDS  # a launch reads so much before it knows how much there is
BATCH_STATE_WORDS = 8
MOST_LAYERS = 65_535  # of a ring store or load: the grid's second axis
SCALE_BLOCK = EntryFormat.mxfp8().scale_block  # values that share a scale byte
INT32, INT64, BOOL = torch.int32, torch.int64, torch.bool

# name -> (dtype, dimensions): B rows, b = B + 1, T token places, W window, digits as they are
_BOTH_PREPARES = {
    "state_ids": (INT32, "B"),
    "kv_swa_index_offset_len": (INT32, "T2"),
    "kv_swa_full_index_pivots": (INT32, "T4"),
    "swa_len": (INT32, "T"),
    "positions": (INT64, "T"),
    "input_ids": (INT64, "T"),
    "swa_write_slot": (INT64, "T"),
    "token_row": (INT32, "T"),
    "token_state_id": (INT32, "T"),
    "cu_seqlens_q": (INT32, "b"),
    "seqlens_q": (INT32, "B"),
    "seqlens_k": (INT32, "B"),
    "num_tokens": (INT32, "1"),
    "tickets": (INT32, "B4"),
    "counters": (INT64, "4"),
}
_DECODE = {**_BOTH_PREPARES, "kv_swa_index": (INT32, "TW")}
_PREFILL = {
    **_BOTH_PREPARES,
    "swa_load_plan": (INT32, "B34"),
    "last_token_index": (INT64, "B"),
    "kv_swa_full_index": (INT32, "TW"),
}
_TAIL = {
    "tickets": (INT32, "B4"),
    "batch_cu_seqlens_q": (INT32, "b"),
    "token_index": (INT64, "T"),
    "positions": (INT64, "T"),
    "kv_swa_full_index_pivots": (INT32, "T4"),
    "swa_len": (INT32, "T"),
    "swa_write_slot": (INT64, "T"),
    "token_row": (INT32, "T"),
    "cu_seqlens_q": (INT32, "b"),
    "num_tokens": (INT32, "1"),
    "swa_load_plan": (INT32, "B34"),
    "swa_valid_start": (INT32, "B"),
    "last_token_index": (INT64, "B"),
}
_BLOCK = {  # by token place of a block view; dimensions after it
    "kv_swa_index_offset_len": (INT32, "2"),
    "swa_len": (INT32, ""),
    "positions": (INT64, ""),
    "swa_write_slot": (INT64, ""),
    "token_row": (INT32, ""),
    "token_state_id": (INT32, ""),
}
INDEX_VECTOR = 4  # columns of a block view's index that are stored at once
# The kernels load and store these as vectors; a less aligned view would fault on the device instead of here.
_ALIGNMENT = {
    "records": 16,
    "tickets": 16,
    "kv_swa_index_offset_len": 8,
    "kv_swa_full_index_pivots": 16,
    "swa_load_plan": 16,
    "load_plan": 16,
    "q": 16,
    "edits": 16,
    "ready": 8,
    "results": 8,
    "mailbox": 8,
}


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype is dtype and tensor.shape == shape and tensor.device == device and tensor.is_contiguous():
        unit = _ALIGNMENT.get(name, 1)
        if tensor.data_ptr() % unit:
            raise ValueError(f"Invalid address of {name}: expected a multiple of {unit}, got {tensor.data_ptr():#x}")
        return
    if tensor.dtype is not dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"Invalid shape of {name}: expected {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"Invalid device of {name}: expected {device}, got {tensor.device}")
    raise ValueError(f"Invalid stride of {name}: expected contiguous, got {tensor.stride()}")


def _expect_table(records: torch.Tensor, token_ids: torch.Tensor | None, tokens_per_step: int) -> None:
    if records.dim() != 2:
        raise ValueError(f"Invalid shape of records: expected [S, {RECORD_WORDS}], got {list(records.shape)}")
    _expect("records", records, INT32, (records.shape[0], RECORD_WORDS), records.device)
    whole_number("tokens_per_step", tokens_per_step, 1)
    if token_ids is not None:
        _expect("token_ids", token_ids, INT64, (records.shape[0], tokens_per_step), records.device)


def _expect_metadata(
    operands: dict[str, Any], table: dict[str, tuple[torch.dtype, str]], least_places: int, most_places: int
) -> None:
    """Check what both prepares take: the table, the sizes, the outputs by `table` and the compression outputs."""
    records, token_ids = operands["records"], operands["token_ids"]
    window, ring, step = operands["window"], operands["ring"], operands["tokens_per_step"]
    _expect_table(records, token_ids, step)
    device, rows, places = records.device, operands["state_ids"].numel(), operands["positions"].numel()
    whole_number("window", window, 1)
    whole_number("ring", ring, 1)
    if ring < window + step - 1:
        raise ValueError(f"ring={ring} is too short for window={window} and tokens_per_step={step}")
    if records.shape[0] * ring > INT32_LARGEST:
        raise ValueError(f"capacity * ring = {records.shape[0] * ring} must be below 2^31")
    if rows * window + places > INT32_LARGEST or rows * step > INT32_LARGEST:
        raise ValueError(f"B * window + T = {rows * window + places} and B * tokens_per_step must be below 2^31")
    if not least_places <= places <= most_places:
        expected = f"T in {least_places} … {most_places} for B = {rows}"
        raise ValueError(f"Invalid shape of positions: expected {expected}, got {places}")
    if (token_ids is None) != (operands["input_ids"] is None):
        raise ValueError("token_ids and input_ids must be given together or not at all")
    _expect_by_table(operands, table, rows, places, device)
    _expect_compression(operands, places, device)


def _expect_by_table(
    operands: dict[str, Any], table: dict[str, tuple[torch.dtype, str]], rows: int, places: int, device: torch.device
) -> None:
    sizes = {"B": rows, "b": rows + 1, "T": places, "W": operands["window"]}
    for name, (dtype, dimensions) in table.items():
        if operands[name] is None and name in ("input_ids", "kv_swa_full_index"):
            continue
        shape = tuple(sizes[d] if d in sizes else int(d) for d in dimensions)
        _expect(name, operands[name], dtype, shape, device)


def _expect_compression(operands: dict[str, Any], places: int, device: torch.device) -> None:
    ratios, entries = operands["compression_ratios"], operands["compression_entries"]
    if len(ratios) != len(entries) or len(ratios) > MAX_COMPRESSIONS:
        raise ValueError(
            f"{len(ratios)} compression_ratios and {len(entries)} compression_entries: expected as many of each, "
            f"{MAX_COMPRESSIONS} at most"
        )
    for ratio, size in zip(ratios, entries, strict=True):
        whole_number("compression_ratios", ratio, 1)
        whole_number("compression_entries", size, 1)
        if size < ratio + operands["tokens_per_step"] - 1:
            raise ValueError(f"a compression ring of {size} entries is too short for ratio {ratio}")
    stride = operands["compression_write_slot"].stride(0)
    for name in ("compression_write_slot", "compression_index"):
        tensor = operands[name]
        if tensor.dim() != 2 or tensor.shape[0] != len(ratios):
            raise ValueError(f"Invalid shape of {name}: expected [{len(ratios)}, T], got {list(tensor.shape)}")
        if tensor.stride(0) != stride:
            raise ValueError(
                f"Invalid stride of {name}: expected that of compression_write_slot, got {tensor.stride()}"
            )
        _expect(name, tensor[:1], INT64, (min(1, len(ratios)), places), device)


def check_prepare_v4_decode_metadata(**operands: Any) -> None:
    """Raise ValueError unless the arguments of prepare_v4_decode_metadata fit each other."""
    rows, step = operands["state_ids"].numel(), operands["tokens_per_step"]
    most = rows * step
    _expect_metadata(operands, _DECODE, min(step, most) if operands["packed"] else most, most)
    workspace, device = operands["chunk_places"], operands["records"].device
    if workspace.dtype is not INT32 or workspace.device != device or workspace.numel() < chunk_count(rows):
        raise ValueError(f"chunk_places must be int32 [{chunk_count(rows)} or more] on {device}")


def check_prepare_v4_prefill_metadata(**operands: Any) -> None:
    """Raise ValueError unless the arguments of prepare_v4_prefill_metadata fit each other."""
    most = operands["max_prefill_tokens"]
    whole_number("max_prefill_tokens", most, 1)
    _expect_metadata(operands, _PREFILL, most, most)


def check_prefill_tail(**operands: Any) -> None:
    """Raise ValueError unless the arguments of prefill_tail fit each other."""
    records, window, ring, step = (operands[name] for name in ("records", "window", "ring", "tokens_per_step"))
    _expect_table(records, None, step)
    whole_number("window", window, 1)
    whole_number("capacity * ring", records.shape[0] * ring, 0)
    if ring < window + step - 1:
        raise ValueError(f"ring={ring} is too short for window={window} and tokens_per_step={step}")
    rows, places = operands["tickets"].numel() // 4, operands["positions"].numel()
    whole_number("B * window + T'", rows * window + places, 0)
    if places > rows * max(window, step):
        most = f"at most B * max(window, tokens_per_step) = {rows * max(window, step)}"
        raise ValueError(f"Invalid shape of positions: expected {most}, got {places}")
    _expect_by_table(operands, _TAIL, rows, places, records.device)


def check_view_block(
    records: torch.Tensor, tickets: torch.Tensor, num_kept: torch.Tensor | None, **operands: Any
) -> None:
    """Raise ValueError unless the arguments of view_block fit each other."""
    window, ring, step = operands["window"], operands["ring"], operands["tokens_per_step"]
    _expect_table(records, None, step)
    whole_number("window", window, 1)
    whole_number("capacity * ring", records.shape[0] * ring, 0)
    if ring < window + step:
        raise ValueError(
            f"ring={ring} is too short for a non-causal block: window={window} and tokens_per_step={step} need {window + step}"
        )
    device, rows = records.device, tickets.numel() // 4
    _expect("tickets", tickets, INT32, (rows, 4), device)
    if num_kept is not None:
        _expect("num_kept", num_kept, INT32, (rows,), device)
    places = whole_number("B * tokens_per_step", rows * step, 0)
    index = operands["kv_swa_index"]
    columns = index.shape[1] if index.dim() == 2 else 0
    if columns < window + step or columns % INDEX_VECTOR:
        raise ValueError(
            f"Invalid shape of kv_swa_index: expected [{places}, {window + step} or more, a multiple of {INDEX_VECTOR}], "
            f"got {list(index.shape)}"
        )
    for name, (dtype, dimensions) in _BLOCK.items():
        _expect(name, operands[name], dtype, (places, *map(int, dimensions)), device)
    _expect("kv_swa_index", index, INT32, (places, columns), device)
    if index.data_ptr() % (INDEX_VECTOR * index.element_size()):
        raise ValueError(f"Invalid address of kv_swa_index: expected a multiple of 16, got {index.data_ptr():#x}")


def check_commit(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    tickets: torch.Tensor,
    num_kept: torch.Tensor,
    finished: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    counters: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
    batch: torch.Tensor | None = None,
    batch_state: torch.Tensor | None = None,
    ready: torch.Tensor | None = None,
    results: torch.Tensor | None = None,
    results_state: torch.Tensor | None = None,
    kept_tokens: torch.Tensor | None = None,
    prefill: bool = False,
    marks: torch.Tensor | None = None,
    snapshot_every: int = 0,
    window: int = 0,
    ring: int = 0,
) -> None:
    """Raise ValueError unless the arguments of commit fit each other."""
    _expect_table(records, token_ids, tokens_per_step)
    whole_number("max_prefill_tokens", max_prefill_tokens, 1)
    device, rows = records.device, tickets.numel() // 4
    _expect("tickets", tickets, INT32, (rows, 4), device)
    _expect("counters", counters, INT64, (4,), device)
    check_step_result(
        device, rows, tokens_per_step, token_ids is not None, results, num_kept, finished, next_tokens, kept_tokens
    )
    whole_number("snapshot_every", snapshot_every, 0)
    if marks is not None:
        _expect("marks", marks, INT32, (rows,), device)
        whole_number("window", window, 1)
        whole_number("ring", ring, window)
    if ready is None and results is None:
        return
    if batch_state is None:
        raise ValueError("ready or results given without the batch_state of the slot")
    _expect("batch_state", batch_state, INT64, (BATCH_STATE_WORDS,), device)
    if batch is not None:
        _expect("batch", batch, INT32, (max(rows, batch.numel()),), device)
    if ready is not None:
        if batch is None:
            raise ValueError("ready given without the batch that it refills")
        whole_number("entries of ready", ready.numel() // 2, 1)
        _expect("ready", ready, INT32, (ready.numel() // 2, 2), device)
    if results is not None:
        if results_state is None:
            raise ValueError("results given without results_state")
        _expect_results(results, results_state)
        if results.device != device:
            raise ValueError(f"Invalid device of results: expected {device}, got {results.device}")


def check_step_result(
    device: torch.device,
    rows: int,
    tokens_per_step: int,
    carries_tokens: bool,
    results: torch.Tensor | None,
    num_kept: torch.Tensor,
    finished: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    kept_tokens: torch.Tensor | None,
) -> None:
    """Raise ValueError unless what a step found out fits its rows: the arguments of commit that differ from step to step."""
    _expect("num_kept", num_kept, INT32, (rows,), device)
    if finished is not None:
        _expect("finished", finished, BOOL, (rows,), device)
    if next_tokens is not None:
        _expect("next_tokens", next_tokens, INT64, (rows, tokens_per_step), device)
        if not carries_tokens:
            raise ValueError("next_tokens given, but the table carries no tokens (carry_tokens=False)")
    if kept_tokens is not None:
        _expect("kept_tokens", kept_tokens, INT64, (rows, tokens_per_step), device)
    if results is not None and results.dim() == 2:
        least = record_words(rows, 0 if kept_tokens is None else tokens_per_step)
        if results.shape[1] < least:
            raise ValueError(f"Invalid shape of results: expected [M, {least} or more], got {list(results.shape)}")


def _expect_results(results: torch.Tensor, results_state: torch.Tensor) -> None:
    if results.dim() != 2 or results.shape[0] < 1 or results.shape[1] % 2:
        raise ValueError(
            f"Invalid shape of results: expected [M, words], words a multiple of 2, got {list(results.shape)}"
        )
    _expect("results", results, INT32, tuple(results.shape), results.device)
    _expect("results_state", results_state, INT64, (2,), results.device)


def check_publish_results(results: torch.Tensor, results_state: torch.Tensor, mailbox: torch.Tensor) -> None:
    """Raise ValueError unless the arguments of publish_results fit each other."""
    _expect_results(results, results_state)
    records, words = results.shape
    _expect("mailbox", mailbox, INT32, (records, MAIL_HEADER_WORDS + words), results.device)


def check_apply_table_edits(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    batches: torch.Tensor,
    edits: torch.Tensor,
    batch_states: torch.Tensor,
    ready: torch.Tensor | None,
    applied: torch.Tensor,
    applied_on_host: torch.Tensor,
    tokens_per_step: int,
    max_prefill_tokens: int,
    snapshot_every: int = 0,
) -> None:
    """Raise ValueError unless the arguments of apply_table_edits fit each other."""
    _expect_table(records, token_ids, tokens_per_step)
    whole_number("snapshot_every", snapshot_every, 0)
    whole_number("max_prefill_tokens", max_prefill_tokens, 1)
    device = records.device
    if batches.dim() != 2:
        raise ValueError(f"Invalid shape of batches: expected [batch rows, max_batch], got {list(batches.shape)}")
    _expect("batches", batches, INT32, tuple(batches.shape), device)
    if edits.dim() != 2 or edits.shape[0] < 1 or edits.shape[1] < LEAST_BUFFER_WORDS or edits.shape[1] % 4:
        raise ValueError(
            f"Invalid shape of edits: expected [buffers, words], words a multiple of 4 and {LEAST_BUFFER_WORDS} or more, "
            f"got {list(edits.shape)}"
        )
    _expect("edits", edits, INT32, tuple(edits.shape), device)
    _expect("batch_states", batch_states, INT64, (batches.shape[0], BATCH_STATE_WORDS), device)
    if ready is not None:
        entries = ready.shape[1] if ready.dim() == 3 else 0
        whole_number("entries of ready", entries, 1)
        _expect("ready", ready, INT32, (batches.shape[0], entries, 2), device)
    _expect("applied", applied, INT64, (1,), device)
    _expect("applied_on_host", applied_on_host, INT64, (1,), device)


def _expect_cache(swa_cache: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Check a cache view against the [T, D] or, of several layers, [L, T, D] tensor on its other side."""
    if values.dtype not in DTYPE_NAMES:
        raise ValueError(f"Invalid dtype of {name}: expected float32, float16 or bfloat16, got {values.dtype}")
    if values.dim() not in (2, 3) or values.shape[-1] < SCALE_BLOCK or values.shape[-1] % SCALE_BLOCK:
        raise ValueError(
            f"Invalid shape of {name}: expected [T, D] or [L, T, D], D a multiple of {SCALE_BLOCK}, "
            f"got {list(values.shape)}"
        )
    _expect(name, values, values.dtype, tuple(values.shape), values.device)
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
    _expect("write_slot", write_slot, INT64, (values.shape[-2],), values.device)
    if cast_back is not None:
        _expect("cast_back", cast_back, values.dtype, tuple(values.shape), values.device)


def check_swa_ring_load(swa_cache: torch.Tensor, load_plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
    """Raise ValueError unless the arguments of swa_ring_load fit each other."""
    _expect_cache(swa_cache, out, "out")
    whole_number("window", window, 1)
    rows = load_plan.shape[0] if load_plan.dim() else 0
    _expect("load_plan", load_plan, INT32, (rows, 3, 4), out.device)
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
    _expect("q", q, q.dtype, tuple(q.shape), q.device)
    _expect_cache(swa_cache, q.view(tokens * heads, width), "q")
    whole_number("T * H", tokens * heads, 0)
    columns = kv_swa_index.shape[1] if kv_swa_index.dim() == 2 else 0
    _expect("kv_swa_index", kv_swa_index, INT32, (tokens, columns), q.device)
    _expect("swa_len", swa_len, INT32, (tokens,), q.device)
    if sink is not None:
        _expect("sink", sink, torch.float32, (heads,), q.device)
    _expect("out", out, q.dtype, tuple(q.shape), q.device)
    _expect("lse", lse, torch.float32, (tokens, heads), q.device)
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
    _expect_table(records, None, 1)
    device, rows = records.device, tickets.numel() // 4
    _expect("tickets", tickets, INT32, (rows, 4), device)
    _expect("marks", marks, INT32, (rows,), device)
    if snapshots.dim() != 2 or not snapshots.numel():
        raise ValueError(f"Invalid shape of snapshots: expected [N, state bytes], got {list(snapshots.shape)}")
    count, state_bytes = snapshots.shape
    _expect("snapshots", snapshots, torch.uint8, (count, state_bytes), device)
    least = max(1, records.shape[0])
    if states.dim() != 2 or states.shape[0] < least or states.shape[1] != state_bytes:
        expected = f"[{least} or more, {state_bytes}]"
        raise ValueError(f"Invalid shape of states: expected {expected}, got {list(states.shape)}")
    _expect("states", states[0], torch.uint8, (state_bytes,), device)
    _expect("slots", slots, INT64, (count, SLOT_WORDS), device)
    _expect("taken", taken, INT64, (count,), device)
    _expect("plan", plan, INT64, (count, PLAN_WORDS), device)
    _expect("progress", progress, INT64, (PROGRESS_WORDS,), device)
    _expect("skipped", skipped, INT64, (1,), device)
    whole_number("overshoot", overshoot, 0)
