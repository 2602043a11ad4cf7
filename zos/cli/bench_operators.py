"""`zos bench`: prepare of other batches and with a cold L2, the smaller operators, and a kernel that derives its slots inline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import zos
from device_kernels import floor
from device_kernels.module import divisor
from zos.cache import SwaCache
from zos.layout import StateSlotLayout
from zos.metadata import DecodeMetadata
from zos.service import MetadataService
from zos.snapshots import SnapshotPool

FLUSHED_BYTES = 128 * 2**20  # more than any L2 holds
FLUSHED_NODES = 10
WINDOWS_BACK = 10  # where sequences stand, in windows: their rings are full
TAIL_CHUNK = 512
EXAMPLE = Path(__file__).parents[2] / "examples" / "inline_slots.cu"
WARP, WARPS = 32, 4

Figure = tuple[str, str, int, float, str, float]  # bench, variant, rows, µs, reference, its µs
Launches = dict[str, Callable[[], object]]
Medians = Callable[..., dict[str, float]]
Prepared = tuple[MetadataService, DecodeMetadata]


def bench_cold(
    size: int, replays: int, svc: MetadataService, metadata: DecodeMetadata, medians: Medians
) -> Iterator[Figure]:
    """Prepare and its floor, each after a kernel that puts other bytes into the L2; the time of that is taken off."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=svc.device)
    bound = floor.bind_floor(floor.DEPENDENT_LOADS, **metadata.operands)

    def after_flush(launch: Callable[[], object]) -> Callable[[], None]:
        def both() -> None:
            flushed.zero_()
            launch()

        return both

    launches: Launches = {
        "flush": flushed.zero_,
        "prepare": after_flush(metadata.launch_prepare),
        "floor": after_flush(bound),
    }
    found = medians(launches, replays, FLUSHED_NODES)
    prepare, its_floor = (found[name] - found["flush"] for name in ("prepare", "floor"))
    yield ("prepare_v4_decode_metadata", "strided ragged, cold L2", size, prepare, "floor, cold L2", its_floor)


def bench_batches(size: int, replays: int, prepared: dict[str, Prepared], medians: Medians) -> Iterator[Figure]:
    """Prepare of batches by name, each beside its floor."""
    for name, (_, metadata) in prepared.items():
        launches: Launches = {
            "floor": floor.bind_floor(floor.DEPENDENT_LOADS, **metadata.operands),
            "prepare": metadata.launch_prepare,
        }
        found = medians(launches, replays)
        yield ("prepare_v4_decode_metadata", name, size, found["prepare"], "floor", found["floor"])


def bench_small(
    size: int, replays: int, svc: MetadataService, metadata: DecodeMetadata, medians: Medians
) -> Iterator[Figure]:
    """A draft block's view, the edits at the head of a graph, and a step's snapshots, each beside an empty kernel."""
    num_kept = torch.ones(size, dtype=torch.int32, device=svc.device)
    pool = _snapshots(size)
    launches: Launches = {
        "view_block": lambda: svc.view_block(metadata, num_kept),
        "apply_table_edits, none staged": svc.drain_edits,
        "swa_ring_snapshot, none marked": pool,
        "empty kernel": floor.bind_floor(floor.EMPTY, **metadata.operands),
    }
    found = medians(launches, replays)
    for name in list(launches)[:-1]:
        bench, _, variant = name.partition(", ")
        yield (bench, variant or "one kept", size, found[name], "empty kernel", found["empty kernel"])


def _snapshots(rows: int) -> Callable[[], None]:
    """What a step launches of snapshots where no row went through a boundary."""
    svc = MetadataService(rows, rows, device="cuda", token_layout="strided", snapshot_every=1024)
    pool = SnapshotPool(svc, SwaCache(StateSlotLayout(stored_layers=20), rows, "cuda"), num_snapshots=2)
    svc.attach_snapshots(pool)
    for state_id in range(rows):
        svc.admit(state_id, q_start=1)
    svc.set_batch(range(rows))
    metadata = svc.prepare()
    svc.commit(metadata, metadata.seqlens_q)
    return lambda: pool.snapshot(metadata)


def bench_tail(size: int, replays: int, medians: Medians) -> Iterator[Figure]:
    """Prefill metadata of `size` rows at the end of their prompts, with and without the tail's sub-batch."""
    svc = MetadataService(size, size, device="cuda", max_prefill_tokens=size * TAIL_CHUNK)
    start = WINDOWS_BACK * svc.geometry.window
    for state_id in range(size):
        svc.admit(state_id, q_start=start, prompt_end=start + TAIL_CHUNK, chunk_q=TAIL_CHUNK)
    svc.set_prefill_batch(range(size))
    svc.flush()
    launches: Launches = {
        "with tail": lambda: svc.prepare_prefill(tail=True),
        "without": svc.prepare_prefill,
    }
    found = medians(launches, replays)
    yield (
        "prepare_v4_prefill_metadata",
        "with tail",
        size * TAIL_CHUNK,
        found["with tail"],
        "without",
        found["without"],
    )


def bench_inline(
    size: int, replays: int, svc: MetadataService, metadata: DecodeMetadata, medians: Medians
) -> Iterator[Figure]:
    """The example's kernel, which derives its slots from two int32 a token, beside the same with index rows."""
    import cupy

    ring = svc.geometry.ring
    entries = torch.zeros(
        svc.capacity * ring, StateSlotLayout().entry.entry_bytes, dtype=torch.uint8, device=svc.device
    )
    sums = torch.empty(metadata.tokens, dtype=torch.int32, device=svc.device)
    options = ("--std=c++17", f"-I{zos.get_include()}", f"-I{EXAMPLE.parent}")
    module = cupy.RawModule(code=EXAMPLE.read_text(), options=options)
    slots = np.array([divisor(ring)], np.dtype([("divisor", "i4"), ("multiplier", "u4"), ("shift", "i4")]))
    blocks, threads = (-(-metadata.tokens // WARPS),), (WARP * WARPS,)
    ends = np.int32(metadata.tokens), np.int32(entries.shape[1])

    def launch(name: str, inputs: tuple[torch.Tensor, ...], last: object) -> Callable[[], None]:
        kernel = module.get_function(name)
        pointers = [np.uint64(tensor.data_ptr()) for tensor in (*inputs, entries, sums)]

        def run() -> None:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel(blocks, threads, (*pointers, *ends, last))

        return run

    launches: Launches = {
        "inline": launch("sum_of_keys", (metadata.kv_swa_index_offset_len,), slots),
        "index": launch(
            "sum_of_indexed_keys", (metadata.kv_swa_index, metadata.swa_len), np.int32(svc.geometry.window)
        ),
    }
    found = medians(launches, replays)
    yield (
        "a kernel over all keys",
        "slots derived inline",
        size,
        found["inline"],
        "slots from kv_swa_index",
        found["index"],
    )
