"""Random cases for `zos parity`: tables, edits and results that crowd around every rule's edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zos.cli.oracle import LARGEST_POSITION
from zos.cli.oracle_table import COLUMNS, ERROR, FINISHED, FREE, LIVE, PAUSED
from zos.cli.setups import Setup

Edit = tuple[str, tuple[Any, ...], dict[str, Any]]  # method, arguments, keywords

INT32 = np.iinfo(np.int32)
LONGEST_RESET_PROMPT = 64  # keeps resets legal beside the stop_at of any admit below


@dataclass(frozen=True)
class Result:
    """What a step found out, as commit takes it."""

    num_kept: np.ndarray  # int32 [B]
    finished: np.ndarray | None  # bool [B]
    next_tokens: np.ndarray | None  # int64 [B, Q]
    kept_tokens: np.ndarray | None  # int64 [B, Q]: for the record


def random_table(rng: np.random.Generator, setup: Setup) -> tuple[np.ndarray, np.ndarray | None]:
    """Make int32 [capacity, 16] records, and int64 [capacity, Q] token ids where they are carried."""
    size, step, longest = setup.capacity, setup.geometry.tokens_per_step, setup.max_prefill_tokens
    chunky = int(rng.choice([4, 4, 80, 400]))  # weight of a fifth of the chunks beside 1000 of other lengths

    def near(value: np.ndarray | int, below: int, above: int) -> np.ndarray:
        return value + rng.integers(-below, above + 1, size)

    q_start = _positions(rng, setup, size)
    prompt_end = _mix(
        rng,
        [
            (60, 0),
            (10, near(q_start, 1, 3 * step)),
            (10, near(q_start, 0, 40)),
            (10, near(q_start, 0, 3 * longest)),
            (10, q_start + 10_000),
        ],
    )
    chunk = _chunk_lengths(rng, setup, size)
    ends = np.where(prompt_end > q_start, prompt_end, LARGEST_POSITION).clip(None, LARGEST_POSITION)
    columns: dict[str, Any] = {
        "phase": _mix(
            rng,
            [
                (840, np.full(size, LIVE)),
                (40, FREE),
                (40, FINISHED),
                (30, ERROR),
                (40, PAUSED),
                (10, near(2, 9, 9)),
            ],
        ),
        "seqlen_q": _mix(
            rng,
            [
                (840, near(1, 0, step - 1)),
                (50, 0),
                (50, near(step, 0, 2)),
                (20, near(-1, 3, 0)),
                (20, rng.integers(INT32.min, INT32.max, size)),
                (20, prompt_end - q_start),
                (chunky, chunk),
                (4 * chunky, np.minimum(chunk, ends - q_start)),
            ],
        ),
        "q_start": q_start,
        "prompt_end": prompt_end,
        "swa_valid_start": _mix(
            rng,
            [
                (60, np.zeros(size, np.int64)),
                (33, np.maximum(near(q_start, setup.geometry.window + step, 0), 0)),
                (3, q_start),
                (2, near(q_start, 0, 3)),
                (1, near(-1, 9, 0)),
                (1, rng.integers(INT32.min, INT32.max, size)),
            ],
        ),
        "kv_cached_end": _mix(rng, [(60, np.zeros(size, np.int64)), (30, near(q_start, step, step)), (10, INT32.max)]),
        "generation": near(0, 0, 1000),
        "error": _mix(rng, [(92, np.zeros(size, np.int64)), (8, near(1, 0, 7))]),
        "error_value": near(0, 9, 9),
        "head": near(q_start, 0, step),
        "stop_at": _mix(
            rng,
            [
                (70, np.zeros(size, np.int64)),
                (16, near(q_start, 0, step + 2)),
                (8, near(q_start, 0, longest)),
                (4, near(q_start, 9, 0)),
                (2, -5),
            ],
        ),
        "chunk_q": _mix(rng, [(30, 0), (70, np.minimum(_chunk_lengths(rng, setup, size), longest))]),
        "decode_q": _mix(rng, [(50, 0), (50, near(1, 0, step - 1))]),
    }
    records = np.zeros((size, len(COLUMNS)), np.int32)
    for name, values in columns.items():
        records[:, COLUMNS.index(name)] = np.clip(values, INT32.min, INT32.max)
    return records, _tokens(rng, (size, step)) if setup.carry_tokens else None


def tamper(rng: np.random.Generator, setup: Setup, records: np.ndarray) -> np.ndarray:
    """Redraw seqlen_q or whole records of some states, as the caller's device code might write them."""
    drawn, _ = random_table(rng, setup)
    seqlen_q, generation = COLUMNS.index("seqlen_q"), COLUMNS.index("generation")
    changed = np.where(rng.random((setup.capacity, 1)) < 0.1, drawn, records)
    same_tenant = rng.random(setup.capacity) < 0.5  # whose outstanding tickets are then of another q_start, not stale
    changed[same_tenant, generation] = records[same_tenant, generation]
    drafted = rng.random(setup.capacity) < 0.3
    changed[drafted, seqlen_q] = drawn[drafted, seqlen_q]
    return changed


def random_result(rng: np.random.Generator, setup: Setup, tickets: np.ndarray) -> Result:
    """Make the result of rows with these tickets: mostly sane for a live row, anything for a padding row."""
    rows, step, q = len(tickets), setup.geometry.tokens_per_step, tickets[:, 3].astype(np.int64)
    some = 1 + np.floor(rng.random(rows) * q).astype(np.int64)
    sane = np.where((q > step) & (rng.random(rows) < 0.9), q, some)  # a chunk counts whole or not at all
    garbage = rng.integers(INT32.min, INT32.max, rows)
    num_kept = _mix(rng, [(80, np.minimum(sane, np.maximum(q, 1))), (10, q), (10, 0)])
    if rng.random() < 0.5:  # not always, or few sequences would live for long
        num_kept = _mix(rng, [(85, num_kept), (3, -1), (4, q + 1), (8, garbage)])
    finished = rng.random(rows) < 0.15 if rng.random() < 0.5 else None
    tokens = _tokens(rng, (rows, step)) if setup.carry_tokens and rng.random() < 0.7 else None
    kept_tokens = _tokens(rng, (rows, step)) if setup.records and setup.carry_tokens and rng.random() < 0.5 else None
    return Result(np.where(q > 0, num_kept, garbage).astype(np.int32), finished, tokens, kept_tokens)


def forge_tickets(rng: np.random.Generator, setup: Setup, tickets: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Replace some rows' tickets by those of a chunk of any length, as a prefill of another table might have left."""
    forged, state_ids = tickets.copy(), np.where(tickets[:, 0] >= 0, tickets[:, 0], tickets[:, 2])
    column = {name: records[:, place].astype(np.int64) for place, name in enumerate(COLUMNS)}
    for row in np.flatnonzero((state_ids >= 0) & (rng.random(len(tickets)) < 0.2)):
        state_id = state_ids[row]
        q_start, prompt_end = column["q_start"][state_id], column["prompt_end"][state_id]
        most = min(setup.max_prefill_tokens, (prompt_end if q_start < prompt_end else LARGEST_POSITION) - q_start)
        if q_start >= 0 and most >= 1:
            q = rng.integers(1, most + 1)
            forged[row] = (state_id, column["generation"][state_id], q_start, q)
    return forged


def random_edits(rng: np.random.Generator, setup: Setup) -> list[Edit]:
    """Make calls for service and oracle; several may concern one state, in order."""
    step, longest = setup.geometry.tokens_per_step, setup.max_prefill_tokens
    edits: list[Edit] = []
    for _ in range(rng.integers(1, 2 + setup.capacity // 8)):
        state_id = int(rng.integers(0, setup.capacity))
        kind = str(rng.choice(["admit", "fork", "reset", "pause", "resume", "set_seqlen_q", "set_valid_start"]))
        if kind == "admit":
            edits += [("release", (state_id,), {}), ("admit", (state_id,), _admission(rng, setup))]
            continue
        if kind == "fork":
            dst = (state_id + int(rng.integers(1, setup.capacity))) % setup.capacity
            edits += [("release", (dst,), {}), ("fork", (state_id, dst), {})]
            continue
        values = {
            "reset": [one_of(rng, 0, rng.integers(1, LONGEST_RESET_PROMPT + 1))],
            "set_seqlen_q": [one_of(rng, rng.integers(0, step + 1), rng.integers(0, longest + 1))],
            "set_valid_start": [int(_positions(rng, setup, 1)[0].clip(0))],
        }
        edits.append((kind, (state_id, *values.get(kind, [])), {}))
    return edits


def _admission(rng: np.random.Generator, setup: Setup) -> dict[str, Any]:
    """Make keywords of an admit that the service accepts."""
    step = setup.geometry.tokens_per_step
    q_start = int(_positions(rng, setup, 1)[0].clip(0, LARGEST_POSITION - step))
    prompt = one_of(rng, rng.integers(1, 5 * step), rng.integers(1, 3 * setup.max_prefill_tokens))
    prompt_end = one_of(rng, 0, min(q_start + prompt, LARGEST_POSITION))
    ends = max(q_start + 1, prompt_end, LONGEST_RESET_PROMPT) + int(rng.integers(0, step))
    most = min(prompt_end - q_start, setup.max_prefill_tokens) if q_start < prompt_end else step
    return {
        "q_start": q_start,
        "seqlen_q": int(rng.integers(0, most + 1)) if rng.random() < 0.5 else None,
        "swa_valid_start": one_of(rng, 0, rng.integers(max(0, q_start - 200), q_start + 1)),
        "stop_at": one_of(rng, 0, min(ends, LARGEST_POSITION)),
        "prompt_end": prompt_end,
        "chunk_q": int(rng.integers(0, setup.max_prefill_tokens + 1)),
        "decode_q": int(rng.integers(0, step + 1)),
        "kv_cached_end": one_of(rng, 0, q_start, INT32.max),
        "tokens": _tokens(rng, (int(rng.integers(0, step + 1)),)).tolist() if setup.carry_tokens else None,
    }


def _positions(rng: np.random.Generator, setup: Setup, size: int) -> np.ndarray:
    """Positions near 0, W, R, multiples of R or of compression entries, the largest, anywhere; few negative."""
    geometry, step = setup.geometry, setup.geometry.tokens_per_step
    entries = setup.compression[0].entries if setup.compression else geometry.ring
    close = rng.integers(-step, step + 1, size)
    found = _mix(
        rng,
        [
            (15, np.abs(close)),
            (15, geometry.window + close),
            (15, geometry.ring + close),
            (15, geometry.ring * rng.integers(1, 50, size) + close),
            (10, geometry.ring * rng.integers(0, LARGEST_POSITION // geometry.ring + 1, size) + close),
            (5, entries * rng.integers(1, LARGEST_POSITION // entries, size) + close),
            (14, rng.integers(0, 100_000, size)),
            (5, rng.integers(0, LARGEST_POSITION, size)),
            (5, LARGEST_POSITION - 6 + np.minimum(close, 6)),
            (5, LARGEST_POSITION - _chunk_lengths(rng, setup, size)),
        ],
    )
    return np.where(rng.random(size) < 0.01, -1 - np.abs(close), found.clip(0, LARGEST_POSITION))


def _chunk_lengths(rng: np.random.Generator, setup: Setup, size: int) -> np.ndarray:
    """Tokens of chunks, 1 up to one beyond a prefill: many short ones, so that several fit, and near R - W and R."""
    ring, longest = setup.geometry.ring, setup.max_prefill_tokens
    close = rng.integers(-2, 3, size)
    found = _mix(
        rng,
        [
            (45, np.exp(rng.uniform(0, np.log(longest + 1), size)).astype(np.int64)),
            (20, rng.integers(1, longest + 1, size)),
            (5, ring - setup.geometry.window + close),
            (10, ring + close),
            (12, longest),
            (8, longest - 1 + close),
        ],
    )
    return found.clip(1, longest + 1)


def _mix(rng: np.random.Generator, choices: list[tuple[int, Any]]) -> np.ndarray:
    """Choose each element from one of the arrays or numbers, with these weights."""
    weights, values = zip(*choices, strict=True)
    columns = np.broadcast_arrays(*values)
    kinds = rng.choice(len(columns), columns[0].shape, p=np.array(weights) / sum(weights))
    return np.choose(kinds, columns)


def one_of(rng: np.random.Generator, *choices: int | np.integer[Any]) -> int:
    """Choose one of them."""
    return int(choices[rng.integers(len(choices))])


def _tokens(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Token ids, some of which need more than 32 bits."""
    return rng.integers(0, 2**40, shape)
