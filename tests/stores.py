"""What tests of the external store share: services with a cache, the back ends by name, and bytes planted behind their backs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import zos
from tests.mooncake import open_mooncake
from zos.state_store import stored_name
from zos.store_format import key_bytes

Open = Callable[..., zos.StateStore]  # (service, cache, allocator=None) -> a store of the same place each time
LAYOUT = zos.StateSlotLayout(stored_layers=2, dropped_layers=1)


def service_and_cache(
    device: str, layout: zos.StateSlotLayout = LAYOUT, capacity: int = 4, seed: int = 0
) -> tuple[zos.MetadataService, zos.SwaCache]:
    """A service and a cache of random bytes."""
    svc = zos.MetadataService(capacity, 2, layout.geometry, device, compression_ratios=())
    cache = zos.SwaCache(layout, capacity, device)
    cache.slab.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, cache.slab.shape, np.uint8)))
    return svc, cache


def open_local(folder: Path) -> Open:
    """Open stores of one directory."""

    def opened(
        svc: zos.MetadataService, cache: zos.SwaCache, allocator: zos.StateSlotAllocator | None = None
    ) -> zos.StateStore:
        return zos.LocalStateStore(svc, cache, folder, allocator)

    return opened


def open_place(place: str) -> Open:
    """Open stores of local:DIRECTORY or mooncake:HOST:PORT:METADATA_PORT."""
    if place.startswith("local:"):
        return open_local(Path(place.removeprefix("local:")))
    return lambda svc, cache, allocator=None: open_mooncake(place, svc, cache, allocator)


def discard(store: zos.StateStore) -> None:
    """Close a store without a farewell to Mooncake, which takes a second."""
    if isinstance(store, zos.MooncakeStateStore):
        store._give_up()
    store.close()


def found(store: zos.StateStore, key: str | bytes) -> bytes:
    """What the back end holds under a key, header included."""
    size = store._read(stored_name(key_bytes(key)))
    assert size is not None
    return bytes(store._blob[:size])


def plant(store: zos.StateStore, key: str | bytes, blob: bytes) -> None:
    """Let the back end hold these bytes under a key."""
    store._blob[: len(blob)] = blob
    store._write(stored_name(key_bytes(key)), len(blob))
