"""Test that a sequence with a prefix hit recomputes one window, reads nothing below it, and emits no entry twice."""

from __future__ import annotations

import pytest

import zos
from tests.reference import Oracle, assert_bitwise_equal


@pytest.mark.parametrize(
    ("hit", "prompt_end", "expected"),
    [
        (0, 500, (0, 0, 0)),
        (127, 500, (0, 0, 0)),
        (128, 500, (0, 0, 0)),
        (129, 500, (1, 1, 129)),
        (1000, 1500, (872, 872, 1000)),
        (1000, 600, (472, 472, 600)),
        (1000, 128, (0, 0, 0)),
        (2**31 - 1, None, (2**31 - 129, 2**31 - 129, 2**31 - 1)),
    ],
)
def test_plan(hit: int, prompt_end: int | None, expected: tuple[int, int, int]) -> None:
    """[H - W, H) is recomputed, H the hit cut to the prompt; a hit no longer than the window is not adopted."""
    assert zos.plan_bounded_replay(hit, prompt_end) == expected


def test_admission(device: str) -> None:
    """The first queries see only recomputed positions, and entries below the hit are not emitted again."""
    svc = zos.MetadataService(capacity=4, max_batch=1, device=device, max_prefill_tokens=300)
    svc.admit(state_id=2, prefix_hit=1000, prompt_end=1100)
    svc.set_prefill_batch([2])
    metadata = svc.prepare_prefill()
    assert metadata.seqlens_q.tolist() == [228]
    assert metadata.positions[0].item() == 872
    assert metadata.swa_len[:228].tolist() == [min(j + 1, 128) for j in range(228)]
    assert metadata.swa_load_plan[0].tolist() == [[-1, 0, 0, 128], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    emitted = [index for index in metadata.compression_index[2].tolist() if index >= 0]
    assert emitted == list(range(500, 550))
    svc.commit(metadata, metadata.seqlens_q)
    svc.set_batch([2])
    decode = svc.prepare()
    assert decode.swa_len.tolist() == [128] * 6  # a window after the hit no query sees a missing position
    svc.check()


@pytest.mark.parametrize("hit", [0, 127, 128, 129, 500, 5000])
def test_admission_on_the_oracle(device: str, hit: int) -> None:
    """The table is what the oracle, which has its own words for the rule, makes of it."""
    oracle = Oracle(4, window=128, ring=134, tokens_per_step=6)
    svc = zos.MetadataService(capacity=4, max_batch=1, device=device)
    for table in (oracle, svc):
        table.admit(2, prefix_hit=hit, prompt_end=1000, chunk_q=64)
    svc.flush()
    assert_bitwise_equal(svc.table.records, oracle.records_array(), "records")


def test_short_hit_is_a_cold_start(device: str) -> None:
    """Nothing is saved by recomputing as much as was found."""
    svc = zos.MetadataService(capacity=4, max_batch=1, device=device)
    svc.admit(state_id=2, prefix_hit=100, prompt_end=1100)
    svc.flush()
    assert (svc.table.q_start[2].item(), svc.table.kv_cached_end[2].item()) == (0, 0)


@pytest.mark.parametrize("given", ["q_start", "swa_valid_start", "kv_cached_end"])
def test_hit_sets_the_start(given: str) -> None:
    """Two answers to one question are refused, and nothing is staged."""
    svc = zos.MetadataService(capacity=4, max_batch=1, device="cpu")
    with pytest.raises(ValueError, match=f"{given}=5 given, but prefix_hit=1000"):
        svc.admit(2, prefix_hit=1000, prompt_end=1100, **{given: 5})
    with pytest.raises(ValueError, match="prefix_hit=-1"):
        svc.admit(2, prefix_hit=-1, prompt_end=1100)
    svc.admit(2)


def test_a_hit_needs_a_prompt() -> None:
    """Cut to a prompt of no tokens, the hit would be dropped without a word, and the sequence decode from position 0."""
    svc = zos.MetadataService(capacity=4, max_batch=1, device="cpu")
    with pytest.raises(ValueError, match="prefix_hit=1000 of state_id 2 given without prompt_end"):
        svc.admit(2, prefix_hit=1000)
    svc.admit(2, prefix_hit=0)  # refused calls stage nothing, and there is nothing to drop here
    svc.flush()
    assert svc.table.generation[2].item() == 1


def test_hit_leaves_every_entry_its_tokens() -> None:
    """An entry that pools more than the recomputed window would be made of tokens that nobody computed."""
    for ratio, overlap, fits in ((6, False, True), (3, True, True), (7, False, False), (4, True, False)):
        ring = zos.CompressionRing(ratio, 4, overlap)
        svc = zos.MetadataService(4, 1, zos.RingGeometry(5, 3), "cpu", compression_ratios=[ring])
        svc.admit(1, prefix_hit=5, prompt_end=30)  # not adopted: nothing is missing
        if fits:
            svc.admit(0, prefix_hit=23, prompt_end=30)
            continue
        with pytest.raises(ValueError, match=f"ratio {ratio} pools {ring.pooled_tokens} tokens, and only the window=5"):
            svc.admit(0, prefix_hit=23, prompt_end=30)
        svc.admit(0)
