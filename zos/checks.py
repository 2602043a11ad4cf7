"""Argument checks of the operators, before anything is launched: what all share, and those of the operators that write metadata.

`step_checks.py` and `ring_checks.py` have the others.
"""

from __future__ import annotations

from typing import Any

import torch

from device_kernels.decode_metadata import chunk_count
from device_kernels.metadata import MAX_COMPRESSIONS
from zos.arguments import INT32_LARGEST, whole_number
from zos.table import RECORD_WORDS

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


def expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless a tensor is contiguous, of this dtype, shape and device, and aligned as its kernels want it."""
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


def expect_table(records: torch.Tensor, token_ids: torch.Tensor | None, tokens_per_step: int) -> None:
    """Raise ValueError unless these are a table's tensors."""
    if records.dim() != 2:
        raise ValueError(f"Invalid shape of records: expected [S, {RECORD_WORDS}], got {list(records.shape)}")
    expect("records", records, INT32, (records.shape[0], RECORD_WORDS), records.device)
    whole_number("tokens_per_step", tokens_per_step, 1)
    if token_ids is not None:
        expect("token_ids", token_ids, INT64, (records.shape[0], tokens_per_step), records.device)


def _expect_metadata(
    operands: dict[str, Any], table: dict[str, tuple[torch.dtype, str]], least_places: int, most_places: int
) -> None:
    """Check what both prepares take: the table, the sizes, the outputs by `table` and the compression outputs."""
    records, token_ids = operands["records"], operands["token_ids"]
    window, ring, step = operands["window"], operands["ring"], operands["tokens_per_step"]
    expect_table(records, token_ids, step)
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
        expect(name, operands[name], dtype, shape, device)


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
    slots = operands["compression_write_slot"]  # the first that is looked at
    for name in ("compression_write_slot", "compression_index"):
        tensor = operands[name]
        if tensor.dim() != 2 or tensor.shape[0] != len(ratios):
            raise ValueError(f"Invalid shape of {name}: expected [{len(ratios)}, T], got {list(tensor.shape)}")
        if tensor.stride(0) != slots.stride(0):
            raise ValueError(
                f"Invalid stride of {name}: expected that of compression_write_slot, got {tensor.stride()}"
            )
        expect(name, tensor[:1], INT64, (min(1, len(ratios)), places), device)


def check_prepare_v4_decode_metadata(**operands: Any) -> None:
    """Raise ValueError unless the arguments of prepare_v4_decode_metadata fit each other."""
    rows, step = operands["state_ids"].numel(), operands["tokens_per_step"]
    most = rows * step
    _expect_metadata(operands, _DECODE, min(step, most) if operands["packed"] else most, most)
    workspace, device = operands["chunk_places"], operands["records"].device
    sound = workspace.dtype is INT32 and workspace.device == device and workspace.is_contiguous()
    if not sound or workspace.numel() < chunk_count(rows):
        raise ValueError(f"chunk_places must be contiguous int32 [{chunk_count(rows)} or more] on {device}")


def check_prepare_v4_prefill_metadata(**operands: Any) -> None:
    """Raise ValueError unless the arguments of prepare_v4_prefill_metadata fit each other."""
    most = operands["max_prefill_tokens"]
    whole_number("max_prefill_tokens", most, 1)
    _expect_metadata(operands, _PREFILL, most, most)


def check_prefill_tail(**operands: Any) -> None:
    """Raise ValueError unless the arguments of prefill_tail fit each other."""
    records, window, ring, step = (operands[name] for name in ("records", "window", "ring", "tokens_per_step"))
    expect_table(records, None, step)
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
    expect_table(records, None, step)
    whole_number("window", window, 1)
    whole_number("capacity * ring", records.shape[0] * ring, 0)
    if ring < window + step:
        raise ValueError(
            f"ring={ring} is too short for a non-causal block: window={window} and tokens_per_step={step} need {window + step}"
        )
    device, rows = records.device, tickets.numel() // 4
    expect("tickets", tickets, INT32, (rows, 4), device)
    if num_kept is not None:
        expect("num_kept", num_kept, INT32, (rows,), device)
    places = whole_number("B * tokens_per_step", rows * step, 0)
    index = operands["kv_swa_index"]
    columns = index.shape[1] if index.dim() == 2 else 0
    if columns < window + step or columns % INDEX_VECTOR:
        raise ValueError(
            f"Invalid shape of kv_swa_index: expected [{places}, {window + step} or more, a multiple of {INDEX_VECTOR}], "
            f"got {list(index.shape)}"
        )
    for name, (dtype, dimensions) in _BLOCK.items():
        expect(name, operands[name], dtype, (places, *map(int, dimensions)), device)
    expect("kv_swa_index", index, INT32, (places, columns), device)
    if index.data_ptr() % (INDEX_VECTOR * index.element_size()):
        raise ValueError(f"Invalid address of kv_swa_index: expected a multiple of 16, got {index.data_ptr():#x}")
