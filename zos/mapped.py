"""Memory that both sides see: pinned host memory which kernels read and write through its mapped address."""

from __future__ import annotations

import numpy as np
import torch


class _DeviceAddress:
    """CUDA array interface of an address; torch keeps this object, and so the host tensor behind it, alive."""

    def __init__(self, address: int, host: torch.Tensor) -> None:
        self.host = host
        typestr = np.dtype(str(host.dtype).removeprefix("torch.")).str
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def shared_zeros(size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros that host and device share: (tensor for the host, tensor for the operators), both [size] over the same bytes.

    On a CUDA device the second is a CUDA tensor over mapped pinned memory: a kernel that reads it reads host memory, no copy. It is
    a CUDA tensor, not the pinned one, so that a clone (torch.compile makes them) lands in device memory and stays legal to write.
    """
    if device.type != "cuda":
        host = torch.zeros(size, dtype=dtype, device="cpu")  # whatever torch's default device is
        return host, host
    import cupy

    with torch.cuda.device(device):
        host = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
        address = cupy.cuda.runtime.pointerGetAttributes(host.data_ptr()).devicePointer
        on_device = torch.as_tensor(_DeviceAddress(address, host), device=device)
    if on_device.data_ptr() != address:
        raise RuntimeError(f"torch copied the mapped buffer at {address:#x} instead of wrapping it")
    return host, on_device
