"""Test that the loop gives the same sequences captured or eager, padded to any bucket, and starves no deferred row."""

from __future__ import annotations

import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal
from zos.loop import default_buckets


def keep_all(metadata: zos.DecodeMetadata) -> torch.Tensor:
    return metadata.seqlens_q


def keep_by_position(metadata: zos.DecodeMetadata) -> zos.StepResult:
    """Keep 1 … seqlen_q tokens, by position, and finish at lengths past 60."""
    length = metadata.seqlens_k
    kept = torch.where(metadata.seqlens_q > 0, 1 + length % metadata.seqlens_q.clamp(min=1), 0).to(torch.int32)
    return zos.StepResult(kept, length > 60)


def service(device: str, rows: int = 8, **options: object) -> zos.MetadataService:
    svc = zos.MetadataService(capacity=32, max_batch=rows, device=device, **options)  # type: ignore[arg-type]
    for state_id in range(rows):
        svc.admit(state_id=state_id, q_start=10 * state_id, seqlen_q=1 + state_id % 6)
    return svc


def test_default_buckets() -> None:
    """1, 2, 4, 8, then multiples of 8, and max_batch itself."""
    assert default_buckets(30) == (1, 2, 4, 8, 16, 24, 30)
    assert default_buckets(1) == (1,)
    assert default_buckets(3) == (1, 2, 3)


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_loop_equals_single_steps(device: str, layout: str, rows: int) -> None:
    """A run of the loop leaves the table that prepare, step and commit one by one leave."""
    by_hand, svc = service(device, token_layout=layout), service(device, token_layout=layout)
    loop = zos.DecodeLoop(svc, keep_by_position)
    loop.set_batch(range(rows))
    loop.run(steps=9)
    by_hand.set_batch(range(rows))
    for _ in range(9):
        metadata = by_hand.prepare()
        by_hand.commit(metadata, *keep_by_position(metadata))
    assert_bitwise_equal(svc.table.records, by_hand.table.records, "records")
    svc.check()
    assert svc.counters() == by_hand.counters()


def test_changing_batches(device: str) -> None:
    """Edits and batches staged between runs take effect before the next step; buckets grow and shrink."""
    svc = service(device)
    loop = zos.DecodeLoop(svc, keep_all, buckets=(2, 8))
    loop.set_batch([0, 1])
    loop.run()
    loop.set_batch([5, 2, 1, 0])
    svc.release(0)
    loop.run(steps=2)
    assert loop.metadata.batch == 8
    svc.admit(state_id=0, q_start=500, seqlen_q=6)
    loop.run()
    svc.check()
    assert svc.table.q_start[:6].tolist() == [506, 10 + 4 * 2, 20 + 3 * 3, 30, 40, 50 + 3 * 6]


def test_deferred_rows_get_their_turn(device: str) -> None:
    """With room for one row of eight a step, every row moves in eight steps."""
    svc = service(device)
    for state_id in range(8):
        svc.set_seqlen_q(state_id, 6)
    loop = zos.DecodeLoop(svc, keep_all)
    loop.set_batch(range(8), max_tokens=6)
    loop.run(steps=8)
    svc.check()
    assert svc.table.q_start[:8].tolist() == [10 * state_id + 6 for state_id in range(8)]
    assert svc.counters()["deferred"] == 7 * 8
    loop.run(steps=16)
    svc.check()
    assert svc.table.q_start[:8].tolist() == [10 * state_id + 18 for state_id in range(8)]


def test_step_results_of_every_kind(device: str) -> None:
    """num_kept alone, a tuple and a StepResult are taken; anything else is named."""
    for returned in (
        keep_all,
        lambda m: (m.seqlens_q,),
        lambda m: (m.seqlens_q, m.seqlens_k > 10**6),
        keep_by_position,
    ):
        svc = service(device)
        loop = zos.DecodeLoop(svc, returned)
        loop.set_batch([3])
        loop.run()
        svc.check()
        assert svc.table.q_start[3].item() > 30
    loop = zos.DecodeLoop(service(device), lambda m: None)  # type: ignore[arg-type, return-value]
    loop.set_batch([3])
    with pytest.raises(TypeError, match="step returned NoneType"):
        loop.run()


def test_bad_use(device: str) -> None:
    """No batch, too many rows, no buckets."""
    svc = service(device)
    loop = zos.DecodeLoop(svc, keep_all, buckets=(1, 2))
    with pytest.raises(ValueError, match="call set_batch first"):
        loop.run()
    with pytest.raises(ValueError, match="3 rows, more than the largest bucket 2"):
        loop.set_batch([0, 1, 2])
    with pytest.raises(ValueError, match="buckets is empty"):
        zos.DecodeLoop(svc, keep_all, buckets=())
    with pytest.raises(ValueError, match="buckets=9"):
        zos.DecodeLoop(svc, keep_all, buckets=(9,))


def test_failing_step_moves_nothing(device: str) -> None:
    """A step that raises, while warming up or eagerly, leaves every sequence where it was, and the loop usable."""
    svc = service(device)
    failing = [True]

    def step(metadata: zos.DecodeMetadata) -> torch.Tensor:
        if failing[0]:
            raise ArithmeticError("step failed")
        return metadata.seqlens_q

    loop = zos.DecodeLoop(svc, step)
    loop.set_batch([3, 4])
    svc.flush()
    before = svc.table.records.clone()
    with pytest.raises(ArithmeticError):
        loop.run()
    assert_bitwise_equal(svc.table.records, before, "records")
    failing[0] = False
    loop.run()
    svc.check()
    assert svc.table.q_start[3].item() == 34


@pytest.mark.gpu
def test_capture_is_keyed_by_batch_and_budget() -> None:
    """Each (batch, budget) has its graph, captured once; nothing is allocated by later runs."""
    svc = service("cuda")
    loop = zos.DecodeLoop(svc, keep_all, buckets=(4, 8))
    loop.capture()
    assert loop.captured == ((4, 24), (8, 48))
    loop.set_batch(range(8), max_tokens=12)
    loop.run()
    assert loop.captured == ((4, 24), (8, 48), (8, 12))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for rows in (1, 3, 8, 5):
        loop.set_batch(range(rows))
        loop.run(steps=5)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def test_deferred_rows_get_their_turn_when_the_batch_is_set_each_step(device: str) -> None:
    """An engine with arrivals sets the batch again all the time; the order that waiting rows have by then stays."""
    svc = service(device)
    for state_id in range(3):
        svc.set_seqlen_q(state_id, 6)
    loop = zos.DecodeLoop(svc, keep_all)
    for _ in range(12):
        loop.set_batch([0, 1, 2], max_tokens=6)
        loop.run()
    svc.check()
    assert svc.table.q_start[:3].tolist() == [24, 34, 44]


def test_newcomers_wait_behind_deferred_rows(device: str) -> None:
    """States that waited come first, newcomers last in the order given, and a duplicate is still refused."""
    svc = service(device)
    loop = zos.DecodeLoop(svc, keep_all, buckets=(4,))
    loop.set_batch([0, 1, 2], max_tokens=6)
    loop.run()
    loop.set_batch([7, 2, 0, 5], max_tokens=6)
    svc.flush()
    assert loop.metadata.state_ids.tolist() == [2, 0, 7, 5]
    with pytest.raises(ValueError, match="state_id 2 twice"):
        loop.set_batch([2, 0, 2, 1], max_tokens=6)


def test_run_leaves_nothing_staged(device: str) -> None:
    """Rotation waits for the next step: a capture of one's own right after a run meets no edits that one did not make."""
    svc = service(device)
    loop = zos.DecodeLoop(svc, keep_all)
    loop.set_batch(range(8), max_tokens=12)
    loop.run(steps=2)
    assert not svc._edits


def test_foreign_batch_is_refused(device: str) -> None:
    """Two loops on one slot, or a set_batch beside a loop: running the other's rows would move the wrong sequences."""
    svc = service(device)
    first, second = zos.DecodeLoop(svc, keep_all), zos.DecodeLoop(svc, keep_all)
    first.set_batch([0, 1])
    second.set_batch([7])
    with pytest.raises(ValueError, match="slot 0 was set by another caller"):
        first.run()
    second.run()
    svc.set_batch([3])
    with pytest.raises(ValueError, match="set by another caller"):
        second.run()
    svc.check()
    assert svc.table.q_start[:2].tolist() == [0, 10]


@pytest.mark.parametrize("budget", [5, "x", 2.5])
def test_bad_budget(device: str, budget: object) -> None:
    """The budget is checked before it is cut to what the batch can use; strided has none."""
    loop = zos.DecodeLoop(service(device), keep_all)
    with pytest.raises(ValueError, match="max_tokens="):
        loop.set_batch([1], max_tokens=budget)  # type: ignore[arg-type]
    strided = zos.DecodeLoop(service(device, token_layout="strided"), keep_all)
    with pytest.raises(ValueError, match="no token budget"):
        strided.set_batch([1], max_tokens=100)


@pytest.mark.gpu
def test_loops_on_two_devices() -> None:
    """A loop on the second GPU captures on that one, also after a capture on the first."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (0, 1):
        svc = service(f"cuda:{index}")
        loop = zos.DecodeLoop(svc, keep_all)
        loop.set_batch([3])
        loop.run(steps=2)
        assert svc.table.q_start[3].item() == 38
        assert torch.cuda.current_device() == 0
