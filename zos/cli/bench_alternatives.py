"""`zos bench`: prepare beside what an engine would use instead, alone and in a loop whose step takes a fixed time."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from zos.cli.alternatives import torch_metadata
from zos.loop import DecodeLoop
from zos.metadata import DecodeMetadata
from zos.service import MetadataService
from zos.table import COLUMNS

BODY_CYCLES = 195_000  # about 100 µs with its launch: a small step
STEPS = 160
RUNS = 3
STEPS_PER_REPLAY = (1, 8)

Figure = tuple[str, str, int, float, str, float]  # bench, variant, rows, µs, reference, its µs
Launches = dict[str, Callable[[], object]]
Medians = Callable[[Launches, int], dict[str, float]]


def bench_alternatives(
    size: int, replays: int, svc: MetadataService, metadata: DecodeMetadata, graph_medians: Medians
) -> Iterator[Figure]:
    """Prepare of a strided batch beside torch ops, the same compiled, and Triton's index kernels; all captured."""
    geometry, (ratio,) = svc.geometry, metadata.compression_index
    shape = (geometry.window, geometry.ring, geometry.tokens_per_step, ratio)
    entries = metadata.operands["compression_entries"][0]
    records, ids = svc.table.records, metadata.state_ids
    compiled = torch.compile(torch_metadata)
    launches: Launches = {
        "prepare": metadata.launch_prepare,
        "torch ops, captured": lambda: torch_metadata(records, ids, *shape, entries, False),
        "torch.compile, captured": lambda: compiled(records, ids, *shape, entries, False),
    }
    if importlib.util.find_spec("triton") is not None:
        from zos.cli.triton_index import triton_index

        index = torch.empty_like(metadata.kv_swa_index)
        launches["Triton, index only"] = triton_index(records, ids, index, geometry.ring, geometry.tokens_per_step)
    medians = graph_medians(launches, replays)
    for name in list(launches)[1:]:
        yield ("prepare_v4_decode_metadata", "strided ragged", size, medians["prepare"], name, medians[name])


def bench_end_to_end(rows: int, _replays: int) -> Iterator[Figure]:
    """A loop whose step is a kernel of fixed length: GPU and host time of a step, by who makes its metadata."""
    body = torch.cuda.CUDAGraph()
    with torch.cuda.graph(body):
        torch.cuda._sleep(BODY_CYCLES)

    def bodies() -> None:
        for _ in range(STEPS):
            body.replay()

    alone, alone_host = _timed(bodies)
    variants: dict[str, Callable[[], None]] = {
        **{f"zos, {each} step(s) a replay": _zos(rows, each) for each in STEPS_PER_REPLAY},
        "built by the host": _host_built(rows, body),
        "torch ops, eager": _eager(rows, body),
    }
    for name, run in variants.items():
        run()
        gpu, host = _timed(run)
        yield ("a step of 100 µs", name, rows, gpu, "its body alone", alone)
        yield ("a step of 100 µs", f"host time, {name}", rows, host, "launching its body alone", alone_host)


def _timed(run: Callable[[], None]) -> tuple[float, float]:
    """(µs of a step from the first launch to the end of the last, µs of the host's) of STEPS steps: least of some runs."""
    found = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        found.append(((time.perf_counter() - begin) * 1e6 / STEPS, host * 1e6 / STEPS))
    return min(gpu for gpu, _ in found), min(host for _, host in found)


def _service(rows: int, device: str) -> MetadataService:
    svc = MetadataService(capacity=2 * rows, max_batch=rows, device=device, token_layout="strided")
    for state_id in range(rows):
        svc.admit(state_id, q_start=100 * state_id)
    svc.set_batch(range(rows))
    return svc


def _zos(rows: int, steps_per_replay: int) -> Callable[[], None]:
    """A DecodeLoop; its mailbox is not read, as nobody asks."""

    def step(metadata: DecodeMetadata) -> torch.Tensor:
        torch.cuda._sleep(BODY_CYCLES)
        return metadata.seqlens_q

    loop = DecodeLoop(_service(rows, "cuda"), step, buckets=[rows], steps_per_replay=steps_per_replay)
    loop.set_batch(range(rows))
    return lambda: loop.run(STEPS)


def _host_built(rows: int, body: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What was kept is read back, the host's compiled code makes the next metadata, and one copy brings it over."""
    svc = _service(rows, "cpu")
    metadata = svc.prepare()
    outputs = [tensor for tensor in metadata.operands.values() if isinstance(tensor, torch.Tensor)]
    outputs = [tensor for tensor in outputs if tensor.data_ptr() != svc.table.records.data_ptr()]
    sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(pinned, device="cuda")
    places = np.cumsum([0, *sizes]).tolist()
    target = pinned.numpy()
    sources = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in outputs]
    kept = torch.full((rows,), svc.geometry.tokens_per_step, dtype=torch.int32, device="cuda")

    def run() -> None:
        for _ in range(STEPS):
            found = kept.cpu()  # waits for the step
            svc.commit(metadata, found)
            svc.prepare()
            for source, begin, end in zip(sources, places, places[1:], strict=False):
                target[begin:end] = source
            on_device.copy_(pinned, non_blocking=True)
            body.replay()

    return run


def _eager(rows: int, body: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Torch ops on the device, launched one by one; nothing waits."""
    svc = _service(rows, "cuda")
    svc.flush()
    geometry, records = svc.geometry, svc.table.records
    ids = torch.arange(rows, dtype=torch.int32, device="cuda")
    step = geometry.tokens_per_step
    q_start = records[:, COLUMNS["q_start"]]

    def run() -> None:
        for _ in range(STEPS):
            metadata = torch_metadata(records, ids, geometry.window, geometry.ring, step, 2, 2 + step - 1, False)
            body.replay()
            q_start.index_add_(0, ids, metadata.seqlens_q)

    return run
