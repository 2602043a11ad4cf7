"""get_include: where the C++ headers lie, for kernels that derive slots themselves."""

from __future__ import annotations

from pathlib import Path

import device_kernels


def get_include() -> str:
    """Return the folder of `ring.cuh`, for `-I`: the ring's arithmetic as CUDA and as plain C++17 (see `examples/inline_slots.cu`).

    Examples
    --------
    >>> from pathlib import Path
    >>> (Path(get_include()) / "ring.cuh").exists()
    True
    """
    return str(Path(device_kernels.__file__).parent)
