"""Test that a prefill's tail is each prompt's last window, sees nothing below it, and leaves decode steps nothing special to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import PrefillOracle, as_array, assert_bitwise_equal, poison
from zos.cli.compare import metadata_arrays
from zos.cli.oracle_views import expected_tail
from zos.metadata import StepMetadata

REJECTED = -(10**6)  # in a ring slot: a rejected draft's entry at position p is REJECTED - p


def service(device: str, rows: int = 8, max_prefill_tokens: int = 512, **options: Any) -> zos.MetadataService:
    return zos.MetadataService(
        **{"capacity": rows, "max_batch": rows, "device": device, "max_prefill_tokens": max_prefill_tokens, **options}
    )


def prepared(svc: zos.MetadataService) -> tuple[zos.PrefillMetadata, zos.PrefillTail]:
    """Prepare into poisoned buffers."""
    storage = svc.slot_prefill_metadata(0, svc.slot(0).prefill_batch, full_index=False, tail=True)
    poison(storage)
    metadata = svc.prepare_prefill(tail=True)
    assert metadata.tail is not None and metadata is storage
    return metadata, metadata.tail


def test_figures(device: str) -> None:
    """A prompt of 1,000 in chunks of 300: no tail, no tail, 872 … 899, 900 … 999 behind 28 ring rows; beside it a decode row."""
    svc = service(device)
    svc.admit(state_id=3, prompt_end=1000, chunk_q=300)
    svc.admit(state_id=4, q_start=50)
    svc.set_prefill_batch([3, 4])
    found = []
    for _ in range(4):
        metadata, tail = prepared(svc)
        found.append((tail.cu_seqlens_q.tolist(), tail.last_token_index.tolist(), tail.swa_valid_start.tolist()))
        assert tail.positions.shape == (2 * 128,) and tail.num_tokens.item() == found[-1][0][-1]
        if len(found) == 1:
            assert tail.swa_load_plan[0].tolist() == [[-1, 0, 0, 128], [-1, 0, 0, 0], [-1, 0, 0, 0]]
        svc.commit(metadata, metadata.seqlens_q)
    assert found == [
        ([0, 0, 6], [-1, 5], [0, 0]),
        ([0, 0, 6], [-1, 5], [0, 0]),
        ([0, 28, 34], [27, 33], [872, 0]),
        ([0, 100, 106], [99, 105], [872, 0]),
    ]
    assert tail.swa_load_plan[0].tolist() == [[-1, 0, 0, 100], [3, 68, 100, 28], [-1, 0, 0, 0]]
    assert tail.token_index[:106].tolist() == list(range(106)) and tail.token_index[106:].eq(-1).all()
    assert tail.kv_swa_full_index_pivots[0].tolist() == [100, 28, 256, 1]  # 872 … 900
    assert tail.kv_swa_full_index_pivots[99].tolist() == [100, 28, 256, 100]  # 872 … 999


def random_records(rng: np.random.Generator, states: int, window: int, ring: int, step: int) -> np.ndarray:
    """States of every kind: prompts before, within and past their last window, decode rows, long chunks, errors, not live."""
    records = np.zeros((states, 16), np.int32)
    records[:, 0] = rng.choice([1, 1, 1, 1, 1, 0, 2, 4], states)
    records[:, 1] = rng.choice([0, 1, step, step + 1, 40, window, 2 * window, 290, 301, -1], states)
    records[:, 2] = rng.choice([0, 1, window, 3 * ring, 1000, 2**31 - 300, -2], states)
    left = rng.choice([1, 50, window, window + 40, 290, 3000], states)
    ahead = np.minimum(records[:, 2].astype(np.int64) + np.maximum(records[:, 1], left), 2**31 - 1)
    behind = records[:, 2] - rng.choice([0, 3, window, 2000], states)
    records[:, 3] = np.where(rng.random(states) < 0.5, ahead, np.where(rng.random(states) < 0.5, 0, behind))
    records[:, 4] = np.maximum(-1, records[:, 2] - rng.choice([-1, 0, 3, 50, 2000], states))
    records[:, 6] = rng.integers(0, 9, states)
    return records


@pytest.mark.parametrize(
    ("window", "drafts", "ring", "states"),
    [(128, 5, 134, 9), (7, 3, 12, 9), (1, 0, 1, 9), (3, 16, 77, 9), (2, 1, 4, 700)],
)
def test_against_the_oracle(device: str, window: int, drafts: int, ring: int, states: int, seed: int) -> None:
    """Random rows of every kind, also of more rows than a block walks at once; every output, bit for bit."""
    rng = np.random.default_rng(seed)
    geometry = zos.RingGeometry(window, drafts, ring)
    limit, step = 300 * (1 + states // 100), geometry.tokens_per_step
    svc = service(device, states, limit, geometry=geometry, compression_ratios=())
    oracle = PrefillOracle(states, window=window, ring=ring, tokens_per_step=step, max_prefill_tokens=limit)
    tokens = 0
    for _ in range(5 if states > 100 else 60):
        records = random_records(rng, states, window, ring, step)
        if states > 100:
            records[:, 1] = np.minimum(records[:, 1], 3)
        oracle.load_records(records)
        svc.table.records.copy_(torch.from_numpy(records))
        rows = rng.integers(0, states + 1) if states < 100 else rng.integers(500, states + 1)
        ids = [int(i) if rng.random() < 0.9 else -1 for i in rng.permutation(states)[:rows]]
        svc.set_prefill_batch(ids, batch=len(ids))
        expected = oracle.prepare_prefill(ids)
        expected |= {f"tail.{name}": array for name, array in expected_tail(oracle, expected).items()}
        metadata, tail = prepared(svc)
        arrays = metadata_arrays(metadata)
        assert set(arrays) == set(expected)
        for name, array in arrays.items():
            assert_bitwise_equal(array, expected[name], name)
        assert_bitwise_equal(svc.table.records, oracle.records_array(), "records")
        tokens += int(tail.num_tokens)
    assert tokens > 0


class ConsumerRing:
    """A ring of a layer that runs on tails alone in prefill and on all tokens in decode: the position in each slot, or none."""

    def __init__(self, svc: zos.MetadataService) -> None:
        self.geometry, self.batch = svc.geometry, svc.max_batch
        self.held = np.full(svc.capacity * svc.geometry.ring, REJECTED, np.int64)

    def prefill(self, tail: zos.PrefillTail, kept: np.ndarray) -> list[list[int]]:
        """Load, attend, store; returns what each of the tail's tokens sees."""
        plan, window = as_array(tail.swa_load_plan).reshape(-1, 4), self.geometry.window
        assert plan[:, 3].sum() == self.batch * window
        buffer = np.full(self.batch * window + len(tail.positions), REJECTED, np.int64)
        for state_id, slot, to, rows in plan[plan[:, 0] >= 0]:
            buffer[to : to + rows] = self.held[state_id * self.geometry.ring + slot :][:rows]
        row, position = as_array(tail.token_row), as_array(tail.positions)
        j = np.arange(len(row)) - as_array(tail.cu_seqlens_q)[row]
        entries = np.where(j < kept[row], position, REJECTED - position)
        buffer[self.batch * window :] = entries
        self.write(as_array(tail.swa_write_slot), entries)
        pivots = as_array(tail.kv_swa_full_index_pivots)
        return [[*buffer[a : a + b].tolist(), *buffer[c : c + d].tolist()] for a, b, c, d in pivots]

    def decode(self, metadata: zos.DecodeMetadata, kept: np.ndarray) -> list[list[int]]:
        """Store, attend."""
        row, position = as_array(metadata.token_row), as_array(metadata.positions)
        j = np.arange(len(row)) - as_array(metadata.cu_seqlens_q)[row]
        self.write(as_array(metadata.swa_write_slot), np.where(j < kept[row], position, REJECTED - position))
        return [self.held[index[index >= 0]].tolist() for index in as_array(metadata.kv_swa_index)]

    def write(self, slots: np.ndarray, entries: np.ndarray) -> None:
        """Write entries at their slots; none is written twice."""
        named = slots[slots >= 0]
        assert len(np.unique(named)) == len(named)
        self.held[named] = entries[slots >= 0]


def random_kept(svc: zos.MetadataService, metadata: StepMetadata, rng: np.random.Generator) -> np.ndarray:
    """Tokens that each row keeps: all of a chunk, a random number of a decode step's."""
    lengths, ids = as_array(metadata.seqlens_q).astype(np.int64), as_array(metadata.state_ids)
    prefilling = as_array(svc.table.q_start < svc.table.prompt_end)[ids]
    return np.where(
        prefilling, lengths, np.minimum(rng.integers(1, svc.geometry.tokens_per_step + 1, len(ids)), lengths)
    )


@pytest.mark.parametrize(("window", "drafts", "ring"), [(128, 5, 134), (128, 5, 133), (9, 3, 15), (1, 2, 3)])
def test_tails_then_decode(device: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """Prompts in random chunks, some after a prefix hit, some deferred, decode rows among them, then decode steps.

    Every query of a layer that ran on tails alone sees exactly the positions of its window that are not below its prompt's last W
    tokens; past the prompt its decode metadata, which know nothing of tails, name none that is.
    """
    rng = np.random.default_rng(seed)
    states, longest = 12, 3 * window + 8
    svc = service(device, states, longest, geometry=zos.RingGeometry(window, drafts, ring))
    prompts = rng.integers(1, 4 * window + 20, states)
    for state_id, prompt in enumerate(prompts.tolist()):
        hit = int(rng.integers(0, prompt + 1)) if rng.random() < 0.3 else 0
        svc.admit(state_id, prefix_hit=hit, prompt_end=prompt, chunk_q=int(rng.integers(1, longest + 1)))
    ids = [int(state_id) for state_id in rng.permutation(states)]
    svc.set_prefill_batch(ids)
    svc.set_batch(ids)
    svc.flush()
    valid_start = np.maximum(as_array(svc.table.swa_valid_start.clone()), prompts - window)[ids].clip(0)
    ring_of_tails, tail_tokens, decode_tokens, steps = ConsumerRing(svc), 0, 0, 0

    def check(row: np.ndarray, position: np.ndarray, cu: np.ndarray, kept: np.ndarray, seen: list[list[int]]) -> int:
        compared = 0
        for place in np.flatnonzero(row >= 0):
            if place - cu[row[place]] < kept[row[place]]:
                first = max(position[place] - window + 1, valid_start[row[place]])
                assert seen[place] == list(range(first, position[place] + 1)), (place, position[place])
                compared += 1
        return compared

    while bool((svc.table.q_start < svc.table.prompt_end).any()) or steps < 3:
        metadata, tail = prepared(svc)
        index, real = as_array(tail.token_index), as_array(tail.token_row) >= 0
        assert_bitwise_equal(as_array(metadata.positions)[index[real]], as_array(tail.positions)[real], "positions")
        assert_bitwise_equal(as_array(metadata.token_row)[index[real]], as_array(tail.token_row)[real], "rows")
        kept = random_kept(svc, metadata, rng)
        skipped = np.maximum(as_array(metadata.seqlens_q) - np.diff(as_array(tail.cu_seqlens_q)), 0)  # by the tail
        seen = ring_of_tails.prefill(tail, kept - skipped)
        row, position, cu = (as_array(t) for t in (tail.token_row, tail.positions, tail.cu_seqlens_q))
        tail_tokens += check(row, position, cu, kept - skipped, seen)
        svc.commit(metadata, torch.from_numpy(kept.astype(np.int32)).to(device))
        ids = ids[1:] + ids[:1]  # deferred rows get their turn
        valid_start = np.roll(valid_start, -1)
        svc.set_prefill_batch(ids)
        svc.set_batch(ids)
        svc.flush()
        steps += 1
    for _ in range(12):
        decode_tokens += decode_step(svc, svc.prepare(), ring_of_tails, rng, check)
    svc.check()
    assert tail_tokens > 0 and decode_tokens > 0


def decode_step(
    svc: zos.MetadataService, metadata: zos.DecodeMetadata, ring: ConsumerRing, rng: np.random.Generator, check: Any
) -> int:
    """A step of the decode batch; a drafter then chooses the lengths of the next one's."""
    kept = random_kept(svc, metadata, rng)
    seen = ring.decode(metadata, kept)
    row, position, cu = (as_array(t) for t in (metadata.token_row, metadata.positions, metadata.cu_seqlens_q))
    compared: int = check(row, position, cu, kept, seen)
    svc.commit(metadata, torch.from_numpy(kept.astype(np.int32)).to(svc.device))
    drafted = rng.integers(1, svc.geometry.tokens_per_step + 1, svc.capacity).astype(np.int32)
    svc.table.seqlen_q.copy_(torch.from_numpy(drafted).to(svc.device))
    return compared


def test_chunk_without_a_prompt(device: str) -> None:
    """Its last W tokens, which see nothing below their beginning; of a shorter one all, which see what was there before."""
    svc = service(device)
    svc.admit(state_id=3, q_start=1000, seqlen_q=200)
    svc.admit(state_id=4, q_start=1000, seqlen_q=50)
    svc.set_prefill_batch([3, -1, 4])
    _, tail = prepared(svc)
    assert tail.cu_seqlens_q.tolist() == [0, 128, 128, 178] and tail.swa_valid_start.tolist() == [1072, 0, 0]
    assert tail.token_index[[0, 127, 128, 177]].tolist() == [72, 199, 200, 249]
    assert tail.swa_len[[0, 127, 128, 177, 178]].tolist() == [1, 128, 128, 128, 0]
    assert tail.swa_load_plan[:2, 0].tolist() == [[-1, 0, 0, 128], [-1, 0, 128, 128]]
    assert tail.swa_load_plan[2].tolist() == [[4, 68, 256, 66], [4, 0, 322, 62], [-1, 0, 0, 0]]  # 872 … 999


@pytest.mark.parametrize(("window", "drafts", "ring"), [(128, 5, 134), (9, 3, 12), (3, 5, 9), (1, 0, 1)])
def test_chunks_behind_a_prompt(device: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """Tokens fed behind a prompt, in chunks without prompt_end among decode steps, see all of their window that was ever run.

    A tool's output of Q + 1 tokens would lose the context that one of Q tokens has, or a decode step read what a chunk skipped.
    """
    rng = np.random.default_rng(seed)
    states = 5
    svc = service(device, states, 12 * (window + drafts + 1), geometry=zos.RingGeometry(window, drafts, ring))
    step = svc.geometry.tokens_per_step
    for state_id in range(states):
        svc.admit(state_id, prompt_end=int(rng.integers(1, 2 * window + 2)))
    svc.set_prefill_batch(range(states))
    svc.set_batch(range(states), batch=states)
    consumer, not_run = ConsumerRing(svc), np.zeros(states, np.int64)  # position behind the last that was skipped
    fed = 0

    def check(row: np.ndarray, position: np.ndarray, seen: list[list[int]], real: np.ndarray) -> None:
        for place in np.flatnonzero(real):
            first = max(position[place] - window + 1, not_run[row[place]])
            assert seen[place] == list(range(first, position[place] + 1)), (place, position[place])

    for number in range(40):
        prefill = number % 2 == 0
        if prefill:
            metadata, tail = prepared(svc)
            row, position, cu = (as_array(t) for t in (tail.token_row, tail.positions, tail.cu_seqlens_q))
            begin = as_array(metadata.seqlens_k) - np.diff(cu)
            skips = begin > as_array(metadata.seqlens_k) - as_array(metadata.seqlens_q)
            not_run = np.where(skips, begin, not_run)
            kept = as_array(metadata.seqlens_q).astype(np.int64)
            check(row, position, consumer.prefill(tail, np.diff(cu)), row >= 0)
            fed += int((kept > step).sum()) if number > 0 else 0  # the first step has the prompts
        else:
            metadata = svc.prepare()
            row, position, cu = (as_array(t) for t in (metadata.token_row, metadata.positions, metadata.cu_seqlens_q))
            kept = random_kept(svc, metadata, rng)
            seen = consumer.decode(metadata, kept)
            check(row, position, seen, (row >= 0) & (np.arange(len(row)) - cu[row] < kept[row]))
        svc.commit(metadata, torch.from_numpy(kept.astype(np.int32)).to(device))
        lengths = rng.choice(
            [1, step, step + 1, window - 1, window, window + 1, 2 * window, 2 * (window + step)], states
        )
        most = step if prefill else svc.max_prefill_tokens
        svc.table.seqlen_q.copy_(torch.from_numpy(np.clip(lengths, 1, most).astype(np.int32)).to(device))
    svc.check()
    assert fed > 0


def test_only_where_asked_for(device: str) -> None:
    """Without tail=True there is none and its buffers stay; with it they keep their addresses, for a graph to read."""
    svc = service(device)
    svc.admit(state_id=3, prompt_end=100)
    svc.set_prefill_batch([3])
    _, tail = prepared(svc)
    before = tail.positions.clone()
    assert svc.prepare_prefill().tail is None
    svc.table.q_start[3] = 7
    svc.prepare_prefill()
    assert_bitwise_equal(tail.positions, before, "positions")
    again = svc.prepare_prefill(tail=True).tail
    assert again is not None and again.positions.data_ptr() == tail.positions.data_ptr()


def test_opcheck(device: str) -> None:
    """Schema, fake implementation and functionalisation agree with what the operator does; too many places are refused."""
    svc = service(device, 4, 512)
    svc.admit(state_id=3, q_start=100, prompt_end=250)
    svc.set_prefill_batch([3, -1], batch=2)
    metadata, tail = prepared(svc)
    operator = torch.ops.zos.prefill_tail.default
    operands = {**metadata.operands, **vars(tail), "batch_cu_seqlens_q": metadata.cu_seqlens_q}
    arguments = [operands[argument.name] for argument in operator._schema.arguments]
    torch.library.opcheck(operator, tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
    with pytest.raises(ValueError, match=r"at most B \* max\(window, tokens_per_step\) = 256, got 257"):
        operator(*[torch.zeros(257, dtype=a.dtype) if a is tail.positions else a for a in arguments])
    with pytest.raises(ValueError, match="shape of token_row"):
        operator(*[a[:-1] if a is tail.token_row else a for a in arguments])


@pytest.mark.gpu
def test_capture() -> None:
    """A captured prefill step writes the tail of whatever the batch and the table hold at each replay."""
    svc = service("cuda")
    svc.warmup()
    svc.admit(state_id=3, prompt_end=1000, chunk_q=300)
    svc.set_prefill_batch([3])
    svc.prepare_prefill(tail=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata = svc.prepare_prefill(tail=True)
        svc.commit(metadata, metadata.seqlens_q)
    assert metadata.tail is not None
    found = []
    for _ in range(4):
        svc.flush()
        graph.replay()
        svc.launched(1)
        found.append((metadata.tail.num_tokens.item(), metadata.tail.positions[0].item()))
    assert found == [(0, 0), (0, 0), (28, 872), (100, 900)]
