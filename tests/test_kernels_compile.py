"""Test that every kernel compiles for every supported architecture without a stack frame or a register spill; needs no GPU."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch

from device_kernels import module

if torch.cuda.is_available():  # a GPU image may lack the test extra; elsewhere a skip would leave the kernels unchecked
    cuda_core = pytest.importorskip("cuda.core", reason="needs cuda-core and the NVRTC wheel")
else:
    import cuda.core as cuda_core

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
STEMS = sorted(path.stem for path in Path(module.__file__).parent.glob("*.cu"))
# As the project compiles them.
OPTIONS = dict(option.removeprefix("--").split("=") for option in module.COMPILE_OPTIONS)
RESOURCES = re.compile(
    r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
    float v[200];
    for (int i = 0; i < 200; ++i) v[i] = x[i * 7 + threadIdx.x];
    for (int r = 0; r < 9; ++r)
        for (int i = 0; i < 200; ++i) v[i] = v[i] * v[(i * 13 + r) % 200] + x[r];
    for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
"""

STACK_IN_A_FUNCTION = """
__device__ __noinline__ int pick(const int* x, int n) {
    int v[64];
    for (int i = 0; i < 64; ++i) v[i] = x[i * 3];
    for (int i = 0; i < 64; ++i) v[(v[i] + n) & 63] += i;
    return v[n & 63];
}
extern "C" __global__ void calling(int* x) { x[threadIdx.x] = pick(x, x[threadIdx.x]); }
"""


def spills(source: str, architecture: str) -> dict[str, tuple[int, ...]]:
    """Bytes of (stack frame, spill stores, spill loads) of each kernel, and of functions listed apart."""
    log = io.StringIO()
    options = cuda_core.ProgramOptions(**OPTIONS, arch=architecture, ptxas_options=["-v"])
    cuda_core.Program(source, "c++", options).compile("cubin", logs=log)
    return {name: tuple(map(int, sizes)) for name, *sizes in RESOURCES.findall(log.getvalue())}


def offenders(found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return what has a stack frame or spills."""
    return {name: sizes for name, sizes in found.items() if any(sizes)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stem", STEMS)
def test_no_spills(stem: str, architecture: str) -> None:
    """A spill would turn into memory traffic that no benchmark on another card shows."""
    source = module.kernel_source(stem)
    found = spills(source, architecture)
    kernels = set(re.findall(r'extern "C" __global__ void[^;{]*?(\w+)\(const', source))
    assert len(kernels) == source.count("__global__"), "a kernel that the expression above does not see"
    assert kernels <= set(found), "a kernel is not in the log"
    assert offenders(found) == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_check_can_fail(architecture: str) -> None:
    """A kernel that spills is reported, and so is one that only needs a stack frame, for a function that it calls."""
    stack, stores, loads = offenders(spills(SPILLING, architecture))["spilling"]
    assert stack > 0 and stores > 0 and loads > 0
    stack, stores, loads = offenders(spills(STACK_IN_A_FUNCTION, architecture))["calling"]
    assert stack > 0 and stores == loads == 0


def test_every_kernel_is_loaded_by_warmup() -> None:
    """A kernel missing from the list would be loaded inside a capture."""
    import zos.ops

    names = {kernel.name for kernel in zos.ops.KERNELS}
    defined = {
        name
        for stem in STEMS
        if stem not in ("floor", "device_loop")  # a device-driven loop loads its own, which older drivers refuse
        for name in re.findall(r"void[^;{]*?(\w+)\(const __grid", module.kernel_source(stem))
    }
    assert names == defined


def test_overlapping_kernels_wait() -> None:
    """A kernel that is launched before its predecessor has ended waits for it first, or it would read what is not there yet."""
    import zos.ops

    overlapping = {kernel.name for kernel in zos.ops.KERNELS if kernel.overlaps}
    waiting = {
        name
        for stem in STEMS
        for name in re.findall(
            r"void[^;{]*?(\w+)\(const __grid_constant__ \w+ p\) \{\s*wait_for_predecessor\(\);",
            module.kernel_source(stem),
        )
    }
    assert overlapping == waiting != set()
    assert "griddepcontrol.wait" in module.kernel_source("commit")
