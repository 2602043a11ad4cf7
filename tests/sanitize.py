"""What compute-sanitizer watches.

`exercise` runs every kernel over its odd shapes, `device_loop` the steps of a WHILE node, `plant TOOL` one fault that TOOL must
find.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import zos


def exercise() -> None:
    """Edits, prepares of both layouts (every grid, budgets, odd windows) and of prefills, commits, ring stores and loads."""
    rng = np.random.default_rng(0)
    geometries = (zos.RingGeometry(), zos.RingGeometry(7, 3, 12), zos.RingGeometry(1, 0, 1), zos.RingGeometry(130, 16))
    for geometry in geometries:
        step = geometry.tokens_per_step
        for layout in ("packed", "strided"):
            svc = zos.MetadataService(
                capacity=1500, max_batch=1500, geometry=geometry, device="cuda", token_layout=layout,
                carry_tokens=True, max_prefill_tokens=500,
                compression_ratios=(2, zos.CompressionRing(4, step, overlap=True)),
            )  # fmt: skip
            svc.warmup()
            for state_id in range(1500):
                svc.admit(
                    state_id=state_id, q_start=int(rng.integers(0, 400)), seqlen_q=int(rng.integers(0, step + 1)),
                    stop_at=500, tokens=[state_id],
                )  # fmt: skip
            for rows in (1, 3, 129, 600, 1500):
                ids = [-1 if rng.random() < 0.1 else int(i) for i in rng.permutation(1500)[:rows]]
                budget = max(step, rows * step // 2) if layout == "packed" else None
                for max_tokens in (None, budget):
                    svc.set_batch(ids, batch=rows, max_tokens=max_tokens)
                    metadata = svc.prepare()
                    kept = metadata.seqlens_q
                    tokens = torch.ones(rows, step, dtype=torch.int64, device="cuda")
                    svc.commit(metadata, kept, kept > 4, tokens)
                    svc.commit(metadata, kept)  # duplicates
            for state_id, chunk in ((0, 300), (1, 7), (2, 41)):
                svc.reset(state_id, prompt_end=400)
                svc.set_seqlen_q(state_id, chunk)
            for full_index in (False, True):
                svc.set_prefill_batch([0, -1, 1, 2], batch=9)
                prefill = svc.prepare_prefill(full_index=full_index, tail=True)
            slab = torch.zeros(2 * 1500 * geometry.ring * 99, dtype=torch.uint8, device="cuda")
            view = slab.view(2, 1500, geometry.ring, 1, 99)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                values = torch.randn(2, prefill.tokens, 96, device="cuda").to(dtype)
                torch.ops.zos.swa_ring_store(values, prefill.swa_write_slot, view, torch.empty_like(values))
                history = torch.empty(2, 9 * geometry.window, 96, device="cuda", dtype=dtype)
                torch.ops.zos.swa_ring_load(view, prefill.swa_load_plan, history, geometry.window)
            svc.commit(prefill, prefill.seqlens_q)
            for full_index in (False, True):  # too many rows for one launch, many of them deferred
                svc.set_prefill_batch(range(600))
                svc.prepare_prefill(full_index=full_index, tail=True)
            svc.table.q_start[::7] = -1  # rows in error
            svc.prepare()
            for state_id in range(0, 1500, 3):
                svc.pause(state_id)
                svc.reset(state_id, prompt_end=20)
                svc.release(state_id)
            svc.flush()
    torch.cuda.synchronize()


def run_loop(device: str, loop_type: type[zos.DecodeLoop], **options: int) -> None:
    """Mailbox, ready queue, drained edits and snapshots under a loop; every kept token is accounted for."""
    svc = zos.MetadataService(capacity=40, max_batch=8, device=device, token_layout="strided", snapshot_every=16)
    cache = zos.SwaCache(zos.StateSlotLayout(stored_layers=1), 40, device)
    pool = zos.SnapshotPool(svc, cache, num_snapshots=3)
    svc.attach_snapshots(pool)
    for state_id in range(40):
        svc.admit(state_id, stop_at=7 + state_id % 50)
    loop = loop_type(svc, lambda metadata: metadata.seqlens_q, buckets=[8], records=16, **options)
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
    if device == "cuda":
        torch.cuda.synchronize()


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
    if sys.argv[1] == "plant":
        plant(sys.argv[2])
    elif sys.argv[1] == "device_loop":
        run_loop("cuda", zos.DeviceLoop)
    else:
        exercise()
        run_loop("cuda", zos.DecodeLoop, steps_per_replay=2)
        view_block("cuda")
        attend("cuda")
