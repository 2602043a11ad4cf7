"""The replay's prefill steps: on a CUDA device one graph a bucket, captured on the caller's side; on the CPU eager calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zos.metadata import PrefillMetadata
from zos.service import MetadataService
from zos.steps import WARMUP_RUNS


class PrefillSteps:
    """Prepares a prefill batch, runs a body on it and commits.

    Parameters
    ----------
    service : MetadataService
        Whose prefill batch this is.
    body : callable
        What a model would do with the metadata; capturable. All chunks are kept, so it returns nothing.
    most_rows : int
        Most rows of a batch.

    Attributes
    ----------
    buckets : tuple of int
        Row numbers that a batch is padded to: powers of two, and `most_rows`.
    """

    def __init__(self, service: MetadataService, body: Callable[[PrefillMetadata], None], most_rows: int) -> None:
        self._service = service
        self._body = body
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._metadata: dict[int, PrefillMetadata] = {}
        self.buckets = (*(2**k for k in range((most_rows - 1).bit_length())), most_rows)
        self._bucket = self.buckets[0]

    @property
    def metadata(self) -> PrefillMetadata:
        """Metadata of the current batch: what its next step writes to, or its last one wrote."""
        return self._metadata[self._bucket]

    def set_batch(self, state_ids: Sequence[int]) -> None:
        """Stage the rows of the next steps, padded to the smallest bucket that fits."""
        self._bucket = next(size for size in self.buckets if len(state_ids) <= size)
        self._service.set_prefill_batch(state_ids, batch=self._bucket)

    def capture(self) -> None:
        """Run every bucket once, all padding, so that its buffers are there; on a CUDA device capture it then."""
        pool: Any = None  # torch's handle of the memory pool that all graphs share
        for size in self.buckets:
            self._bucket = size
            self._service.set_prefill_batch([], batch=size)
            self._service.flush()
            if self._service.device.type != "cuda":
                self._metadata[size] = self._step()
                continue
            with torch.cuda.device(self._service.device):
                side, current = torch.cuda.Stream(), torch.cuda.current_stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    for _ in range(WARMUP_RUNS):
                        self._step()
                current.wait_stream(side)
                current.synchronize()
                graph = self._graphs[size] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=side):
                    self._metadata[size] = self._step()
                pool = graph.pool()

    def run(self) -> None:
        """Run one step of the current batch; staged edits take effect before it."""
        if self._service.device.type == "cuda":
            self._service.flush()
            self._graphs[self._bucket].replay()
            self._service.launched(1)
        else:
            self._step()

    def _step(self) -> PrefillMetadata:
        metadata: PrefillMetadata = self._service.prepare_prefill(full_index=True)
        self._body(metadata)
        self._service.commit(metadata, metadata.seqlens_q)  # num_kept is not read of prefilling rows
        return metadata
