"""`zos bench`: times the operators beside their floors: in CUDA graphs on a GPU, by the clock on the CPU."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from host_fallback import decode_metadata as host_decode_metadata
from host_fallback.mailbox import record_words
from zos.cache import SwaCache
from zos.cli import InputError
from zos.cli.bench_alternatives import bench_alternatives, bench_end_to_end
from zos.cli.bench_attention import bench_attention
from zos.cli.bench_loop import bench_gpu, bench_host, bench_stall
from zos.cli.bench_operators import EXAMPLE, bench_batches, bench_cold, bench_inline, bench_small, bench_tail
from zos.cli.bench_plot import draw
from zos.cli.options import check_output, usable
from zos.layout import StateSlotLayout
from zos.metadata import DecodeMetadata
from zos.service import MetadataService
from zos.step_checks import BATCH_STATE_WORDS
from zos.table import COLUMNS, RECORD_WORDS, Phase

SIZES = (1, 64, 256, 512, 1024, 4096)
QUICK_SIZES = (1, 256)
NODES = 50  # launches in a captured graph: its own launch cost spreads over them
PADDING_SHARE = 0.1

Launch = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measured figure beside its reference, both from the same run."""

    bench: str
    variant: str
    size: int  # rows of the batch
    median_us: float
    reference: str
    reference_us: float
    ratio: float


def row(bench: str, variant: str, size: int, median_us: float, reference: str, reference_us: float) -> Row:
    """Make a Row; the ratio follows from its two times."""
    return Row(
        bench, variant, size, round(median_us, 3), reference, round(reference_us, 3), round(median_us / reference_us, 3)
    )


def ragged_service(
    rows: int, device: str, token_layout: str, padding: float = PADDING_SHARE, ragged: bool = True
) -> tuple[MetadataService, DecodeMetadata]:
    """Make a service with `rows` rows of random length and position in scattered states, a tenth of the rows padding; prepared.

    Rows that are not `ragged` are as long as a step.
    """
    rng = np.random.default_rng(rows)
    svc = MetadataService(capacity=max(4096, rows), max_batch=rows, device=device, token_layout=token_layout)
    step = svc.geometry.tokens_per_step
    records = np.zeros((svc.capacity, RECORD_WORDS), np.int32)
    records[:, COLUMNS["phase"]] = Phase.LIVE
    records[:, COLUMNS["seqlen_q"]] = rng.integers(1, step + 1, svc.capacity) if ragged else step
    records[:, COLUMNS["q_start"]] = rng.integers(0, 100_000, svc.capacity)
    svc.table.records.copy_(torch.from_numpy(records))
    states = rng.permutation(svc.capacity)[:rows]
    svc.set_batch([-1 if rng.random() < padding else int(state) for state in states])
    return svc, svc.prepare()


def graph_medians(launches: dict[str, Launch], replays: int, nodes: int = NODES) -> dict[str, float]:
    """Median µs of each launch as a node of a captured graph of `nodes`, the graphs replayed in turn."""
    graphs = {}
    for name, launch in launches.items():
        launch()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(nodes):
                launch()
        graphs[name].replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / nodes)
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def clock_medians(launches: dict[str, Launch], repeats: int) -> dict[str, float]:
    """Median µs of each call by the host's clock, the calls made in turn."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(repeats):
        for name, launch in launches.items():
            begin = time.perf_counter()
            launch()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def bench_prepare(size: int, replays: int) -> Iterator[Row]:
    """Both layouts of prepare_v4_decode_metadata beside its floors (same loads and output bytes, warm)."""
    from device_kernels import floor

    references = {"floor": floor.DEPENDENT_LOADS, "write-only": floor.WRITE_ONLY, "empty kernel": floor.EMPTY}
    prepared = {layout: ragged_service(size, "cuda", layout)[1] for layout in ("strided", "packed")}
    operands = prepared["strided"].operands
    launches: dict[str, Launch] = {name: floor.bind_floor(kernel, **operands) for name, kernel in references.items()}
    launches |= {layout: metadata.launch_prepare for layout, metadata in prepared.items()}
    medians = graph_medians(launches, replays)
    for layout in prepared:
        for name in references:
            yield row("prepare_v4_decode_metadata", f"{layout} ragged", size, medians[layout], name, medians[name])


def bench_commit(size: int, replays: int) -> Iterator[Row]:
    """Commit beside an empty kernel; every node commits another step's tickets, so that each one counts."""
    from device_kernels import floor

    svc, metadata = ragged_service(size, "cuda", "strided")
    saved, num_kept = svc.table.records.clone(), metadata.seqlens_q.clone()
    steps = [metadata.tickets.clone() for _ in range(NODES)]
    for number, tickets in enumerate(steps):
        tickets[:, 2] += number * num_kept  # q_start of that step
    numbers = torch.zeros(2, dtype=torch.int64, device="cuda")
    results = torch.zeros(64, record_words(size, 0), dtype=torch.int32, device="cuda")
    batch, state = metadata.state_ids.clone(), torch.zeros(BATCH_STATE_WORDS, dtype=torch.int64, device="cuda")
    ready = torch.zeros(size, 2, dtype=torch.int32, device="cuda")  # nobody waits: the rows are looked at all the same
    variants: dict[str, tuple[object, ...]] = {
        "ragged": (),
        "ragged, mailbox": (batch, state, None, results, numbers),
        "ragged, mailbox and ready queue": (batch, state, ready, results, numbers),
    }

    def commits(*others: object) -> Launch:
        turn = [-1]  # graph_medians makes one call before it captures

        def commit() -> None:
            if turn[0] % NODES == 0 or turn[0] < 0:  # once a graph, a fiftieth of the time measured
                svc.table.records.copy_(saved)
            tickets = steps[max(0, turn[0]) % NODES]
            turn[0] += 1
            step, most = svc.geometry.tokens_per_step, svc.max_prefill_tokens
            torch.ops.zos.commit(
                svc.table.records, None, tickets, num_kept, None, None, svc.operator_counters, step, most, *others
            )

        return commit

    launches = {name: commits(*others) for name, others in variants.items()}
    before = svc.counters()
    medians = graph_medians({**launches, "empty kernel": floor.bind_floor(floor.EMPTY, **metadata.operands)}, replays)
    if svc.counters() != before:
        raise RuntimeError(f"commits of the benchmark did not count: {svc.counters()}, before {before}")
    for name in variants:
        yield row("commit", name, size, medians[name], "empty kernel", medians["empty kernel"])


def bench_prefill(size: int, replays: int) -> Iterator[Row]:
    """Prefill metadata of 8,192 tokens in `size` sequences of random chunks, with and without the full index, beside its floors."""
    from device_kernels import floor

    rng = np.random.default_rng(size)
    tokens = 8192
    svc = MetadataService(capacity=4096, max_batch=size, device="cuda", max_prefill_tokens=tokens)
    cuts = np.sort(rng.choice(np.arange(1, tokens), size - 1, replace=False))
    for state_id, chunk in enumerate(np.diff([0, *cuts, tokens]).tolist()):
        svc.admit(state_id, q_start=int(rng.integers(0, 100_000)), seqlen_q=chunk)
    svc.set_prefill_batch(range(size))
    for variant, metadata in (("plain", svc.prepare_prefill()), ("full index", svc.prepare_prefill(full_index=True))):
        launches: dict[str, Launch] = {
            "write-only": floor.bind_prefill_floor(**metadata.operands),
            "prepare": metadata.launch_prepare,
        }
        medians = graph_medians(launches, replays)
        name = f"{size} sequences, {variant}"
        yield row("prepare_v4_prefill_metadata", name, tokens, medians["prepare"], "write-only", medians["write-only"])


def bench_ring(size: int, replays: int) -> Iterator[Row]:
    """Store and load of `size` tokens in each of 20 layers (several times the L2), beside a device copy of as many bytes."""
    layers, width, window, sequences = 20, 512, 128, size // 128
    cache = SwaCache(StateSlotLayout(stored_layers=layers), num_state_slots=sequences, device="cuda")
    ring, entry = cache.layout.geometry.ring, cache.layout.entry.entry_bytes
    values = torch.randn(layers, size, width, device="cuda", dtype=torch.bfloat16)
    slots = (torch.arange(sequences).repeat_interleave(window) * ring + torch.arange(window).repeat(sequences)).cuda()
    plan = torch.zeros(sequences, 3, 4, dtype=torch.int32)
    plan[:, :, 0] = -1
    for sequence in range(sequences):
        plan[sequence, 0] = torch.tensor([sequence, 0, sequence * window, window])
    plan = plan.cuda()
    views = [cache.layer(layer) for layer in range(layers)]
    all_layers = cache.layers(0, layers)

    def store_each() -> None:
        for layer, view in enumerate(views):
            torch.ops.zos.swa_ring_store(values[layer], slots, view, None)

    def load_each() -> None:
        for layer, view in enumerate(views):
            torch.ops.zos.swa_ring_load(view, plan, values[layer], window)

    moved = layers * size * (width * values.element_size() + entry)  # bytes read and written
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    launches: dict[str, Launch] = {
        "copy": lambda: target.copy_(source),
        "swa_ring_store, one launch": lambda: torch.ops.zos.swa_ring_store(values, slots, all_layers, None),
        "swa_ring_store, a launch a layer": store_each,
        "swa_ring_load, one launch": lambda: torch.ops.zos.swa_ring_load(all_layers, plan, values, window),
        "swa_ring_load, a launch a layer": load_each,
    }
    medians = graph_medians(launches, replays, nodes=3)
    for name in list(launches)[1:]:
        bench, launch = name.split(", ")
        variant = f"bf16, {layers} layers, {launch}"
        yield row(bench, variant, size, medians[name], "device copy of as many bytes", medians["copy"])


def bench_loop(size: int, replays: int) -> Iterator[Row]:
    """Host and GPU time of a replayed step, with and without edits, and with a host that stalls (bench_loop.py)."""
    for bench in (bench_host, bench_gpu, bench_stall):
        for figure in bench(size, replays):
            yield row(*figure)


def bench_against_others(size: int, replays: int) -> Iterator[Row]:
    """Prepare beside torch ops, compiled ones and Triton kernels (bench_alternatives.py)."""
    svc, metadata = ragged_service(size, "cuda", "strided")
    for figure in bench_alternatives(size, min(replays, 20), svc, metadata, graph_medians):
        yield row(*figure)


def bench_other_batches(size: int, replays: int) -> Iterator[Row]:
    """Prepare of whole rows, of a bucket half full, and with a cold L2 (bench_operators.py)."""
    prepared = {
        f"{layout} {name}": ragged_service(size, "cuda", layout, padding, ragged)
        for layout in ("strided", "packed")
        for name, padding, ragged in (("uniform", 0.0, False), ("half padding", 0.5, True))
    }
    for figure in bench_batches(size, replays, prepared, graph_medians):
        yield row(*figure)
    for figure in bench_cold(size, replays, *ragged_service(size, "cuda", "strided"), graph_medians):
        yield row(*figure)


def bench_other_operators(size: int, replays: int) -> Iterator[Row]:
    """Smaller operators, and what a kernel saves that derives its slots itself (bench_operators.py)."""
    svc, metadata = ragged_service(size, "cuda", "strided")
    figures = [*bench_small(size, replays, svc, metadata, graph_medians), *bench_tail(16, replays, graph_medians)]
    if EXAMPLE.exists():  # not in a wheel
        figures += bench_inline(size, replays, svc, metadata, graph_medians)
    for figure in figures:
        yield row(*figure)


def bench_whole_step(size: int, replays: int) -> Iterator[Row]:
    """A loop with a step of fixed length, by who makes its metadata (bench_alternatives.py)."""
    for figure in bench_end_to_end(size, replays):
        yield row(*figure)


def bench_decode_attention(size: int, replays: int) -> Iterator[Row]:
    """Decode attention beside torch and a device copy (bench_attention.py)."""
    for figure in bench_attention(size, min(replays, 20), graph_medians):
        yield row(*figure)


def bench_numba(size: int, repeats: int) -> Iterator[Row]:
    """The CPU path, serial, beside a plain copy of the index bytes."""
    for layout in ("strided", "packed"):
        svc, metadata = ragged_service(size, "cpu", layout)
        source = metadata.kv_swa_index.numpy().copy()
        target = np.empty_like(source)
        medians = clock_medians({"prepare": svc.prepare, "copy": lambda: np.copyto(target, source)}, repeats)  # noqa: B023
        yield row(
            "prepare_v4_decode_metadata",
            f"numba {layout} ragged",
            size,
            medians["prepare"],
            "numpy.copyto",
            medians["copy"],
        )


def bench_threads(size: int, repeats: int) -> Iterator[Row]:
    """The CPU path by two threads beside one."""
    for layout in ("strided", "packed"):
        _, metadata = ragged_service(size, "cpu", layout)
        launches: dict[str, Launch] = {
            f"{threads}": host_decode_metadata.bind_prepare_v4_decode_metadata(threads, **metadata.operands)
            for threads in (1, 2)
        }
        for launch in launches.values():
            launch()
        medians = clock_medians(launches, repeats)
        name = f"numba {layout} ragged, two threads"
        yield row("prepare_v4_decode_metadata", name, size, medians["2"], "one thread", medians["1"])


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="time the operators beside their floors",
        description="Time the operators beside their floors; without a GPU the Numba path alone.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the medians there, by rows")
    parser.add_argument("--filter", default="", metavar="TEXT,…", help="only benches whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="two sizes and few repeats")


def run(arguments: argparse.Namespace) -> int:
    """Run the benches that this machine can, print a table, return 0."""
    sizes, replays = (QUICK_SIZES, 10) if arguments.quick else (SIZES, 60)
    Bench = tuple[str, Callable[[int, int], Iterator[Row]], tuple[int, ...]]  # name, what yields its rows, sizes
    benches: list[Bench] = [("numba", bench_numba, (256,)), ("threads", bench_threads, (1024, 4096))]
    if usable("cuda"):
        benches += [("prepare", bench_prepare, sizes), ("commit", bench_commit, sizes), ("loop", bench_loop, (64, 256))]
        benches += [("prefill", bench_prefill, (16,)), ("ring", bench_ring, (8192,))]
        benches += [("attention", bench_decode_attention, (256,))]
        benches += [("batches", bench_other_batches, (256, 4096)), ("operators", bench_other_operators, (256,))]
        benches += [("alternatives", bench_against_others, (64, 256)), ("end to end", bench_whole_step, (64,))]
    chosen = [bench for bench in benches if any(text in bench[0] for text in arguments.filter.split(","))]
    if not chosen:
        raise InputError(f"--filter {arguments.filter!r} matches none of {', '.join(name for name, *_ in benches)}")
    check_output(arguments.json)
    check_output(arguments.plot)
    rows: list[Row] = []
    for _, bench, of_sizes in chosen:
        for size in of_sizes:
            rows += bench(size, replays)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    print(f"{hardware}, torch {torch.__version__}; medians in µs")
    print(f"{'bench':28} {'variant':22} {'rows':>6} {'median':>9}   {'reference':20} {'its':>9} {'ratio':>8}")
    for r in rows:
        print(
            f"{r.bench:28} {r.variant:22} {r.size:6} {r.median_us:9.2f}   {r.reference:20} {r.reference_us:9.2f} {r.ratio:7.2f}x"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"hardware": hardware, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )
    if arguments.plot:
        draw(rows, arguments.plot, hardware)
    return 0
