"""Launcher of block_view.cu: one warp a token place."""

from __future__ import annotations

import torch

from device_kernels.module import Kernel, divisor, pointer

WARP = 32
WARPS = 4  # of a block; no warp waits for another

_VIEW = Kernel("block_view", "view_block", "10P" + "5i" + "iIi", overlaps=True)
KERNELS = (_VIEW,)


def view_block(
    records: torch.Tensor,
    tickets: torch.Tensor,
    num_kept: torch.Tensor | None,
    kv_swa_index_offset_len: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    positions: torch.Tensor,
    swa_write_slot: torch.Tensor,
    token_row: torch.Tensor,
    token_state_id: torch.Tensor,
    window: int,
    ring: int,
    tokens_per_step: int,
) -> None:
    """Launch the kernel on checked arguments (see `zos.ops`)."""
    places = positions.shape[0]
    if places == 0:
        return
    _VIEW.bind(
        records.device,
        (-(-places // WARPS), 1),
        (WARPS * WARP, 1),
        records.data_ptr(),
        tickets.data_ptr(),
        pointer(num_kept),
        kv_swa_index_offset_len.data_ptr(),
        kv_swa_index.data_ptr(),
        swa_len.data_ptr(),
        positions.data_ptr(),
        swa_write_slot.data_ptr(),
        token_row.data_ptr(),
        token_state_id.data_ptr(),
        records.shape[0],
        places,
        window,
        tokens_per_step,
        kv_swa_index.shape[1],
        *divisor(ring),
    )()
