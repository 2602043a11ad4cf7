"""Launches kernels through the driver: as CuPy does, and with programmatic dependent launch, which CuPy has no word for."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

OVERLAP_CAPABILITY = (9, 0)  # least that knows programmatic dependent launch
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_INVALID_CONTEXT = 201  # CUresult: this thread has none yet


class LaunchError(RuntimeError):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Launch:
    """A launch whose function, shape and parameters are fixed.

    Parameters
    ----------
    device_index : int
        Where the function is loaded.
    blocks, threads : tuple of int
        Grid in blocks and block in threads, (x, y).
    shared_bytes : int
        Dynamic shared memory of a block.
    parameters : bytes
        The kernel's only parameter.
    overlaps : bool
        Begin while the kernel before still runs (programmatic dependent launch), where the device can. The kernel must begin with
        `wait_for_predecessor` (ring.cuh).
    """

    def __init__(
        self,
        device_index: int,
        blocks: tuple[int, int],
        threads: tuple[int, int],
        shared_bytes: int,
        parameters: bytes,
        overlaps: bool,
    ) -> None:
        self._device_index = device_index
        self._parameters = ctypes.create_string_buffer(parameters, len(parameters))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._parameters))
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
        uses = overlaps and torch.cuda.get_device_capability(device_index) >= OVERLAP_CAPABILITY
        self._configuration = _Configuration(
            (*blocks, 1), (*threads, 1), shared_bytes, None, ctypes.pointer(self._attribute) if uses else None, uses
        )

    def __call__(self, function: int, stream: int) -> None:
        """Launch on a stream of the device, given the address of the function; raises LaunchError where the driver refuses."""
        configuration = _Configuration.from_buffer_copy(
            self._configuration
        )  # another thread may launch on another stream
        configuration.stream = stream
        arguments = (ctypes.byref(configuration), ctypes.c_void_p(function), self._pointers, None)
        result = _driver().cuLaunchKernelEx(*arguments)
        if result == _INVALID_CONTEXT:
            torch.cuda.set_device(self._device_index)
            result = _driver().cuLaunchKernelEx(*arguments)
        if result:
            raise LaunchError(f"{_error_name(result)}: grid, block, shared memory {self._shape()}")

    def _shape(self) -> tuple[list[int], list[int], int]:
        its = self._configuration
        return list(its.grid), list(its.block), its.shared_bytes


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _error_name(result: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(result, ctypes.byref(name))
    return (name.value or b"unknown").decode()
