"""What compute-sanitizer watches, all of it compared.

`exercise` launches kernels eagerly, `loop` in graphs, `device_loop` in graphs of a WHILE node; `plant TOOL` is a fault to find.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import zos
from tests import test_ready
from tests.reference import as_array, assert_bitwise_equal
from zos.cli.compare import record_arrays
from zos.cli.parity_round import Rig, Round
from zos.cli.setups import SETUPS

PARITY_ROUNDS = 6  # of each setup that has mailboxes
QUEUES = ((3, 40), (33, 70), (1025, 90))  # (batch rows, entries of the ready queue), over the limits of commit's kernel
MOST_ROUNDS = 90  # within which the loops' requests must be over
STEPS = 3  # of a round of the loop that goes on by itself


def exercise(device: str, capacity: int = 1500) -> None:
    """Everything that is launched eagerly."""
    operators(device, capacity)
    step_records(device)
    view_block(device)
    attend(device)
    synchronise(device)


def synchronise(device: str) -> None:
    """Wait until faults of launched kernels have shown."""
    if device == "cuda":
        torch.cuda.synchronize()


def operators(device: str, capacity: int) -> None:
    """Edits, prepares of both layouts (every grid, budgets, odd windows) and of prefills, commits, ring stores and loads."""
    rng = np.random.default_rng(0)
    geometries = (zos.RingGeometry(), zos.RingGeometry(7, 3, 12), zos.RingGeometry(1, 0, 1), zos.RingGeometry(130, 16))
    for geometry in geometries:
        step = geometry.tokens_per_step
        for layout in ("packed", "strided"):
            svc = zos.MetadataService(
                capacity=capacity, max_batch=capacity, geometry=geometry, device=device, token_layout=layout,
                carry_tokens=True, max_prefill_tokens=500,
                compression_ratios=(2, zos.CompressionRing(4, step, overlap=True)),
            )  # fmt: skip
            svc.warmup()
            for state_id in range(capacity):
                svc.admit(
                    state_id=state_id, q_start=int(rng.integers(0, 400)), seqlen_q=int(rng.integers(0, step + 1)),
                    stop_at=500, tokens=[state_id],
                )  # fmt: skip
            for rows in (1, 3, min(129, capacity), min(600, capacity), capacity):
                ids = [-1 if rng.random() < 0.1 else int(i) for i in rng.permutation(capacity)[:rows]]
                budget = max(step, rows * step // 2) if layout == "packed" else None
                for max_tokens in (None, budget):
                    svc.set_batch(ids, batch=rows, max_tokens=max_tokens)
                    metadata = svc.prepare()
                    kept = metadata.seqlens_q
                    tokens = torch.ones(rows, step, dtype=torch.int64, device=device)
                    svc.commit(metadata, kept, kept > 4, tokens)
                    svc.commit(metadata, kept)  # duplicates
            for state_id, chunk in ((0, 300), (1, 7), (2, 41)):
                svc.reset(state_id, prompt_end=400)
                svc.set_seqlen_q(state_id, chunk)
            for full_index in (False, True):
                svc.set_prefill_batch([0, -1, 1, 2], batch=9)
                prefill = svc.prepare_prefill(full_index=full_index, tail=True)
            slab = torch.zeros(2 * capacity * geometry.ring * 99, dtype=torch.uint8, device=device)
            view = slab.view(2, capacity, geometry.ring, 1, 99)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                values = torch.randn(2, prefill.tokens, 96, device=device).to(dtype)
                torch.ops.zos.swa_ring_store(values, prefill.swa_write_slot, view, torch.empty_like(values))
                history = torch.empty(2, 9 * geometry.window, 96, device=device, dtype=dtype)
                torch.ops.zos.swa_ring_load(view, prefill.swa_load_plan, history, geometry.window)
            svc.commit(prefill, prefill.seqlens_q)
            for full_index in (False, True):  # too many rows for one launch, many of them deferred
                svc.set_prefill_batch(range(min(600, capacity)))
                svc.prepare_prefill(full_index=full_index, tail=True)
            svc.table.q_start[::7] = -1  # rows in error
            svc.prepare()
            for state_id in range(0, capacity, 3):
                svc.pause(state_id)
                svc.reset(state_id, prompt_end=20)
                svc.release(state_id)
            svc.flush()


def step_records(device: str) -> None:
    """Mailboxes, ready queues, refused batches and edits between steps in flight, against the oracle at every step."""
    for number, setup in enumerate(SETUPS):
        if setup.records:
            rig = Rig.make(setup, (device,))
            for repeat in range(PARITY_ROUNDS):
                Round(rig, np.random.default_rng([number, repeat]), judged=True).run()
    for rows, entries in QUEUES:
        test_ready.test_any_number_of_rows_and_entries(device, rows, entries, seed=0)


def loop(device: str, kind: type[zos.DecodeLoop], **options: int) -> None:
    """Graphs that begin with the edits staged, publish beside the next step and take snapshots, against the CPU's."""
    (actual, ends), (expected, their_ends) = requests_of(kind, device), requests_of(kind, "cpu")
    assert ends == their_ends and actual.keys() == expected.keys(), f"{kind.__name__}: {ends} is not {their_ends}"
    for name, array in expected.items():
        assert_bitwise_equal(actual[name], array, f"{name} of {kind.__name__}")
    ready_rows(device, kind, **options)
    synchronise(device)


def requests_of(kind: type[zos.DecodeLoop], device: str) -> tuple[dict[str, np.ndarray], list[tuple[str, int]]]:
    """Run more requests than rows to their end, some of them disturbed: (what the records and the table hold, how each ended)."""
    svc = zos.MetadataService(capacity=12, max_batch=4, device=device, token_layout="strided", max_prefill_tokens=16)
    run = kind(svc, lambda metadata: metadata.seqlens_q)
    requests = [run.submit(q_start=number, stop_at=30 + 13 * number) for number in range(20)]
    arrays = {}
    for number in range(MOST_ROUNDS):
        if not run.pending:
            break
        running = [request for request in requests if request.state is zos.RequestState.RUNNING]
        resting = [request for request in requests if request.state is zos.RequestState.PREEMPTED]
        if number % 4 == 1 and running:
            run.preempt(running[0])
        elif number % 4 == 3 and resting:
            run.resume(resting[0])
        elif number % 8 == 6 and running:
            run.cancel(running[-1])
        run.run(STEPS if kind is zos.DeviceLoop else 1)  # and no more ahead of the records than the CPU is
        for record in run.drain():
            arrays |= {f"{name} of step {record.step}": array for name, array in record_arrays(record).items()}
    assert not run.pending, f"{run.pending} requests are never over"
    svc.flush()
    arrays["records"] = as_array(svc.table.records).copy()
    return arrays, [(request.state.value, request.q_start) for request in requests]


def ready_rows(device: str, kind: type[zos.DecodeLoop], **options: int) -> None:
    """Mailbox, ready queue, drained edits and snapshots under a loop; every kept token is accounted for."""
    svc = zos.MetadataService(capacity=40, max_batch=8, device=device, token_layout="strided", snapshot_every=16)
    cache = zos.SwaCache(zos.StateSlotLayout(stored_layers=1), 40, device)
    pool = zos.SnapshotPool(svc, cache, num_snapshots=3)
    svc.attach_snapshots(pool)
    for state_id in range(40):
        svc.admit(state_id, stop_at=7 + state_id % 50)
    loop = kind(svc, lambda metadata: metadata.seqlens_q, buckets=[8], records=16, **options)
    loop.set_batch(range(8))
    svc.set_ready(range(8, 39))
    records = []
    for turn in range(40):
        if turn == 2:
            svc.reset(39)  # drained at the head of a graph
        loop.run()
        records += loop.drain()
        for snapshot in pool.poll():
            pool.free(snapshot)
    svc.check()
    lengths = svc.table.q_start[:39].tolist()
    moved = [0] * 39
    for record in records:
        for state_id, kept in zip(record.state_ids.tolist(), record.kept.tolist(), strict=True):
            moved[state_id] += kept if state_id >= 0 else 0
    if lengths != [7 + state_id % 50 for state_id in range(39)] or moved != lengths:
        raise SystemExit(f"a loop's records or table are wrong: {moved}, {lengths}")


def view_block(device: str) -> None:
    """A draft block's metadata."""
    step = zos.RingGeometry().tokens_per_step
    svc = zos.MetadataService(capacity=8, max_batch=4, device=device)
    svc.admit(1, q_start=200)
    svc.set_batch([1, -1])
    view = svc.view_block(svc.prepare(), torch.tensor([2, 0, 0, 0], dtype=torch.int32, device=device))
    if view.positions[:step].tolist() != [202 + j for j in range(step)]:
        raise SystemExit(f"view_block is wrong: {view.positions.tolist()}")


def attend(device: str) -> None:
    """Decode attention over ragged rows, padding and an unaligned ring; softmax weights of equal keys give the key itself."""
    for ring, gap in ((134, 0), (144, 7)):
        svc = zos.MetadataService(capacity=5, max_batch=4, geometry=zos.RingGeometry(ring=ring), device=device)
        for state_id, q_start in ((1, 0), (3, 1000), (4, 60)):
            svc.admit(state_id, q_start=q_start, seqlen_q=1 + state_id)
        svc.set_batch([3, -1, 1, 4])
        metadata = svc.prepare()
        slab = torch.zeros(5 * (ring * 528 + gap), dtype=torch.uint8, device=device)
        cache = slab.as_strided((5, ring, 1, 528), (ring * 528 + gap, 528, 528, 1))
        ones = torch.ones(5 * ring, 512, device=device)
        torch.ops.zos.swa_ring_store(ones, torch.arange(5 * ring, device=device), cache)
        q = torch.randn(metadata.tokens, 16, 512, device=device).bfloat16()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
        torch.ops.zos.swa_decode_attention(
            q, cache, metadata.kv_swa_index, metadata.swa_len, None, out, lse, 512**-0.5, svc.geometry.tokens_per_step
        )
        live = (metadata.token_row >= 0)[:, None, None]
        if not torch.equal(out, live.to(out.dtype).expand_as(out)):
            raise SystemExit("attention over keys of ones is not one, or padding is not zero")


def plant(tool: str) -> None:
    """Run the fault that `tool` looks for; it must not pass unnoticed."""
    import cupy

    source = (Path(__file__).parent / "planted_faults.cu").read_text()
    kernel = cupy.RawModule(code=source).get_function(f"{tool}_fault")
    memory = cupy.cuda.runtime.malloc(64 * 4)  # not from CuPy's pool, which is larger than asked for
    kernel((1,), (64,), (np.uint64(memory), np.int32(64)))
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        print(f"as planned: {error}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["plant", tool]:
            plant(tool)
        case ["exercise"]:
            exercise("cuda")
        case ["loop"]:
            loop("cuda", zos.DecodeLoop, steps_per_replay=2)
        case ["device_loop"]:
            loop("cuda", zos.DeviceLoop)
        case unknown:
            raise SystemExit(f"{unknown} is none of exercise, loop, device_loop, plant TOOL")
