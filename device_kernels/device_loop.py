"""Launcher of device_loop.cu: one block decides whether a WHILE node runs another step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from device_kernels.module import Kernel

THREADS = 128

_DECIDE = Kernel("device_loop", "decide_next_step", "Q5Pq2i")
KERNELS = (_DECIDE,)


def bind_decide_next_step(
    handle: int,
    results: torch.Tensor,
    results_state: torch.Tensor,
    batch_state: torch.Tensor,
    control: torch.Tensor,
    steps: torch.Tensor,
    spare: int,
) -> Callable[[], None]:
    """Pack the parameters once; calling the result launches the kernel.

    Parameters
    ----------
    handle : int
        The WHILE node's condition.
    results, results_state, batch_state : torch.Tensor
        As `zos.ops` documents them.
    control : torch.Tensor
        int64 [8], mapped: (stop, steps read, most steps of a run; runs ended, last step).
    steps : torch.Tensor
        int64 [1]: steps of the run so far.
    spare : int
        Records that must stay free.
    """
    return _DECIDE.bind(
        results.device,
        (1, 1),
        (THREADS, 1),
        handle,
        results.data_ptr(),
        results_state.data_ptr(),
        batch_state.data_ptr(),
        control.data_ptr(),
        steps.data_ptr(),
        results.shape[1],
        results.shape[0],
        spare,
    )
