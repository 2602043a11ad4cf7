"""Kernels compiled ahead: `python -m device_kernels.cubins` (`make cubins`) builds them, `find_cubin` picks one for a device.

A wheel built afterwards carries them, and no compiler runs at run time. A file's name holds a hash of what it was built from, so
one of other sources or options is never taken; where none fits, NVRTC compiles as before. ZOS_CUBINS names another folder.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from device_kernels.module import COMPILE_OPTIONS, kernel_source

FOLDER = Path(os.environ.get("ZOS_CUBINS") or Path(__file__).parent / "cubins")
ARCHITECTURES = (80, 90, 100, 120)  # 10 * major + minor of the compute capability
HASH_DIGITS = 16


def cubin_name(stem: str, architecture: int) -> str:
    """File name of a stem's kernels, as they are now, for an architecture."""
    text = "\n".join((*COMPILE_OPTIONS, kernel_source(stem)))
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]}.sm_{architecture}.cubin"


def find_cubin(stem: str, capability: tuple[int, int], folder: Path = FOLDER) -> Path | None:
    """Return the file to load on a device of a compute capability (major, minor), None where there is none.

    Code of an architecture runs on devices of the same major number and no smaller minor one.
    """
    major, minor = capability
    for architecture in sorted(ARCHITECTURES, reverse=True):
        if architecture // 10 == major and architecture % 10 <= minor:
            path = folder / cubin_name(stem, architecture)
            if path.is_file():
                return path
    return None


def build(folder: Path = FOLDER, stems: tuple[str, ...] = (), architectures: tuple[int, ...] = ARCHITECTURES) -> int:
    """Compile all stems, or those named, for the architectures, in place of what the folder held; returns the bytes written.

    Needs cuda-core and NVRTC, no GPU.
    """
    from cuda.core import Program, ProgramOptions  # type: ignore[import-untyped]

    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.cubin"):
        old.unlink()
    options = dict(option.removeprefix("--").split("=") for option in COMPILE_OPTIONS)
    written = 0
    for stem in stems or tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.cu"))):
        for architecture in architectures:
            made = Program(kernel_source(stem), "c++", ProgramOptions(**options, arch=f"sm_{architecture}")).compile(
                "cubin"
            )
            code = bytes(made.code)
            (folder / cubin_name(stem, architecture)).write_bytes(code)
            written += len(code)
    return written


if __name__ == "__main__":
    print(f"{build() / 1e6:.1f} MB in {FOLDER.name}/")
