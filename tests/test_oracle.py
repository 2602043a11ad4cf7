"""Test that the oracle gives every golden value and the seed's worked figures: others are held against it.

`load_plan` of the golden file belongs to prefill: a decode step loads nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import zos
from tests.reference import DECODE_KEYS, Oracle, assert_bitwise_equal, assert_golden, golden_cases, positions_in_ring
from zos.cli import oracle_table
from zos.table import COLUMNS


def seed_oracle(capacity: int = 8, **options: Any) -> Oracle:
    """Make an oracle of the seed's sizes: window 128, ring 134, 6 tokens per step."""
    return Oracle(capacity, window=128, ring=134, tokens_per_step=6, **options)


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: f"{case['token_layout']}-{len(case['rows'])}rows")
def test_golden(case: dict[str, Any]) -> None:
    """Every key of every case, made by an oracle that shares no code with this one."""
    sizes = {name: case[name] for name in ("window", "ring", "tokens_per_step")}
    oracle = Oracle(4096, compression=((2, 2 + case["tokens_per_step"] - 1),), **sizes)
    for row in case["rows"]:
        if row["state_id"] >= 0:
            oracle.admit(**row)
    actual = oracle.prepare([row["state_id"] for row in case["rows"]], case["token_layout"])
    assert_golden(actual, case["expect"], DECODE_KEYS, left_out=("load_plan",))


def test_seed_index() -> None:
    """State 3 at position 1000: offset 471, slots 471 … 535 and then 402 … 464, which is the query's own."""
    oracle = seed_oracle()
    oracle.admit(3, q_start=1000, seqlen_q=1)
    out = oracle.prepare([3])
    assert out["kv_swa_index_offset_len"][0].tolist() == [471, 128]
    assert out["kv_swa_index"][0].tolist() == [*range(471, 536), *range(402, 465)]
    assert out["swa_write_slot"][0] == 464


def test_seed_short_sequence() -> None:
    """At position 50 there are 51 keys, and columns 51 … 127 are -1."""
    oracle = seed_oracle()
    oracle.admit(0, q_start=50, seqlen_q=1)
    out = oracle.prepare([0])
    assert out["swa_len"][0] == 51
    assert out["kv_swa_index"][0].tolist() == [*range(51), *[-1] * 77]


def test_seed_pivots() -> None:
    """2,048 tokens cached and 300 new: 127 history keys and one new at j = 0, 128 new ones at j = 200."""
    oracle = Oracle(1, window=128, ring=427, tokens_per_step=300)
    oracle.admit(0, q_start=2048)
    pivots = oracle.prepare([0])["kv_swa_full_index_pivots"]
    assert pivots[0].tolist() == [1, 127, 128, 1]
    assert pivots[200].tolist() == [128, 0, 128 + 73, 128]


def test_visible_slots_hold_visible_positions(seed: int) -> None:
    """Mapped back through the ring, a query's slots hold exactly the positions it may see."""
    rng = np.random.default_rng(seed)
    oracle = Oracle(3, window=7, ring=11, tokens_per_step=4)
    for _ in range(50):
        q_start = int(rng.integers(0, 60))
        valid_start = int(rng.integers(0, q_start + 1))
        oracle.admit(2, q_start, swa_valid_start=valid_start)
        out, held = oracle.prepare([2]), positions_in_ring(q_start + 4, 11)
        for j, position in enumerate(range(q_start, q_start + 4)):
            seen = [held[slot - 22] for slot in out["kv_swa_index"][j].tolist() if slot >= 0]
            assert seen == list(range(max(position - 6, valid_start, 0), position + 1))


def test_budget_and_errors_keep_the_prefix() -> None:
    """A row in error keeps its places, the first row that does not fit holds back all after it."""
    oracle = seed_oracle()
    for state_id in range(6):
        oracle.admit(state_id, q_start=100, seqlen_q=3)
    oracle.records[1]["swa_valid_start"] = 101
    oracle.pause(2)
    out = oracle.prepare([0, 1, 2, 3, -1, 4, 5], max_tokens=10)
    assert out["cu_seqlens_q"].tolist() == [0, 3, 6, 6, 9, 9, 10, 10]
    assert out["seqlens_q"].tolist() == [3, 0, 0, 3, 0, 0, 0]
    assert out["token_row"].tolist() == [0, 0, 0, -1, -1, -1, 3, 3, 3, -1]
    assert oracle.counters == {"stale": 0, "duplicate": 0, "deferred": 2, "errors": 1}


def test_commit_counts_a_result_once() -> None:
    """Repeated: duplicate. Of an earlier tenant: stale. 0 kept: nothing moves. Out of range: phase ERROR."""
    oracle = seed_oracle()
    for state_id in range(4):
        oracle.admit(state_id, q_start=100)
    tickets = oracle.prepare([0, 1, 2, 3, -1])["tickets"]
    oracle.release(3)
    oracle.admit(3, q_start=40)
    for _ in range(2):
        oracle.commit(tickets, [4, 0, 7, 2, 99])
    assert [record["q_start"] for record in oracle.records[:4]] == [104, 100, 100, 40]
    assert [record["head"] for record in oracle.records[:4]] == [106, 100, 100, 40]
    assert [record["phase"] for record in oracle.records[:4]] == [1, 1, 3, 1]
    assert (oracle.records[2]["error"], oracle.records[2]["error_value"]) == (7, 7)
    assert oracle.counters == {"stale": 3, "duplicate": 1, "deferred": 0, "errors": 1}


def test_commit_stops_at_the_length() -> None:
    """What is kept past stop_at is cut, and the sequence is finished: the next step has no row of it."""
    oracle = seed_oracle(carry_tokens=True)
    oracle.admit(0, q_start=10, stop_at=13)
    oracle.admit(1, q_start=10)
    oracle.commit(oracle.prepare([0, 1])["tickets"], [5, 2], [False, True], [[1] * 6, [2] * 6])
    assert [record["q_start"] for record in oracle.records[:2]] == [13, 12]
    assert [record["phase"] for record in oracle.records[:2]] == [2, 2]
    assert oracle.token_ids is not None and oracle.token_ids[:2] == [[1] * 6, [2] * 6]
    assert oracle.prepare([0, 1])["num_tokens"][0] == 0


def test_commit_walks_a_prompt_in_chunks() -> None:
    """Chunks are kept whole whatever num_kept holds; `finished` and `next_tokens` wait for the last one."""
    oracle = seed_oracle(carry_tokens=True)
    oracle.admit(0, prompt_end=7, chunk_q=4, decode_q=2)
    seen = []
    for _ in range(3):
        out = oracle.prepare([0])
        seen.append((out["positions"][0], out["seqlens_q"][0]))
        oracle.commit(out["tickets"], [1], [len(seen) == 1], [[len(seen)] * 6])
    assert seen == [(0, 4), (4, 3), (7, 2)]
    assert oracle.records[0]["q_start"] == 8 and oracle.token_ids is not None and oracle.token_ids[0] == [3] * 6


def test_reset_acts_on_sequences_only() -> None:
    """LIVE, PAUSED and ERROR start over; a state that holds no running sequence stays what it is."""
    oracle = seed_oracle()
    for state_id, phase in enumerate(range(5)):
        oracle.admit(state_id, q_start=50, stop_at=90, chunk_q=8)
        oracle.records[state_id].update(phase=phase, error=7)
        oracle.reset(state_id, prompt_end=20)
    assert [record["phase"] for record in oracle.records[:5]] == [0, 1, 2, 1, 1]
    assert [record["q_start"] for record in oracle.records[:5]] == [50, 0, 50, 0, 0]
    assert [record["generation"] for record in oracle.records[:5]] == [1, 2, 1, 2, 2]
    assert [oracle.records[1][name] for name in ("seqlen_q", "error", "stop_at")] == [8, 0, 90]


def test_records_survive_the_array(seed: int) -> None:
    """Loading an array and reading it back is the identity, in the columns' order of the table."""
    array = np.random.default_rng(seed).integers(-(2**31), 2**31, (5, 16)).astype(np.int32)
    oracle = seed_oracle(5)
    oracle.load_records(array)
    assert_bitwise_equal(oracle.records_array(), array, "records")
    assert {name: oracle_table.COLUMNS.index(name) for name in COLUMNS} == COLUMNS


def test_numbers_and_arguments_are_the_service_s() -> None:
    """The oracle writes phases, codes and signatures of its own: they must mean what the service's mean."""
    for name, value in [*zos.Phase.__members__.items(), *zos.ErrorCode.__members__.items()]:
        assert getattr(oracle_table, name, 0) == value, name
    for method in ("admit", "release", "reset", "pause", "resume", "set_seqlen_q", "set_valid_start"):
        assert inspect.signature(getattr(Oracle, method)) == inspect.signature(getattr(zos.MetadataService, method))
