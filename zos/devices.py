"""Which devices a service can live on."""

from __future__ import annotations

import importlib.util

import torch


def resolve_device(device: str | torch.device) -> torch.device:
    """Device with its index; ValueError unless it is the CPU or a CUDA device that exists and can be used."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is no device") from None
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device} is neither a CPU nor a CUDA device")
    if resolved.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device} given, but torch finds no CUDA device")
    if importlib.util.find_spec("cupy") is None:
        raise ValueError(f"device={device} needs CuPy: install zos[cu13] or zos[cu12]")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={device} given, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
