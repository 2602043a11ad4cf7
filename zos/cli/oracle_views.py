"""The oracle of a drafter's block view and of a prefill's tail: what docs/design.md says of both, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zos.cli.oracle import LARGEST_POSITION, Oracle
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.oracle_table import LIVE, PAUSED

TILE = 64


def expected_block_view(
    oracle: Oracle, tickets: Sequence[Sequence[int]], num_kept: Sequence[int] | None
) -> dict[str, np.ndarray]:
    """BlockView's outputs by name, for int [B, 4] tickets and the tokens kept of each row."""
    window, ring, step = oracle.window, oracle.ring, oracle.tokens_per_step
    places, columns = len(tickets) * step, (window + step + TILE - 1) // TILE * TILE
    out: dict[str, np.ndarray] = {
        "kv_swa_index_offset_len": np.zeros((places, 2), np.int32),
        "kv_swa_index": np.full((places, columns), -1, np.int32),
        "swa_len": np.zeros(places, np.int32),
        "positions": np.zeros(places, np.int64),
        "swa_write_slot": np.full(places, -1, np.int64),
        "token_row": np.full(places, -1, np.int32),
        "token_state_id": np.full(places, -1, np.int32),
    }
    for row, ticket in enumerate(tickets):
        state_id = int(ticket[0])
        start = _block_start(oracle, [int(word) for word in ticket], None if num_kept is None else int(num_kept[row]))
        if start is None:
            continue
        oldest = max(start - window, oracle.records[state_id]["swa_valid_start"], 0)
        slots = [state_id * ring + position % ring for position in range(oldest, start + step)]
        mine = slice(row * step, (row + 1) * step)
        out["kv_swa_index_offset_len"][mine] = (slots[0], len(slots))
        out["kv_swa_index"][mine, : len(slots)] = slots
        out["swa_len"][mine] = len(slots)
        out["positions"][mine] = range(start, start + step)
        out["swa_write_slot"][mine] = slots[-step:]
        out["token_row"][mine] = row
        out["token_state_id"][mine] = state_id
    return out


def _block_start(oracle: Oracle, ticket: list[int], num_kept: int | None) -> int | None:
    """Position at which a row's block begins; None for padding."""
    state_id, generation, q_start, q = ticket
    if q <= 0 or not 0 <= state_id < len(oracle.records):
        return None
    record = oracle.records[state_id]
    if record["generation"] != generation or record["phase"] not in (LIVE, PAUSED):
        return None
    kept = 0
    if num_kept is not None:
        kept = q if q_start < record["prompt_end"] else num_kept
    start = q_start + kept
    sound = 0 <= kept <= q and q_start >= 0 and start + oracle.tokens_per_step <= LARGEST_POSITION
    return start if sound and record["swa_valid_start"] <= start else None


def expected_tail(oracle: PrefillOracle, step: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PrefillTail's outputs by name, for what the oracle's `prepare_prefill` gave."""
    window, rows = oracle.window, len(step["tickets"])
    places = min(oracle.max_prefill_tokens, rows * max(window, oracle.tokens_per_step))
    out: dict[str, np.ndarray] = {
        "token_index": np.full(places, -1, np.int64),
        "positions": np.zeros(places, np.int64),
        "kv_swa_full_index_pivots": np.zeros((places, 4), np.int32),
        "swa_len": np.zeros(places, np.int32),
        "swa_write_slot": np.full(places, -1, np.int64),
        "token_row": np.full(places, -1, np.int32),
        "cu_seqlens_q": np.zeros(rows + 1, np.int32),
        "num_tokens": np.zeros(1, np.int32),
        "swa_load_plan": np.zeros((rows, 3, 4), np.int32),
        "swa_valid_start": np.zeros(rows, np.int32),
        "last_token_index": np.full(rows, -1, np.int64),
    }
    first = 0
    for row, (state_id, _, q_start, q) in enumerate(step["tickets"].tolist()):
        tail, valid_start = _tail_of_row(oracle, state_id, q_start, q)
        if tail:
            out["swa_load_plan"][row] = oracle.load_plan(row, state_id, tail[0], valid_start)
            out["swa_valid_start"][row] = valid_start
            out["last_token_index"][row] = first + len(tail) - 1
        else:
            out["swa_load_plan"][row] = [(-1, 0, row * window, window), (-1, 0, 0, 0), (-1, 0, 0, 0)]
        for j, position in enumerate(tail):
            place = first + j
            seen = [p for p in range(position - window + 1, position + 1) if p >= max(valid_start, 0)]
            own = [p for p in seen if p in tail]
            history = len(seen) - len(own)
            out["token_index"][place] = int(step["cu_seqlens_q"][row]) + position - q_start
            out["positions"][place] = position
            out["kv_swa_full_index_pivots"][place] = (
                (row + 1) * window - history, history, rows * window + first + tail.index(own[0]), len(own),
            )  # fmt: skip
            out["swa_len"][place] = len(seen)
            out["swa_write_slot"][place] = state_id * oracle.ring + position % oracle.ring
            out["token_row"][place] = row
        first += len(tail)
        out["cu_seqlens_q"][row + 1] = first
    out["num_tokens"][0] = first
    return out


def _tail_of_row(oracle: Oracle, state_id: int, q_start: int, q: int) -> tuple[range, int]:
    """(positions, valid start) of a row's tail."""
    positions = range(q_start, q_start + max(q, 0))
    if not positions:
        return positions, 0
    record = oracle.records[state_id]
    prompt_end, since_prompt = record["prompt_end"], max(record["prompt_end"] - oracle.window, 0)
    if q_start < prompt_end:
        first = max(q_start, since_prompt)
        return range(first, max(first, positions.stop)), max(record["swa_valid_start"], since_prompt)
    tail = positions if q <= oracle.tokens_per_step else positions[-oracle.window :]
    skips = tail.start > q_start  # and so leaves a gap behind which nothing is read
    return tail, tail.start if skips else max(record["swa_valid_start"], since_prompt)
