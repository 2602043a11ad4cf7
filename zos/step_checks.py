"""Argument checks of the operators that move steps on: commit, publish_results, apply_table_edits."""

from __future__ import annotations

import torch

from host_fallback.mailbox import MAIL_HEADER_WORDS, record_words
from zos.arguments import whole_number
from zos.checks import BOOL, INT32, INT64, expect, expect_table

EDIT_WORDS = 16
BUFFER_HEADER_WORDS = 16
LEAST_BUFFER_WORDS = BUFFER_HEADER_WORDS + 16 * EDIT_WORDS  # a launch reads so much before it knows how much there is
BATCH_STATE_WORDS = 8


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
    expect_table(records, token_ids, tokens_per_step)
    whole_number("max_prefill_tokens", max_prefill_tokens, 1)
    device, rows = records.device, tickets.numel() // 4
    expect("tickets", tickets, INT32, (rows, 4), device)
    expect("counters", counters, INT64, (4,), device)
    check_step_result(
        device, rows, tokens_per_step, token_ids is not None, results, num_kept, finished, next_tokens, kept_tokens
    )
    whole_number("snapshot_every", snapshot_every, 0)
    if marks is not None:
        expect("marks", marks, INT32, (rows,), device)
        whole_number("window", window, 1)
        whole_number("ring", ring, window)
    if ready is None and results is None:
        return
    if batch_state is None:
        raise ValueError("ready or results given without the batch_state of the slot")
    expect("batch_state", batch_state, INT64, (BATCH_STATE_WORDS,), device)
    if batch is not None:
        expect("batch", batch, INT32, (max(rows, batch.numel()),), device)
    if ready is not None:
        if batch is None:
            raise ValueError("ready given without the batch that it refills")
        whole_number("entries of ready", ready.numel() // 2, 1)
        expect("ready", ready, INT32, (ready.numel() // 2, 2), device)
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
    expect("num_kept", num_kept, INT32, (rows,), device)
    if finished is not None:
        expect("finished", finished, BOOL, (rows,), device)
    if next_tokens is not None:
        expect("next_tokens", next_tokens, INT64, (rows, tokens_per_step), device)
        if not carries_tokens:
            raise ValueError("next_tokens given, but the table carries no tokens (carry_tokens=False)")
    if kept_tokens is not None:
        expect("kept_tokens", kept_tokens, INT64, (rows, tokens_per_step), device)
    if results is not None and results.dim() == 2:
        least = record_words(rows, 0 if kept_tokens is None else tokens_per_step)
        if results.shape[1] < least:
            raise ValueError(f"Invalid shape of results: expected [M, {least} or more], got {list(results.shape)}")


def _expect_results(results: torch.Tensor, results_state: torch.Tensor) -> None:
    if results.dim() != 2 or results.shape[0] < 1 or results.shape[1] % 2:
        raise ValueError(
            f"Invalid shape of results: expected [M, words], words a multiple of 2, got {list(results.shape)}"
        )
    expect("results", results, INT32, tuple(results.shape), results.device)
    expect("results_state", results_state, INT64, (2,), results.device)


def check_publish_results(results: torch.Tensor, results_state: torch.Tensor, mailbox: torch.Tensor) -> None:
    """Raise ValueError unless the arguments of publish_results fit each other."""
    _expect_results(results, results_state)
    records, words = results.shape
    expect("mailbox", mailbox, INT32, (records, MAIL_HEADER_WORDS + words), results.device)


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
    expect_table(records, token_ids, tokens_per_step)
    whole_number("snapshot_every", snapshot_every, 0)
    whole_number("max_prefill_tokens", max_prefill_tokens, 1)
    device = records.device
    if batches.dim() != 2:
        raise ValueError(f"Invalid shape of batches: expected [batch rows, max_batch], got {list(batches.shape)}")
    expect("batches", batches, INT32, tuple(batches.shape), device)
    if edits.dim() != 2 or edits.shape[0] < 1 or edits.shape[1] < LEAST_BUFFER_WORDS or edits.shape[1] % 4:
        raise ValueError(
            f"Invalid shape of edits: expected [buffers, words], words a multiple of 4 and {LEAST_BUFFER_WORDS} or more, "
            f"got {list(edits.shape)}"
        )
    expect("edits", edits, INT32, tuple(edits.shape), device)
    expect("batch_states", batch_states, INT64, (batches.shape[0], BATCH_STATE_WORDS), device)
    if ready is not None:
        entries = ready.shape[1] if ready.dim() == 3 else 0
        whole_number("entries of ready", entries, 1)
        expect("ready", ready, INT32, (batches.shape[0], entries, 2), device)
    expect("applied", applied, INT64, (1,), device)
    expect("applied_on_host", applied_on_host, INT64, (1,), device)
