"""Test that the headers serve other people's kernels: slots derived inline are those of `kv_swa_index`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import zos
from device_kernels.module import divisor
from tests.test_kernels_compile import ARCHITECTURES, OPTIONS, cuda_core
from zos.cli.bench import ragged_service

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAM = """
#include <cstdio>
#include "key_slot.cuh"
int main() {
    int offset, length, ring;
    while (std::scanf("%d %d %d", &offset, &length, &ring) == 3)
        for (int k = 0; k < length; ++k) std::printf("%d\\n", key_slot(offset, k, zos::make_divisor(ring)));
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_example_compiles(architecture: str) -> None:
    """With no more than the include path, for every architecture."""
    source = (EXAMPLES / "inline_slots.cu").read_text()
    include = [zos.get_include(), str(EXAMPLES)]
    options = cuda_core.ProgramOptions(**OPTIONS, arch=architecture, include_path=include)
    assert b"sum_of_keys" in bytes(cuda_core.Program(source, "c++", options).compile("cubin").code)


def test_slots_on_the_host(tmp_path: Path) -> None:
    """Built by g++: the slots of every live token are its row of `kv_swa_index`."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "slots.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-fsanitize=undefined,address", f"-I{zos.get_include()}", f"-I{EXAMPLES}"]
    subprocess.run([compiler, *flags, "slots.cpp", "-o", "slots"], cwd=tmp_path, check=True)
    svc, metadata = ragged_service(32, "cpu", "packed")
    windows = metadata.kv_swa_index_offset_len[metadata.token_row >= 0].tolist()
    lines = "".join(f"{offset} {length} {svc.geometry.ring}\n" for offset, length in windows)
    found = subprocess.run([tmp_path / "slots"], input=lines, capture_output=True, text=True, check=True).stdout
    index = metadata.kv_swa_index.numpy()
    assert np.array_equal(np.array(found.split(), np.int32), index[index >= 0])


@pytest.mark.gpu
def test_example_runs() -> None:
    """The example's kernels read the entries that the index names."""
    import cupy

    svc, metadata = ragged_service(64, "cuda", "strided")
    ring, entry = svc.geometry.ring, 16
    entries = torch.randint(0, 256, (svc.capacity * ring, entry), dtype=torch.uint8, device="cuda")
    sums = torch.full((metadata.tokens,), -1, dtype=torch.int32, device="cuda")
    options = ("--std=c++17", f"-I{zos.get_include()}", f"-I{EXAMPLES}")
    module = cupy.RawModule(code=(EXAMPLES / "inline_slots.cu").read_text(), options=options)
    by_value = np.array([divisor(ring)], np.dtype([("divisor", "i4"), ("multiplier", "u4"), ("shift", "i4")]))
    index = metadata.kv_swa_index.long()
    expected = torch.where(index >= 0, entries[index.clamp(min=0), 0].int(), 0).sum(1)
    kernels: dict[str, tuple[tuple[torch.Tensor, ...], object]] = {
        "sum_of_keys": ((metadata.kv_swa_index_offset_len,), by_value),
        "sum_of_indexed_keys": ((metadata.kv_swa_index, metadata.swa_len), np.int32(svc.geometry.window)),
    }
    for name, (inputs, last) in kernels.items():
        pointers = [np.uint64(t.data_ptr()) for t in (*inputs, entries, sums.fill_(-1))]
        torch.cuda.synchronize()
        arguments = (*pointers, np.int32(metadata.tokens), np.int32(entry), last)
        module.get_function(name)((metadata.tokens // 2 + 1,), (64,), arguments)
        torch.cuda.synchronize()
        assert torch.equal(sums, expected.int()), name
