"""Test that every kernel compiles for every supported architecture without a stack frame or a register spill; needs no GPU."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from device_kernels import module

cuda_core = pytest.importorskip("cuda.core", reason="needs cuda-core and the NVRTC wheel")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
STEMS = sorted(path.stem for path in Path(module.__file__).parent.glob("*.cu"))
RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
    re.DOTALL,
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


def spills(source: str, architecture: str) -> dict[str, tuple[int, ...]]:
    """Bytes of (stack frame, spill stores, spill loads) of each kernel of a source."""
    log = io.StringIO()
    options = cuda_core.ProgramOptions(std="c++17", arch=architecture, ptxas_options=["-v"])
    cuda_core.Program(source, "c++", options).compile("cubin", logs=log)
    return {name: tuple(map(int, sizes)) for name, *sizes in RESOURCES.findall(log.getvalue())}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stem", STEMS)
def test_no_spills(stem: str, architecture: str) -> None:
    """A spill would turn into memory traffic that no benchmark on another card shows."""
    source = module.kernel_source(stem)
    found = spills(source, architecture)
    assert set(found) == set(re.findall(r'extern "C" __global__ void[^;{]*?(\w+)\(const', source)), (
        "a kernel is not in the log"
    )
    assert {name: sizes for name, sizes in found.items() if any(sizes)} == {}


def test_the_check_can_fail() -> None:
    """A kernel that does spill is reported."""
    assert any(spills(SPILLING, "sm_90")["spilling"])


def test_every_kernel_is_loaded_by_warmup() -> None:
    """A kernel missing from the list would be loaded inside a capture."""
    import zos.ops

    names = {kernel.name for kernel in zos.ops.KERNELS}
    defined = {
        name
        for stem in STEMS
        if stem != "floor"
        for name in re.findall(r"void[^;{]*?(\w+)\(const __grid", module.kernel_source(stem))
    }
    assert names == defined
