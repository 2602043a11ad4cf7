"""Test that kernels compiled ahead are taken for the devices that run them, and never those of other sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from device_kernels import cubins, module
from device_kernels.cubins import ARCHITECTURES, build, cubin_name, find_cubin
from tests.test_kernels_compile import STEMS, cuda_core

WHEEL_LIMIT = 20e6  # bytes
FIRST_KERNEL_LIMIT_MS = 300
FIRST_CALL = """
import time
import cupy, torch
import zos
load = cupy.RawModule
def load_only(**options):
    assert "code" not in options, "a compiler would run"
    return load(**options)
cupy.RawModule = load_only
svc = zos.MetadataService(capacity=8, max_batch=8, device="cuda")
svc.admit(3, q_start=1000)
svc.set_batch([3], batch=1)
torch.cuda.synchronize()
begin = time.perf_counter()
metadata = svc.prepare()
torch.cuda.synchronize()
print((time.perf_counter() - begin) * 1e3, *metadata.kv_swa_index_offset_len[0].tolist())
"""


def test_built_and_found(tmp_path: Path) -> None:
    """One file for each architecture, with the kernels' names in it; what lay there before is gone."""
    (tmp_path / "commit-0123456789abcdef.sm_90.cubin").touch()
    written = build(tmp_path, ("commit",))
    assert cuda_core is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(cubin_name("commit", a) for a in ARCHITECTURES)
    assert written == sum(path.stat().st_size for path in tmp_path.iterdir())
    found = find_cubin("commit", (9, 0), tmp_path)
    assert found is not None and found.name == cubin_name("commit", 90)
    assert b"commit" in found.read_bytes() and found.read_bytes().startswith(b"\x7fELF")
    assert written * len(STEMS) < WHEEL_LIMIT


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), 80),
        ((8, 9), 80),
        ((9, 0), 90),
        ((10, 0), 100),
        ((10, 3), 100),
        ((12, 0), 120),
        ((7, 5), None),
        ((11, 0), None),
    ],
)
def test_which_devices(tmp_path: Path, capability: tuple[int, int], architecture: int | None) -> None:
    """The same major number, and no larger minor one."""
    for each in ARCHITECTURES:
        (tmp_path / cubin_name("mailbox", each)).touch()
    found = find_cubin("mailbox", capability, tmp_path)
    assert (None if found is None else found.name) == (
        None if architecture is None else cubin_name("mailbox", architecture)
    )


def test_other_sources_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an edit of a kernel, or of the options, nothing fits any more."""
    (tmp_path / cubin_name("mailbox", 90)).touch()
    with monkeypatch.context() as patch:
        patch.setattr(cubins, "kernel_source", lambda stem: module.kernel_source(stem) + "\n")
        assert find_cubin("mailbox", (9, 0), tmp_path) is None
    with monkeypatch.context() as patch:
        patch.setattr(cubins, "COMPILE_OPTIONS", ("--std=c++20",))
        assert find_cubin("mailbox", (9, 0), tmp_path) is None
    assert find_cubin("mailbox", (9, 0), tmp_path) is not None


@pytest.mark.gpu
def test_first_kernel_without_a_compiler(tmp_path: Path) -> None:
    """In a fresh process, with CuPy imported, the first prepare loads its kernels and is right within 300 ms."""
    major, minor = torch.cuda.get_device_capability()
    built = tuple(each for each in ARCHITECTURES if each // 10 == major and each % 10 <= minor)
    build(tmp_path, architectures=built)
    environment = {**os.environ, "ZOS_CUBINS": str(tmp_path), "CUPY_CACHE_DIR": str(tmp_path / "none")}
    found = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=False, env=environment
    )
    assert found.returncode == 0, found.stderr
    milliseconds, *offset_len = found.stdout.split()
    assert offset_len == ["471", "128"] and float(milliseconds) < FIRST_KERNEL_LIMIT_MS, found.stdout


def test_none_built() -> None:
    """A checkout has none, and none is committed."""
    assert find_cubin("mailbox", (9, 0), Path("nowhere")) is None
