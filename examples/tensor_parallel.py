"""Tensor parallel decoding: every rank runs its own service from counts that rank 0 broadcasts, and all end with equal tables.

    python examples/tensor_parallel.py --ranks 2

Only what a step kept travels: int32 [B], and bool [B] for the rows that end. Admissions, batches and lengths never do, because each
rank makes the same calls at the same steps. What a rank decides from records must therefore hang on their step numbers alone, never
on when they happened to arrive: here every rank reads the records of all steps before it makes its next call.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import zos

CAPACITY, MAX_BATCH, REQUESTS, STEPS = 16, 4, 24, 120


def sample(metadata: zos.DecodeMetadata, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank 0's sampler finds: how many tokens of each row are kept, and which sequences end (one in fifty)."""
    drawn = torch.randint(1, 7, (metadata.batch,), generator=generator, dtype=torch.int32)
    ends = torch.rand(metadata.batch, generator=generator) < 0.02
    return torch.minimum(drawn, metadata.seqlens_q), ends


def run_rank(rank: int, ranks: int, rendezvous: str, broken: bool) -> None:
    """Serve requests for STEPS steps as one of `ranks` processes, then compare the table with every other rank's.

    `broken`: the last rank keeps one token less once, as a lost broadcast would make it.
    """
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(1 if rank == 0 else 10 + rank)  # only rank 0's draws count
    svc = zos.MetadataService(capacity=CAPACITY, max_batch=MAX_BATCH, device="cpu")

    def step(metadata: zos.DecodeMetadata) -> zos.StepResult:
        # The model's shard would run here, on the same metadata on every rank.
        num_kept, finished = sample(metadata, generator)
        dist.broadcast(num_kept, src=0)
        dist.broadcast(finished, src=0)
        if broken and rank == ranks - 1 and loop.steps_launched == STEPS - 3:
            num_kept = (num_kept - 1).clamp(min=0)
        return zos.StepResult(num_kept, finished)

    loop = zos.DecodeLoop(svc, step)
    requests = [loop.submit(q_start=20 * number, stop_at=20 * number + 100) for number in range(REQUESTS)]
    for _ in range(STEPS):
        loop.run()
        loop.drain()
    svc.flush()
    svc.check()

    tables = [torch.empty_like(svc.table.records) for _ in range(ranks)]
    dist.all_gather(tables, svc.table.records)
    lengths = torch.tensor([request.q_start for request in requests])
    all_lengths = [torch.empty_like(lengths) for _ in range(ranks)]
    dist.all_gather(all_lengths, lengths)
    for other in range(ranks):
        if not (torch.equal(tables[other], tables[0]) and torch.equal(all_lengths[other], all_lengths[0])):
            raise RuntimeError(f"rank {other} ended with another table than rank 0")
    if rank == 0:
        print(f"{ranks} ranks, {STEPS} steps, {REQUESTS - loop.pending} of {REQUESTS} requests over: equal tables")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks on this machine, and wait for them."""
    parser = argparse.ArgumentParser(description="Tensor parallel decoding on the CPU, one process a rank.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--broken", action="store_true", help="let the last rank go wrong, which must be found")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        torch.multiprocessing.spawn(run_rank, (options.ranks, rendezvous, options.broken), nprocs=options.ranks)


if __name__ == "__main__":
    main()
