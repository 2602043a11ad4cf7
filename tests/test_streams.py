"""Test that launches keep their order across streams and that a capture takes in nothing that a replay must not repeat."""

from __future__ import annotations

import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal

pytestmark = pytest.mark.gpu

LONG = 100_000_000  # cycles, about 50 ms: longer than any host call takes to overtake it


def service(**options: object) -> zos.MetadataService:
    svc = zos.MetadataService(capacity=16, max_batch=4, device="cuda", **options)  # type: ignore[arg-type]
    svc.admit(state_id=3, q_start=1000)
    svc.set_batch([3], batch=1)
    svc.warmup()
    return svc


@pytest.mark.parametrize("default", [True, False])
def test_launches_go_to_the_current_stream(default: bool) -> None:
    """A prepare behind a busy stream sees what torch wrote on that stream just before it, on the default stream as well."""
    svc = service()
    svc.flush()
    stream = torch.cuda.default_stream() if default else torch.cuda.Stream()
    for busy in (False, True):  # first a rehearsal: torch loads its kernels at first use, which waits for the device
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG if busy else 1)
            svc.table.q_start[3].fill_(50)  # an assignment would copy the number from the host, and wait
            svc.set_seqlen_q(3, 2)
            metadata = svc.prepare()
            svc.commit(metadata, metadata.seqlens_q)
            assert not busy or not stream.query(), "the stream was not busy: the test proves nothing"
            assert metadata.positions.tolist() == [50, 51, 0, 0, 0, 0]
            assert svc.table.q_start[3].item() == 52


def test_edit_from_another_stream_waits() -> None:
    """A reset on one stream takes effect after the prepare that another stream has not begun yet."""
    svc = service()
    svc.prepare()
    compute, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(LONG)
        metadata = svc.prepare()
    with torch.cuda.stream(other):
        svc.reset(3)
        svc.flush()
        assert not compute.query(), "the stream was not busy: the test proves nothing"
    torch.cuda.synchronize()
    assert metadata.kv_swa_index_offset_len[0].tolist() == [471, 128]
    assert svc.table.q_start[3].item() == 0
    assert svc.prepare().kv_swa_index_offset_len[0].tolist() == [402, 1]


def test_staging_does_not_disturb_a_queued_flush() -> None:
    """The next step's ids are staged while the launch that reads this step's buffer still waits on the device."""
    svc = zos.MetadataService(capacity=16, max_batch=2, device="cuda", metadata_slots=2)
    for state_id in (3, 4, 7, 8):
        svc.admit(state_id=state_id, q_start=1000)
    svc.flush()
    svc.warmup()
    for _ in range(50):
        torch.cuda._sleep(LONG // 100)
        svc.set_batch([3, 4], slot=0)
        first = svc.prepare(slot=0)
        svc.set_batch([7, 8], slot=1)
        second = svc.prepare(slot=1)
        assert first.kv_swa_index_offset_len[[0, 6], 0].tolist() == [471, 605]
        assert second.kv_swa_index_offset_len[[0, 6], 0].tolist() == [1007, 1141]


def test_full_pool_blocks_and_loses_nothing() -> None:
    """More flushes than there are buffers, all behind a busy stream: each edit arrives, in order."""
    svc = service()
    svc.prepare()
    torch.cuda._sleep(LONG)
    for number in range(20):
        svc.set_seqlen_q(3, 1 + number % 6)
        svc.flush()
    assert svc.table.seqlen_q[3].item() == 1 + 19 % 6


def test_capture_refuses_staged_edits() -> None:
    """They would be applied again at every replay; the capture is not harmed and the edits stay staged."""
    svc = service()
    graph = torch.cuda.CUDAGraph()
    svc.flush()
    svc.set_seqlen_q(3, 2)
    with torch.cuda.graph(graph):
        with pytest.raises(zos.EditsDuringCaptureError):
            svc.prepare()
        with pytest.raises(zos.EditsDuringCaptureError):
            svc.flush()
        metadata = svc.slot_metadata(0, 1, 6)
        svc.launch_prepare(metadata)
    graph.replay()
    assert metadata.seqlens_q.tolist() == [6]
    assert svc.prepare().seqlens_q.tolist() == [2]


def test_captured_step_follows_edits() -> None:
    """A graph of one's own: flush, replay, launched. Edits between replays take effect, and each replay moves the sequence."""
    svc = service(token_layout="strided")
    svc.flush()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata = svc.prepare()
        svc.commit(metadata, metadata.seqlens_q)
    before = svc.table.records.clone()
    assert before[3, 2].item() == 1000, "capturing moved the sequence"
    for expected in (1006, 1012):
        svc.flush()
        graph.replay()
        svc.launched(1)
        assert svc.table.q_start[3].item() == expected
    svc.set_seqlen_q(3, 1)
    svc.flush()
    graph.replay()
    svc.launched(1)
    assert svc.table.q_start[3].item() == 1013
    assert svc.counters() == {"stale": 0, "duplicate": 0, "deferred": 0, "errors": 0}


def test_steady_state_waits_for_nothing() -> None:
    """Replays and flushes make no synchronising CUDA call: torch would raise on one."""
    svc = service()
    loop = zos.DecodeLoop(svc, lambda metadata: metadata.seqlens_q)
    loop.set_batch([3])
    loop.run(steps=2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            svc.set_seqlen_q(3, 1 + number)
            loop.run(steps=3)
            svc.counters()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert svc.table.q_start[3].item() == 1000 + 12 + 3 * (1 + 2 + 3)


def test_warmup_inside_a_live_loop() -> None:
    """Capturing another bucket in the middle of a run moves no sequence and touches no metadata awaiting its result."""
    svc = service()
    loop = zos.DecodeLoop(svc, lambda metadata: metadata.seqlens_q)
    metadata = svc.prepare()
    tickets, records = metadata.tickets.clone(), svc.table.records.clone()
    loop.capture([1, 4])
    assert_bitwise_equal(metadata.tickets, tickets, "tickets")
    assert_bitwise_equal(svc.table.records, records, "records")
    svc.commit(metadata, metadata.seqlens_q)
    assert svc.table.q_start[3].item() == 1006
