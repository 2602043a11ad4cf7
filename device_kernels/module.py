"""Compiles the kernels, keeps them per device and launches them with typed parameters on torch's current stream."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import torch

from device_kernels.launch import Launch

COMPILE_OPTIONS = ("--std=c++17",)


class KernelNotReadyError(RuntimeError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured, which would end the capture."""


@cache
def kernel_source(stem: str) -> str:
    """CUDA C++ of `<stem>.cu` with its headers inlined: CuPy's disk cache keys on the source, not on included files."""
    return _inlined(f"{stem}.cu", set())


def _inlined(name: str, seen: set[str]) -> str:
    """Text of a source file; `#include "x.cuh"` lines give way to x.cuh, once."""
    if name in seen:
        return ""
    seen.add(name)
    text = (resources.files(__package__) / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return re.sub(r'#include "(\w+\.cuh)"\n', lambda include: _inlined(include[1], seen), text)


class Kernel:
    """One `extern "C"` kernel whose only parameter is a struct, passed by value.

    Parameters
    ----------
    stem : str
        Source file, `<stem>.cu`.
    name : str
        Name of the kernel in it.
    layout : str
        Members of the struct in the format of Python's `struct` (native alignment): P pointer, i int, I unsigned, q long
        long, f float. A value that does not fit its declared type is refused, never truncated.
    shared_bytes : int
        Dynamic shared memory of a block.
    overlaps : bool
        Whether it may begin while the kernel before it still runs; it must then begin with `wait_for_predecessor` (ring.cuh).
    """

    def __init__(self, stem: str, name: str, layout: str, shared_bytes: int = 0, *, overlaps: bool = False) -> None:
        self.stem = stem
        self.name = name
        self.shared_bytes = shared_bytes
        self.overlaps = overlaps
        self._layout = struct.Struct(f"@{layout}0P")  # 0P: the tail padding of a C struct that holds pointers
        self._functions: dict[int, Any] = {}

    def load(self, device_index: int) -> Any:
        """Compile and load the kernel on a device. Raises KernelNotReadyError when called while capturing."""
        with torch.cuda.device(device_index):
            if torch.cuda.is_current_stream_capturing():
                raise KernelNotReadyError(
                    f"{self.name} is not loaded on cuda:{device_index} and cannot be while a CUDA graph is captured: "
                    "call MetadataService.warmup() before the capture"
                )
            function = _module(self.stem, torch.cuda.get_device_capability(device_index)).get_function(self.name)
            if self.shared_bytes:
                function.max_dynamic_shared_size_bytes = self.shared_bytes
        self._functions[device_index] = function
        return function

    def bind(
        self, device: torch.device, blocks: tuple[int, int], threads: tuple[int, int], *values: int | float
    ) -> Callable[[], None]:
        """Pack the parameters once; the returned function launches on torch's current stream of `device`.

        The current device may be any. Launching raises KernelNotReadyError where `load` would, and LaunchError where the driver
        refuses the launch.

        Raises
        ------
        struct.error
            A value does not fit its declared type.
        """
        index = device.index
        bound = Launch(index, blocks, threads, self.shared_bytes, self._layout.pack(*values), self.overlaps)

        def launch() -> None:
            function = self._functions.get(index) or self.load(index)
            stream = torch.cuda.current_stream(index).cuda_stream
            if torch.cuda.current_device() == index:
                bound(function.kernel.ptr, stream)
            else:
                with torch.cuda.device(index):
                    bound(function.kernel.ptr, stream)

        return launch


@cache
def _module(stem: str, capability: tuple[int, int]) -> Any:
    """CuPy's module of a stem: compiled ahead where there is such a file, else by NVRTC."""
    import cupy

    from device_kernels.cubins import find_cubin  # it asks this module for sources

    ahead = find_cubin(stem, capability)
    if ahead is not None:
        return cupy.RawModule(path=str(ahead))
    return cupy.RawModule(code=kernel_source(stem), options=COMPILE_OPTIONS)


def pointer(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element (its storage offset included), 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def divisor(value: int) -> tuple[int, int, int]:
    """Members of ring.cuh's `Divisor`: (divisor, multiplier, shift), exact for dividends 0 … 2^31-1."""
    shift = (value - 1).bit_length()
    return value, (1 << (31 + shift)) // value + 1, shift
