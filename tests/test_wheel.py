"""Test that a wheel built from the tree holds all it needs and works where the tree is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = sorted(path.name for path in (ROOT / "device_kernels").glob("*.cu*"))

USE = """
import zos, device_kernels, host_fallback
from device_kernels.module import kernel_source
assert "prepare_v4_decode_metadata" in kernel_source("decode_metadata")
svc = zos.MetadataService(capacity=8, max_batch=1, device="cpu")
svc.admit(state_id=3, q_start=1000, seqlen_q=6)
svc.set_batch([3])
found = svc.prepare().kv_swa_index_offset_len
print(found[0].tolist(), found.shape[0], *(package.__file__ for package in (zos, device_kernels, host_fallback)), sep="|")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into an empty folder; nothing is fetched."""
    build = pytest.importorskip("build", reason="needs the package 'build'")
    assert build
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("zos", "device_kernels", "host_fallback"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_wheel_holds_kernels_and_types(installed: Path) -> None:
    """Kernel sources are package data: without them the CUDA path fails at its first launch."""
    assert sorted(path.name for path in (installed / "device_kernels").glob("*.cu*")) == KERNELS
    for package in ("zos", "device_kernels", "host_fallback"):
        assert (installed / package / "py.typed").exists()
    assert not (installed / "tests").exists()


def test_wheel_works_elsewhere(installed: Path, tmp_path: Path) -> None:
    """A step is prepared, and the command answers, with nothing of the tree on the path."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    found = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    first, tokens, *files = found.stdout.strip().split("|")
    assert (first, tokens) == ("[471, 128]", "6")
    assert len(files) == 3 and all(Path(file).is_relative_to(installed) for file in files), files
    helped = subprocess.run(
        [installed / "bin" / "zos", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert helped.returncode == 0 and "replay" in helped.stdout, helped.stderr
