"""What compute-sanitizer watches: `exercise` runs every kernel over its odd shapes, `plant TOOL` one fault that TOOL must find."""

from __future__ import annotations

import sys
from pathlib import Path


def exercise() -> None:
    """Edits, prepares of both layouts (every grid, budgets, odd windows) and of prefills, commits, ring stores and loads."""
    import numpy as np
    import torch

    import zos

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
                prefill = svc.prepare_prefill(full_index=full_index)
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
                svc.prepare_prefill(full_index=full_index)
            svc.table.q_start[::7] = -1  # rows in error
            svc.prepare()
            for state_id in range(0, 1500, 3):
                svc.pause(state_id)
                svc.reset(state_id, prompt_end=20)
                svc.release(state_id)
            svc.flush()
    torch.cuda.synchronize()


def plant(tool: str) -> None:
    """Run the fault that `tool` looks for; it must not pass unnoticed."""
    import cupy
    import numpy as np

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
    else:
        exercise()
