"""The oracle of what is derived from a prepared step: a drafter's block view, in plain Python from docs/design.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zos.cli.oracle import LARGEST_POSITION, Oracle
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
