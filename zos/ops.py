"""The only switchboard: the `torch.ops.zos.*` operators, CPU -> host_fallback, CUDA -> device_kernels.

Every operator mutates its arguments and returns nothing, checks shape, dtype, device and contiguity before anything is launched
(ValueError naming argument, expectation and value), runs on torch's current stream of the tensors' device, and may be captured.
A dimension in the tables below: B rows, T token places, W window, Q tokens per step, S states, N compression rings.

prepare_v4_decode_metadata
    records int32 [S, 16] (columns error and error_value are written), state_ids int32 [B], token_ids int64 [S, Q] or None; then the
    outputs of `zos.DecodeMetadata` by name; compression_write_slot and compression_index int64 [N, T] (rows may be strided);
    tickets int32 [B, 4]; counters int64 [4] (stale, duplicate, deferred, errors), added to; chunk_places
    int32 [ceil(B / 256) or more], workspace; the N rings' ratios and entries; window, ring, tokens_per_step, packed.
prepare_v4_prefill_metadata
    The same but for kv_swa_index, chunk_places and packed; and swa_load_plan int32 [B, 3, 4], last_token_index int64 [B],
    kv_swa_full_index int32 [T, W] or None, max_prefill_tokens (= T).
prefill_tail
    records, tickets int32 [B, 4], batch_cu_seqlens_q int32 [B + 1] (the prefill's cu_seqlens_q); then the outputs of
    `zos.PrefillTail` by name, of T' places; window, ring, tokens_per_step. Writes its outputs only.
view_block
    records, tickets int32 [B, 4], num_kept int32 [B] or None; then the outputs of `zos.BlockView` by name, of B * Q token places;
    window, ring (window + Q or more), tokens_per_step. Writes its outputs only.
swa_ring_store
    values float32, float16 or bfloat16 [T, D] (D a multiple of 32), write_slot int64 [T] (state * R + slot; others, -1 among them,
    are skipped; no slot twice), swa_cache uint8 [S, R, 1, D + D / 32] (strides of states and slots free), cast_back like values or
    None: what a reader of the ring will see. Several layers in one launch: values [L, T, D] and swa_cache [L, S, R, 1, D + D / 32].
swa_ring_load
    swa_cache, load_plan int32 [B, 3, 4], out float32, float16 or bfloat16 [B * window or more, D], of which the first
    B * window rows are written, window. Several layers in one launch: swa_cache [L, S, R, 1, D + D / 32] and out [L, rows, D].
swa_decode_attention
    q [T, H, D], swa_cache uint8 [S, R, 1, D + D / 32], kv_swa_index int32 [T, K] (state * R + slot, all of one state; -1: skip) and
    swa_len int32 [T] (columns from there on are not read), as prepare writes them; sink float32 [H] or None: a score that takes its
    share of the softmax and has no value; out [T, H, D] like q; lse float32 [T, H]: log of the sum of exp(score), the sink not
    counted. A token without keys: zeros and -inf; one whose index is nonsense: NaN. softmax_scale; tokens_per_step: neighbouring
    tokens that are likely of one state. On CUDA q is bfloat16, D 512, H a multiple of 16, R at most 144; on the CPU q as for
    swa_ring_store.
commit
    records, token_ids, tickets, num_kept int32 [B], finished bool [B] or None, next_tokens int64 [B, Q] or None, counters,
    tokens_per_step, max_prefill_tokens. With a ready queue or a mailbox also batch int32 [B or more] (the whole batch) and
    batch_state int64 [8] (version, refused edits, ready entries taken, appended, workspace) of the slot's decode batch; ready
    int32 [K, 2] (state_id, generation), entry n at n % K; results int32 [M, words], record n at n % M
    (device_kernels/results.cuh); results_state int64 [2] (records committed, published); kept_tokens int64 [B, Q]; prefill:
    whether the tickets are a prefill's. marks int32 [B]: the boundary, a multiple of snapshot_every (0: off), at which a row's
    state is worth a snapshot, or -1; window and ring, which say whether it still is whole.
publish_results
    results, results_state, mailbox int32 [M, 8 + words]: (head, tail, checksum, payload words, -, -), then the payload.
swa_ring_snapshot
    records, tickets int32 [B, 4] and marks int32 [B] as commit left them (marks become -1), states uint8 [S or more, bytes] (rows
    strided), snapshots uint8 [N, bytes]: marked rows, in row order, get the free slots, lowest first. slots int64 [N, 8], seen by
    both sides: (number of the snapshot there, number that the host has given back, state_id, generation, boundary, head, check
    word, -); a slot is free while taken int64 [N], the numbers last given, is what was given back. plan int64 [N, 6], workspace;
    progress int64 [4]: snapshots so far, marks skipped so far, workspace; skipped int64 [1]: the second for the host; overshoot:
    a mark is skipped, too, if its state is of another generation or its head further past the boundary.
apply_table_edits
    records, token_ids, batches int32 [batch rows, max_batch], edits int32 [buffers, words] (see `zos.edits`), batch_states int64
    [batch rows, 8], ready int32 [batch rows, K, 2] or None, applied int64 [1]: launches so far, whose remainder by the number of
    buffers is the one to apply, applied_on_host int64 [1]: the same for the host; tokens_per_step, max_prefill_tokens,
    snapshot_every (0: off), whose multiples no first chunk passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import device_kernels.block_view
import device_kernels.commit
import device_kernels.decode_attention
import device_kernels.decode_metadata
import device_kernels.mailbox
import device_kernels.prefill_metadata
import device_kernels.prefill_tail
import device_kernels.ring_load
import device_kernels.ring_snapshot
import device_kernels.ring_store
import device_kernels.table_edits
import host_fallback.block_view
import host_fallback.commit
import host_fallback.decode_attention
import host_fallback.decode_metadata
import host_fallback.mailbox
import host_fallback.prefill_metadata
import host_fallback.prefill_tail
import host_fallback.ring_load
import host_fallback.ring_snapshot
import host_fallback.ring_store
import host_fallback.table_edits
from zos import checks, ring_checks, step_checks

KERNELS = (
    *device_kernels.decode_metadata.KERNELS,
    *device_kernels.prefill_metadata.KERNELS,
    *device_kernels.prefill_tail.KERNELS,
    *device_kernels.block_view.KERNELS,
    *device_kernels.commit.KERNELS,
    *device_kernels.table_edits.KERNELS,
    *device_kernels.mailbox.KERNELS,
    *device_kernels.ring_store.KERNELS,
    *device_kernels.ring_load.KERNELS,
    *device_kernels.decode_attention.KERNELS,
    *device_kernels.ring_snapshot.KERNELS,
)

_LIBRARY = torch.library.Library("zos", "DEF")


def _bind(check: Callable[..., None], stem: str, name: str, operands: dict[str, Any]) -> Callable[[], None]:
    """Check arguments once and bind an operator to them; the result launches it.

    For arguments whose addresses stay, as a metadata slot's do: a launch then costs neither checks nor packing.
    """
    check(**operands)
    anywhere = operands["records" if "records" in operands else "results"]
    package = device_kernels if anywhere.device.type == "cuda" else host_fallback
    launch: Callable[[], None] = getattr(getattr(package, stem), f"bind_{name}")(**operands)
    return launch


def bind_prepare_v4_decode_metadata(**operands: Any) -> Callable[[], None]:
    """Check the arguments of prepare_v4_decode_metadata once and bind the operator to them."""
    return _bind(checks.check_prepare_v4_decode_metadata, "decode_metadata", "prepare_v4_decode_metadata", operands)


def bind_prepare_v4_prefill_metadata(**operands: Any) -> Callable[[], None]:
    """Check the arguments of prepare_v4_prefill_metadata once and bind the operator to them."""
    return _bind(checks.check_prepare_v4_prefill_metadata, "prefill_metadata", "prepare_v4_prefill_metadata", operands)


def bind_prefill_tail(**operands: Any) -> Callable[[], None]:
    """Check the arguments of prefill_tail once and bind the operator to them."""
    return _bind(checks.check_prefill_tail, "prefill_tail", "prefill_tail", operands)


def bind_apply_table_edits(**operands: Any) -> Callable[[], None]:
    """Check the arguments of apply_table_edits once and bind the operator to them."""
    return _bind(step_checks.check_apply_table_edits, "table_edits", "apply_table_edits", operands)


def bind_publish_results(**operands: Any) -> Callable[[], None]:
    """Check the arguments of publish_results once and bind the operator to them."""
    return _bind(step_checks.check_publish_results, "mailbox", "publish_results", operands)


def bind_commit(**fixed: Any) -> Callable[..., None]:
    """Bind commit to what stays the same from step to step; the result takes (num_kept, finished, next_tokens, kept_tokens).

    With the first step's result all arguments are checked, later those four.
    """
    records, rows = fixed["records"], fixed["tickets"].shape[0]
    package = device_kernels if records.device.type == "cuda" else host_fallback
    launch: Callable[..., None] = package.commit.bind_commit(**fixed)
    varying = (records.device, rows, fixed["tokens_per_step"], fixed["token_ids"] is not None, fixed["results"])
    checked = False

    def commit_result(
        num_kept: torch.Tensor,
        finished: torch.Tensor | None,
        next_tokens: torch.Tensor | None,
        kept_tokens: torch.Tensor | None,
    ) -> None:
        nonlocal checked
        if checked:
            step_checks.check_step_result(*varying, num_kept, finished, next_tokens, kept_tokens)
        else:
            result: dict[str, Any] = {
                "num_kept": num_kept,
                "finished": finished,
                "next_tokens": next_tokens,
                "kept_tokens": kept_tokens,
            }
            step_checks.check_commit(**fixed, **result)
            checked = True
        launch(num_kept, finished, next_tokens, kept_tokens)

    return commit_result


_IMPLEMENTATIONS: dict[tuple[str, str], Callable[..., None]] = {}  # (operator, type of device)


def call(name: str, records: torch.Tensor, *arguments: Any) -> None:
    """Run an operator without torch's dispatcher, which costs more than the launch; the same check, the same launch."""
    _IMPLEMENTATIONS[name, records.device.type](records, *arguments)


def _define(schema: str, check: Callable[..., None], host: Callable[..., None], device: Callable[..., None]) -> None:
    """Register one operator: its schema, and an implementation for each kind of device behind the same check."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    arguments_of = getattr(torch.ops.zos, name).default._schema.arguments
    names = [argument.name for argument in arguments_of]
    needed = {argument.name for argument in arguments_of if str(argument.type) == "Tensor"}
    defaults = {argument.name: argument.default_value for argument in arguments_of if argument.has_default_value()}

    def checked(launch: Callable[..., None]) -> Callable[..., None]:
        def implementation(*arguments: Any) -> None:
            named = {**defaults, **dict(zip(names, arguments, strict=False))}
            for argument, value in named.items():
                if value is None and argument in needed:  # torch takes it for a tensor that is not defined
                    raise ValueError(f"{argument} is None, not a tensor")
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    named[argument] = value.detach()  # no operator has a gradient
            check(**named)
            launch(**named)

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
    checks.check_prepare_v4_decode_metadata,
    host_fallback.decode_metadata.prepare_v4_decode_metadata,
    device_kernels.decode_metadata.prepare_v4_decode_metadata,
)
_define(
    "prepare_v4_prefill_metadata(Tensor(a!) records, Tensor state_ids, Tensor? token_ids, "
    "Tensor(b!) kv_swa_index_offset_len, Tensor(c!) kv_swa_full_index_pivots, Tensor(d!) swa_len, "
    "Tensor(e!) positions, Tensor(f!)? input_ids, Tensor(g!) swa_write_slot, Tensor(h!) token_row, "
    "Tensor(i!) token_state_id, Tensor(j!) cu_seqlens_q, Tensor(k!) seqlens_q, Tensor(l!) seqlens_k, "
    "Tensor(m!) num_tokens, Tensor(n!) compression_write_slot, Tensor(o!) compression_index, Tensor(p!) tickets, "
    "Tensor(q!) counters, Tensor(r!) swa_load_plan, Tensor(s!) last_token_index, Tensor(t!)? kv_swa_full_index, "
    "int[] compression_ratios, int[] compression_entries, int window, int ring, int tokens_per_step, "
    "int max_prefill_tokens) -> ()",
    checks.check_prepare_v4_prefill_metadata,
    host_fallback.prefill_metadata.prepare_v4_prefill_metadata,
    device_kernels.prefill_metadata.prepare_v4_prefill_metadata,
)
_define(
    "prefill_tail(Tensor records, Tensor tickets, Tensor batch_cu_seqlens_q, Tensor(a!) token_index, Tensor(b!) positions, "
    "Tensor(c!) kv_swa_full_index_pivots, Tensor(d!) swa_len, Tensor(e!) swa_write_slot, Tensor(f!) token_row, "
    "Tensor(g!) cu_seqlens_q, Tensor(h!) num_tokens, Tensor(i!) swa_load_plan, Tensor(j!) swa_valid_start, "
    "Tensor(k!) last_token_index, int window, int ring, int tokens_per_step) -> ()",
    checks.check_prefill_tail,
    host_fallback.prefill_tail.prefill_tail,
    device_kernels.prefill_tail.prefill_tail,
)
_define(
    "view_block(Tensor records, Tensor tickets, Tensor? num_kept, Tensor(a!) kv_swa_index_offset_len, "
    "Tensor(b!) kv_swa_index, Tensor(c!) swa_len, Tensor(d!) positions, Tensor(e!) swa_write_slot, Tensor(f!) token_row, "
    "Tensor(g!) token_state_id, int window, int ring, int tokens_per_step) -> ()",
    checks.check_view_block,
    host_fallback.block_view.view_block,
    device_kernels.block_view.view_block,
)
_define(
    "commit(Tensor(a!) records, Tensor(b!)? token_ids, Tensor tickets, Tensor num_kept, Tensor? finished, "
    "Tensor? next_tokens, Tensor(c!) counters, int tokens_per_step, int max_prefill_tokens, Tensor(d!)? batch=None, "
    "Tensor(e!)? batch_state=None, Tensor? ready=None, Tensor(f!)? results=None, Tensor(g!)? results_state=None, "
    "Tensor? kept_tokens=None, bool prefill=False, Tensor(g!)? marks=None, int snapshot_every=0, int window=0, "
    "int ring=0) -> ()",
    step_checks.check_commit,
    host_fallback.commit.commit,
    device_kernels.commit.commit,
)
_define(
    "apply_table_edits(Tensor(a!) records, Tensor(b!)? token_ids, Tensor(c!) batches, Tensor edits, "
    "Tensor(d!) batch_states, Tensor(e!)? ready, Tensor(f!) applied, Tensor(g!) applied_on_host, int tokens_per_step, "
    "int max_prefill_tokens, int snapshot_every=0) -> ()",
    step_checks.check_apply_table_edits,
    host_fallback.table_edits.apply_table_edits,
    device_kernels.table_edits.apply_table_edits,
)
_define(
    "publish_results(Tensor results, Tensor(a!) results_state, Tensor(b!) mailbox) -> ()",
    step_checks.check_publish_results,
    host_fallback.mailbox.publish_results,
    device_kernels.mailbox.publish_results,
)
_define(
    "swa_ring_store(Tensor values, Tensor write_slot, Tensor(a!) swa_cache, Tensor(b!)? cast_back=None) -> ()",
    ring_checks.check_swa_ring_store,
    host_fallback.ring_store.swa_ring_store,
    device_kernels.ring_store.swa_ring_store,
)
_define(
    "swa_ring_snapshot(Tensor records, Tensor tickets, Tensor(a!) marks, Tensor states, Tensor(b!) snapshots, "
    "Tensor(c!) slots, Tensor(d!) taken, Tensor(e!) plan, Tensor(f!) progress, Tensor(g!) skipped, int overshoot) -> ()",
    ring_checks.check_swa_ring_snapshot,
    host_fallback.ring_snapshot.swa_ring_snapshot,
    device_kernels.ring_snapshot.swa_ring_snapshot,
)
_define(
    "swa_ring_load(Tensor swa_cache, Tensor load_plan, Tensor(a!) out, int window) -> ()",
    ring_checks.check_swa_ring_load,
    host_fallback.ring_load.swa_ring_load,
    device_kernels.ring_load.swa_ring_load,
)
_define(
    "swa_decode_attention(Tensor q, Tensor swa_cache, Tensor kv_swa_index, Tensor swa_len, Tensor? sink, Tensor(a!) out, "
    "Tensor(b!) lse, float softmax_scale, int tokens_per_step) -> ()",
    ring_checks.check_swa_decode_attention,
    host_fallback.decode_attention.swa_decode_attention,
    device_kernels.decode_attention.swa_decode_attention,
)
