"""SnapshotPool: copies of states at boundaries, taken on the device between two steps and read by the host while steps go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

import zos.ops
from host_fallback.ring_snapshot import (
    BOUNDARY,
    CHECK,
    GENERATION,
    GIVEN_BACK,
    HEAD,
    NUMBER,
    PLAN_WORDS,
    PROGRESS_WORDS,
    SLOT_WORDS,
    STATE_ID,
    check_word,
)
from zos.arguments import whole_number
from zos.cache import SwaCache, check_holds
from zos.mapped import shared_zeros
from zos.metadata import StepMetadata

if TYPE_CHECKING:
    from zos.service import MetadataService


class Snapshot(NamedTuple):
    """A state's stored part as it was when its sequence had come to a boundary."""

    state_id: int
    generation: int  # of the sequence whose state it was
    boundary: int  # positions below it are final; a multiple of the service's snapshot_every
    head: int  # highest position ever written, plus 1: at most ring - window past the boundary
    slot: int  # of the pool
    number: int  # of the pool's snapshots, from 1


class SnapshotPool:
    """Snapshot slots in device memory, filled by `swa_ring_snapshot` behind a commit and emptied by the host.

    The slots lie in device memory, not in pinned host memory: the next step waits for the copy, and a state of 1.4 MB is copied in
    microseconds there, but in tens of them over PCIe. `read` then copies on a stream of its own, beside the steps.

    No side waits for the other. The device takes a slot only when it sees, in mapped memory, that the host has given it back; the
    host learns of a snapshot from mapped memory too, after its bytes are in place. Where no slot is free, the boundary is skipped
    and counted. One pool serves all metadata slots of a service.

    Parameters
    ----------
    service : MetadataService
        Whose steps are snapshotted; made with snapshot_every.
    cache : SwaCache
        Where its states lie, one for each of the service's.
    num_snapshots : int
        Slots of cache.layout.stored_bytes bytes each.

    Raises
    ------
    ValueError
        Service and cache do not fit each other, or nothing is to be snapshotted; the message says which rule is broken.

    Examples
    --------
    >>> svc = MetadataService(capacity=4, max_batch=1, device="cpu", snapshot_every=512)
    >>> pool = SnapshotPool(svc, SwaCache(StateSlotLayout(stored_layers=20), 4, "cpu"), num_snapshots=2)
    >>> svc.attach_snapshots(pool)
    >>> svc.admit(state_id=3, q_start=510)
    >>> svc.set_batch([3])
    >>> svc.commit(svc.prepare(), torch.tensor([4], dtype=torch.int32))
    >>> pool.poll()
    [Snapshot(state_id=3, generation=1, boundary=512, head=516, slot=0, number=1)]
    """

    def __init__(self, service: MetadataService, cache: SwaCache, num_snapshots: int) -> None:
        if not service.snapshot_every:
            raise ValueError("service was made with snapshot_every=0: it marks nothing to snapshot")
        check_holds(cache, service.device, service.geometry, service.capacity)
        if not cache.layout.stored_bytes:
            raise ValueError("cache has stored_layers=0: there is nothing to store")
        count = whole_number("num_snapshots", num_snapshots, 1)
        self.table = service.table
        self._order = service.stream_order  # not the service: a cycle would keep its memory alive
        self._states = cache.all_stored()
        device, stored = cache.device, cache.layout.stored_bytes
        self._bytes = torch.zeros(count, stored, dtype=torch.uint8, device=device)
        # Device's last numbers by slot, plan and progress; see `zos.ops`, as for the words of the slots.
        self._taken = torch.zeros(count, dtype=torch.int64, device=device)
        self._plan = torch.zeros(count, PLAN_WORDS, dtype=torch.int64, device=device)
        self._progress = torch.zeros(PROGRESS_WORDS, dtype=torch.int64, device=device)
        slots, self._slots = shared_zeros(count * SLOT_WORDS, torch.int64, device)
        skipped, self._skipped = shared_zeros(1, torch.int64, device)
        self._slots = self._slots.view(count, SLOT_WORDS)
        self._slots_host, self._skipped_host = slots.numpy().reshape(count, SLOT_WORDS), skipped.numpy()
        self._seen = np.zeros(count, np.int64)  # number of the last snapshot of each slot that the host knows of
        self._held: dict[int, Snapshot] = {}  # by slot: those that `poll` returned and nobody has freed
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._overshoot = service.geometry.ring - service.geometry.window
        self._order.keep_until_launched(self, slots, skipped)

    @property
    def skipped(self) -> int:
        """Boundaries that rows came to while no slot was free, or whose state was not whole any more; no CUDA call."""
        return int(self._skipped_host[0])

    def snapshot(self, metadata: StepMetadata) -> None:
        """Copy the states that the last commit of `metadata` marked, in two launches; may be captured.

        Call it behind the commit, before anything else writes the states: the next step, or a sequence admitted in place of one. A
        service that the pool is attached to does.

        Raises
        ------
        ValueError
            Metadata of another service.
        """
        if metadata.origin.table is not self.table or metadata.marks is None:
            raise ValueError("metadata was prepared by another MetadataService than the pool's")
        self._order.join()
        zos.ops.call(
            "swa_ring_snapshot",
            self.table.records,
            metadata.tickets,
            metadata.marks,
            self._states,
            self._bytes,
            self._slots,
            self._taken,
            self._plan,
            self._progress,
            self._skipped,
            self._overshoot,
        )
        self._order.mark()

    def poll(self) -> list[Snapshot]:
        """Return the snapshots that are complete and were not returned before, in the order taken; no CUDA call.

        Each holds its slot until `free`.
        """
        found = []
        for slot in np.flatnonzero(self._slots_host[:, NUMBER] != self._seen).tolist():
            words = self._slots_host[slot].copy()
            state_id, generation, boundary, head = (int(words[word]) for word in (STATE_ID, GENERATION, BOUNDARY, HEAD))
            if check_word(words[NUMBER], state_id, generation, boundary, head) != words[CHECK]:
                continue  # this CPU sees the number before the rest: it will be whole at the next look
            found.append(Snapshot(state_id, generation, boundary, head, slot, int(words[NUMBER])))
            self._seen[slot] = words[NUMBER]
        self._held |= {snapshot.slot: snapshot for snapshot in found}
        return sorted(found, key=lambda snapshot: snapshot.number)

    def read(self, snapshot: Snapshot) -> torch.Tensor:
        """Copy a snapshot's bytes to the host, on a stream of its own, and wait for that copy alone.

        Returns
        -------
        torch.Tensor
            uint8 [stored bytes], the caller's own; on a CUDA device in pinned memory.

        Raises
        ------
        ValueError
            The snapshot was freed.
        """
        self._check_held(snapshot)
        source = self._bytes[snapshot.slot]
        if self._side is None:
            return source.clone()
        with torch.cuda.stream(self._side):
            copied = torch.empty(source.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            copied.copy_(source, non_blocking=True)
        self._side.synchronize()
        return copied

    def free(self, snapshot: Snapshot) -> None:
        """Give a snapshot's slot back to the device, which may fill it at once; no CUDA call.

        Raises
        ------
        ValueError
            The snapshot was freed before.
        """
        self._check_held(snapshot)
        del self._held[snapshot.slot]
        self._slots_host[snapshot.slot, GIVEN_BACK] = snapshot.number

    def _check_held(self, snapshot: Snapshot) -> None:
        if self._held.get(snapshot.slot) != snapshot:
            raise ValueError(f"{snapshot} is not held: it was freed, or is of another pool")
