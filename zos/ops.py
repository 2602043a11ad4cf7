"""The only switchboard: the `torch.ops.zos.*` operators, CPU -> host_fallback, CUDA -> device_kernels.

Every operator mutates its arguments and returns nothing, checks shape, dtype, device and contiguity before anything is launched
(ValueError naming argument, expectation and value), runs on torch's current stream of the tensors' device, and may be captured.
A dimension in the tables below: B rows, T token places, W window, Q tokens per step, S states, N compression rings.

prepare_v4_decode_metadata
    records int32 [S, 16] (columns error and error_value are written), state_ids int32 [B], token_ids int64 [S, Q] or None; then the
    outputs of `zos.DecodeMetadata` by name; compression_write_slot and compression_index int64 [N, T] (rows may be strided);
    tickets int32 [B, 4]; counters int64 [4] (stale, duplicate, deferred, errors), added to; chunk_places
    int32 [ceil(B / 256) or more], workspace; the N rings' ratios and entries; window, ring, tokens_per_step, packed.
commit
    records, token_ids, tickets, num_kept int32 [B], finished bool [B] or None, next_tokens int64 [B, Q] or None, counters,
    tokens_per_step, max_prefill_tokens.
apply_table_edits
    records, token_ids, batches int32 [batch rows, max_batch], edits int32 [words] (see `zos.edits`), num_edits, num_batches,
    tokens_per_step, max_prefill_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import device_kernels.commit
import device_kernels.decode_metadata
import device_kernels.table_edits
import host_fallback.commit
import host_fallback.decode_metadata
import host_fallback.table_edits
from device_kernels.decode_metadata import MAX_COMPRESSIONS, chunk_count
from zos.arguments import INT32_LARGEST, whole_number
from zos.table import RECORD_WORDS

EDIT_WORDS = 16
INT32, INT64, BOOL = torch.int32, torch.int64, torch.bool

KERNELS = (
    *device_kernels.decode_metadata.KERNELS,
    *device_kernels.commit.KERNELS,
    *device_kernels.table_edits.KERNELS,
)

_LIBRARY = torch.library.Library("zos", "DEF")


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype is dtype and tensor.shape == shape and tensor.device == device and tensor.is_contiguous():
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
    if records.data_ptr() % 16:
        raise ValueError(f"Invalid address of records: expected a multiple of 16, got {records.data_ptr():#x}")
    whole_number("tokens_per_step", tokens_per_step, 1)
    if token_ids is not None:
        _expect("token_ids", token_ids, INT64, (records.shape[0], tokens_per_step), records.device)


def check_prepare_v4_decode_metadata(
    records: torch.Tensor,
    state_ids: torch.Tensor,
    token_ids: torch.Tensor | None,
    kv_swa_index_offset_len: torch.Tensor,
    kv_swa_index: torch.Tensor,
    kv_swa_full_index_pivots: torch.Tensor,
    swa_len: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor | None,
    swa_write_slot: torch.Tensor,
    token_row: torch.Tensor,
    token_state_id: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    num_tokens: torch.Tensor,
    compression_write_slot: torch.Tensor,
    compression_index: torch.Tensor,
    tickets: torch.Tensor,
    counters: torch.Tensor,
    chunk_places: torch.Tensor,
    compression_ratios: Sequence[int],
    compression_entries: Sequence[int],
    window: int,
    ring: int,
    tokens_per_step: int,
    packed: bool,
) -> None:
    """Raise ValueError unless the arguments of prepare_v4_decode_metadata fit each other."""
    _expect_table(records, token_ids, tokens_per_step)
    device, rows, places = records.device, state_ids.numel(), positions.numel()
    whole_number("window", window, 1)
    whole_number("ring", ring, 1)
    if ring < window + tokens_per_step - 1:
        raise ValueError(f"ring={ring} is too short for window={window} and tokens_per_step={tokens_per_step}")
    if records.shape[0] * ring > INT32_LARGEST:
        raise ValueError(f"capacity * ring = {records.shape[0] * ring} must be below 2^31")
    if rows * (window + tokens_per_step) > INT32_LARGEST:
        raise ValueError(f"B * (window + tokens_per_step) = {rows * (window + tokens_per_step)} must be below 2^31")
    most = rows * tokens_per_step
    least = min(tokens_per_step, most) if packed else most
    if not least <= places <= most:
        raise ValueError(f"Invalid shape of positions: expected T in {least} … {most} for B = {rows}, got {places}")
    if (token_ids is None) != (input_ids is None):
        raise ValueError("token_ids and input_ids must be given together or not at all")
    for name, tensor, dtype, shape in (
        ("state_ids", state_ids, INT32, (rows,)),
        ("kv_swa_index_offset_len", kv_swa_index_offset_len, INT32, (places, 2)),
        ("kv_swa_index", kv_swa_index, INT32, (places, window)),
        ("kv_swa_full_index_pivots", kv_swa_full_index_pivots, INT32, (places, 4)),
        ("swa_len", swa_len, INT32, (places,)),
        ("positions", positions, INT64, (places,)),
        ("swa_write_slot", swa_write_slot, INT64, (places,)),
        ("token_row", token_row, INT32, (places,)),
        ("token_state_id", token_state_id, INT32, (places,)),
        ("cu_seqlens_q", cu_seqlens_q, INT32, (rows + 1,)),
        ("seqlens_q", seqlens_q, INT32, (rows,)),
        ("seqlens_k", seqlens_k, INT32, (rows,)),
        ("num_tokens", num_tokens, INT32, (1,)),
        ("tickets", tickets, INT32, (rows, 4)),
        ("counters", counters, INT64, (4,)),
    ):
        _expect(name, tensor, dtype, shape, device)
    if input_ids is not None:
        _expect("input_ids", input_ids, INT64, (places,), device)
    if len(compression_ratios) != len(compression_entries) or len(compression_ratios) > MAX_COMPRESSIONS:
        raise ValueError(
            f"{len(compression_ratios)} compression_ratios and {len(compression_entries)} compression_entries: "
            f"expected as many of each, {MAX_COMPRESSIONS} at most"
        )
    for ratio, entries in zip(compression_ratios, compression_entries, strict=True):
        whole_number("compression_ratios", ratio, 1)
        whole_number("compression_entries", entries, 1)
        if entries < ratio + tokens_per_step - 1:
            raise ValueError(f"a compression ring of {entries} entries is too short for ratio {ratio}")
    for name, tensor in (
        ("compression_write_slot", compression_write_slot),
        ("compression_index", compression_index),
    ):
        if tensor.dim() != 2 or tensor.shape[0] != len(compression_ratios):
            raise ValueError(
                f"Invalid shape of {name}: expected [{len(compression_ratios)}, T], got {list(tensor.shape)}"
            )
        if tensor.stride(0) != compression_write_slot.stride(0):
            raise ValueError(
                f"Invalid stride of {name}: expected that of compression_write_slot, got {tensor.stride()}"
            )
        _expect(name, tensor[:1], INT64, (min(1, len(compression_ratios)), places), device)
    if chunk_places.dtype is not INT32 or chunk_places.device != device or chunk_places.numel() < chunk_count(rows):
        raise ValueError(f"chunk_places must be int32 [{chunk_count(rows)} or more] on {device}")
    # The kernel stores these as vectors; a less aligned view would fault on the device instead of here.
    for name, tensor, unit in (
        ("kv_swa_index_offset_len", kv_swa_index_offset_len, 8),
        ("kv_swa_full_index_pivots", kv_swa_full_index_pivots, 16),
        ("tickets", tickets, 16),
    ):
        if tensor.data_ptr() % unit:
            raise ValueError(f"Invalid address of {name}: expected a multiple of {unit}, got {tensor.data_ptr():#x}")


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
) -> None:
    """Raise ValueError unless the arguments of commit fit each other."""
    _expect_table(records, token_ids, tokens_per_step)
    whole_number("max_prefill_tokens", max_prefill_tokens, 1)
    device, rows = records.device, tickets.numel() // 4
    _expect("tickets", tickets, INT32, (rows, 4), device)
    if tickets.data_ptr() % 16:
        raise ValueError(f"Invalid address of tickets: expected a multiple of 16, got {tickets.data_ptr():#x}")
    _expect("num_kept", num_kept, INT32, (rows,), device)
    if finished is not None:
        _expect("finished", finished, BOOL, (rows,), device)
    if next_tokens is not None:
        _expect("next_tokens", next_tokens, INT64, (rows, tokens_per_step), device)
        if token_ids is None:
            raise ValueError("next_tokens given, but the table carries no tokens (carry_tokens=False)")
    _expect("counters", counters, INT64, (4,), device)


def check_apply_table_edits(
    records: torch.Tensor,
    token_ids: torch.Tensor | None,
    batches: torch.Tensor,
    edits: torch.Tensor,
    num_edits: int,
    num_batches: int,
    tokens_per_step: int,
    max_prefill_tokens: int,
) -> None:
    """Raise ValueError unless the arguments of apply_table_edits fit each other."""
    _expect_table(records, token_ids, tokens_per_step)
    whole_number("max_prefill_tokens", max_prefill_tokens, 1)
    if batches.dim() != 2:
        raise ValueError(f"Invalid shape of batches: expected [batch rows, max_batch], got {list(batches.shape)}")
    _expect("batches", batches, INT32, tuple(batches.shape), records.device)
    _expect("edits", edits, INT32, (edits.numel(),), records.device)
    if edits.data_ptr() % 8 or edits.numel() % 2:
        raise ValueError("edits must be a whole number of int64 at an address that is a multiple of 8")
    if num_edits < 0 or num_batches < 0 or (num_edits + num_batches) * EDIT_WORDS > edits.numel():
        raise ValueError(f"edits holds {edits.numel()} words, too few for {num_edits} + {num_batches} edits")


def bind_prepare_v4_decode_metadata(**operands: Any) -> Callable[[], None]:
    """Check the arguments of prepare_v4_decode_metadata once and bind the operator to them; the result launches it.

    For arguments whose addresses stay, as a metadata slot's do: a launch then costs neither checks nor packing.
    """
    check_prepare_v4_decode_metadata(**operands)
    on_cuda = operands["records"].device.type == "cuda"
    package = (device_kernels if on_cuda else host_fallback).decode_metadata
    launch: Callable[[], None] = package.bind_prepare_v4_decode_metadata(**operands)
    return launch


_IMPLEMENTATIONS: dict[tuple[str, str], Callable[..., None]] = {}  # (operator, type of device)


def call(name: str, records: torch.Tensor, *arguments: Any) -> None:
    """Run an operator without torch's dispatcher, which costs more than the launch; the same check, the same launch."""
    _IMPLEMENTATIONS[name, records.device.type](records, *arguments)


def _define(schema: str, check: Callable[..., None], host: Callable[..., None], device: Callable[..., None]) -> None:
    """Register one operator: its schema, and an implementation for each kind of device behind the same check."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)

    def checked(launch: Callable[..., None]) -> Callable[..., None]:
        def implementation(*arguments: Any) -> None:
            check(*arguments)
            launch(*arguments)

        return implementation

    for kind, launch in (("cpu", host), ("cuda", device)):
        _IMPLEMENTATIONS[name, kind] = checked(launch)
        _LIBRARY.impl(name, _IMPLEMENTATIONS[name, kind], kind.upper())
    torch.library.register_fake(f"zos::{name}", lambda *arguments: None, lib=_LIBRARY)


_define(
    "prepare_v4_decode_metadata(Tensor(a!) records, Tensor state_ids, Tensor? token_ids, "
    "Tensor(b!) kv_swa_index_offset_len, Tensor(c!) kv_swa_index, Tensor(d!) kv_swa_full_index_pivots, "
    "Tensor(e!) swa_len, Tensor(f!) positions, Tensor(g!)? input_ids, Tensor(h!) swa_write_slot, "
    "Tensor(i!) token_row, Tensor(j!) token_state_id, Tensor(k!) cu_seqlens_q, Tensor(l!) seqlens_q, "
    "Tensor(m!) seqlens_k, Tensor(n!) num_tokens, Tensor(o!) compression_write_slot, "
    "Tensor(p!) compression_index, Tensor(q!) tickets, Tensor(r!) counters, Tensor(s!) chunk_places, "
    "int[] compression_ratios, int[] compression_entries, int window, int ring, int tokens_per_step, bool packed) -> ()",
    check_prepare_v4_decode_metadata,
    host_fallback.decode_metadata.prepare_v4_decode_metadata,
    device_kernels.decode_metadata.prepare_v4_decode_metadata,
)
_define(
    "commit(Tensor(a!) records, Tensor(b!)? token_ids, Tensor tickets, Tensor num_kept, Tensor? finished, "
    "Tensor? next_tokens, Tensor(c!) counters, int tokens_per_step, int max_prefill_tokens) -> ()",
    check_commit,
    host_fallback.commit.commit,
    device_kernels.commit.commit,
)
_define(
    "apply_table_edits(Tensor(a!) records, Tensor(b!)? token_ids, Tensor(c!) batches, Tensor edits, "
    "int num_edits, int num_batches, int tokens_per_step, int max_prefill_tokens) -> ()",
    check_apply_table_edits,
    host_fallback.table_edits.apply_table_edits,
    device_kernels.table_edits.apply_table_edits,
)
