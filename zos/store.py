"""The external store's back ends: LocalStateStore, states as files of a directory; and, from its own module, MooncakeStateStore."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import torch

from zos.allocator import StateSlotAllocator
from zos.cache import SwaCache
from zos.errors import StoreUnavailableError
from zos.mooncake_store import MooncakeStateStore
from zos.service import MetadataService
from zos.state_store import StateStore
from zos.store_format import largest_bytes

__all__ = ["LocalStateStore", "MooncakeStateStore", "StateStore"]

LEFT_BEHIND_S = 3600.0  # a temporary file this old belongs to a writer that was killed


class LocalStateStore(StateStore):
    """States as files of one directory, each written beside its name, synced, then renamed: readers see the old one or the new one.

    Parameters
    ----------
    service, cache, allocator
        As for StateStore.
    directory : str or Path
        Made where it is missing. Several processes may share it.

    Raises
    ------
    StoreUnavailableError
        The directory cannot be made.
    ValueError
        As for StateStore.
    """

    def __init__(
        self,
        service: MetadataService,
        cache: SwaCache,
        directory: str | os.PathLike[str],
        allocator: StateSlotAllocator | None = None,
    ) -> None:
        pinned = service.device.type == "cuda"
        buffer = torch.empty(largest_bytes(cache.layout), dtype=torch.uint8, pin_memory=pinned)
        super().__init__(service, cache, allocator, buffer)
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in self._directory.glob(".*.tmp"):
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > LEFT_BEHIND_S:
                        path.unlink()
        except OSError as error:
            raise StoreUnavailableError(f"directory {self._directory}: {error}") from error

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.state"

    def _write(self, name: str, size: int) -> None:
        temporary = self._directory / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(self._blob[:size])
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path(name))
            self._sync_directory()
        except OSError as error:
            raise StoreUnavailableError(f"{self._path(name)} cannot be written: {error}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _read(self, name: str) -> int | None:
        try:
            with self._path(name).open("rb", buffering=0) as file:
                read = 0
                while read < len(self._blob) and (more := file.readinto(self._blob[read:])):
                    read += more
                return max(read, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailableError(f"{self._path(name)} cannot be read: {error}") from error

    def _exists(self, name: str) -> bool:
        return self._path(name).exists()

    def _remove(self, name: str) -> bool:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreUnavailableError(f"{self._path(name)} cannot be removed: {error}") from error
        return True

    def _sync_directory(self) -> None:
        """Make a rename last: it is the directory's to write."""
        handle = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
