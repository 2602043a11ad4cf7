"""swa_ring_snapshot in Numba: copies the stored part of marked rows' states, as device_kernels/ring_snapshot.cu does."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

NUMBER, GIVEN_BACK, STATE_ID, GENERATION, BOUNDARY, HEAD, CHECK = range(7)  # words of a snapshot slot
SNAPSHOTS, SKIPPED = range(2)  # words of the progress
SLOT_WORDS, PLAN_WORDS, PROGRESS_WORDS = 8, 6, 4  # int64 words of a slot, of an entry of the plan, of the progress


@njit(cache=True, error_model="numpy")
def check_word(number, state_id, generation, boundary, head):
    """Return a number that tells the words of one snapshot from a mixture of two."""
    return (((number * 31 + state_id) * 31 + generation) * 31 + boundary) * 31 + head


@njit(cache=True, error_model="numpy")
def _snapshot(records, tickets, marks, states, snapshots, slots, taken, progress, skipped, overshoot):
    slot = 0
    for row in range(marks.shape[0]):
        boundary = np.int64(marks[row])
        if boundary < 0:
            continue
        marks[row] = -1
        state_id, generation = np.int64(tickets[row, 0]), np.int64(tickets[row, 1])
        sound = 0 <= state_id < records.shape[0]  # it still is what commit marked
        head = np.int64(records[state_id, 8]) if sound else np.int64(0)
        sound = sound and records[state_id, 6] == generation and head - boundary <= overshoot
        while sound and slot < taken.shape[0] and taken[slot] != slots[slot, GIVEN_BACK]:
            slot += 1
        if not sound or slot == taken.shape[0]:
            progress[SKIPPED] += 1
            skipped[0] = progress[SKIPPED]
            continue
        progress[SNAPSHOTS] += 1
        number = progress[SNAPSHOTS]
        taken[slot] = number
        snapshots[slot] = states[state_id]
        place = slots[slot]
        place[STATE_ID], place[GENERATION], place[BOUNDARY], place[HEAD] = state_id, generation, boundary, head
        place[CHECK] = check_word(number, state_id, generation, boundary, head)
        place[NUMBER] = number


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
    """Copy and publish, on checked CPU arguments; shapes and meaning are documented at `zos.ops`."""
    _snapshot(
        records.numpy(),
        tickets.numpy(),
        marks.numpy(),
        states.numpy(),
        snapshots.numpy(),
        slots.numpy(),
        taken.numpy(),
        progress.numpy(),
        skipped.numpy(),
        overshoot,
    )
