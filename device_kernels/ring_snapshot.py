"""Launcher of ring_snapshot.cu: one block plans, then a fixed grid copies."""

from __future__ import annotations

import torch

from device_kernels.module import Kernel

VECTOR_BYTES = 16
PLAN_THREADS = 256
COPY_THREADS = 256
# Fixed, as a captured launch cannot know how many states are marked; about two for each multiprocessor of an H200, so that one
# state alone keeps them all busy.
COPY_BLOCKS = 256

_LAYOUT = "10P2q5i"
_PLAN = Kernel("ring_snapshot", "swa_ring_snapshot_plan", _LAYOUT, overlaps=True)
_COPY = Kernel("ring_snapshot", "swa_ring_snapshot_copy", _LAYOUT, overlaps=True)
KERNELS = (_PLAN, _COPY)


def swa_ring_snapshot(
    records: torch.Tensor,
    tickets: torch.Tensor,
    marks: torch.Tensor,
    states: torch.Tensor,
    snapshots: torch.Tensor,
    slots: torch.Tensor,
    taken: torch.Tensor,
    plan: torch.Tensor,
    progress: torch.Tensor,
    skipped: torch.Tensor,
    overshoot: int,
) -> None:
    """Launch both kernels on checked arguments; shapes and meaning are documented at `zos.ops`."""
    if tickets.shape[0] == 0:
        return
    addresses = [states.data_ptr(), states.stride(0), snapshots.data_ptr(), snapshots.shape[1]]
    parameters = (
        records.data_ptr(),
        tickets.data_ptr(),
        marks.data_ptr(),
        states.data_ptr(),
        snapshots.data_ptr(),
        slots.data_ptr(),
        taken.data_ptr(),
        plan.data_ptr(),
        progress.data_ptr(),
        skipped.data_ptr(),
        states.stride(0),
        snapshots.shape[1],
        records.shape[0],
        tickets.shape[0],
        snapshots.shape[0],
        overshoot,
        not any(address % VECTOR_BYTES for address in addresses),
    )
    _PLAN.bind(records.device, (1, 1), (PLAN_THREADS, 1), *parameters)()
    _COPY.bind(records.device, (COPY_BLOCKS, 1), (COPY_THREADS, 1), *parameters)()
