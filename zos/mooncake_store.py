"""MooncakeStateStore: states in a Mooncake Store, over TCP or RDMA, by a process of its own that no call waits for in vain."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from zos.allocator import StateSlotAllocator
from zos.arguments import INT64_LARGEST, whole_number
from zos.cache import SwaCache
from zos.errors import StoreUnavailableError
from zos.mooncake_worker import BEING_WRITTEN, FAREWELL_S, NOT_FOUND
from zos.service import MetadataService
from zos.state_store import StateStore
from zos.store_format import largest_bytes

MASTER_PORT, METADATA_PORT = 50051, 8080  # Mooncake's defaults
PROTOCOLS = ("tcp", "rdma")
KEY_PREFIX = "zos-state-"
MOONCAKE_BUFFER_BYTES = 16 * 2**20  # Mooncake's own; ours is registered beside it
WORKER = Path(__file__).with_name("mooncake_worker.py")
TIMEOUT_S, RETRY_AFTER_S = 8.0, 5.0


class MooncakeStateStore(StateStore):
    """States as objects of a Mooncake Store.

    Mooncake's client runs in a process of its own: its calls wait for a master that is gone for up to minutes, and a killed process
    is the one that gives up in time. Header and payload stand in memory that both processes map and that the client has
    registered, so that a state's bytes go from the device there and from there into the network.

    A put replaces what its key held, by removing it first: a reader in between finds nothing, and one that is reading just then a
    mixture, which its checksum betrays (CorruptStateError). Mooncake may evict states: they are missing then.

    Parameters
    ----------
    service, cache, allocator
        As for StateStore.
    host : str
        Where `mooncake_master` runs.
    port, metadata_port : int
        Its RPC port, and that of its HTTP metadata server.
    protocol : {"tcp", "rdma"}
        How bytes travel.
    rdma_devices : str
        Names of the devices, with commas between; for tcp, none.
    local_host : str
        This host's name, as others reach it.
    segment_bytes : int
        Memory that this process lends to the store, for as long as it lives; 0 for none.
    timeout_s : float
        No call takes longer, whatever happens to the master; starting the client anew included.
    retry_after_s : float
        After a failure calls are refused at once for so long, so that not every sequence of a batch waits for a store that is gone.
    log : str or Path, optional
        File that the client's log is appended to; default: none is kept.

    Raises
    ------
    StoreUnavailableError
        The `mooncake` extra is not installed, or no master answers.
    ValueError
        An argument breaks a rule.
    """

    def __init__(
        self,
        service: MetadataService,
        cache: SwaCache,
        host: str,
        allocator: StateSlotAllocator | None = None,
        *,
        port: int = MASTER_PORT,
        metadata_port: int = METADATA_PORT,
        protocol: str = "tcp",
        rdma_devices: str = "",
        local_host: str = "127.0.0.1",
        segment_bytes: int = 0,
        timeout_s: float = TIMEOUT_S,
        retry_after_s: float = RETRY_AFTER_S,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, number in (("port", port), ("metadata_port", metadata_port)):
            whole_number(name, number, 1, 65_535)
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol={protocol!r} is none of {', '.join(PROTOCOLS)}")
        segment_bytes = whole_number("segment_bytes", segment_bytes, 0, INT64_LARGEST)
        if importlib.util.find_spec("mooncake") is None:
            raise StoreUnavailableError("Mooncake's client is not installed: install zos[mooncake]")
        self._bytes = largest_bytes(cache.layout)
        self._memory = os.memfd_create("zos-state")
        os.ftruncate(self._memory, self._bytes)
        buffer = torch.frombuffer(mmap.mmap(self._memory, self._bytes), dtype=torch.uint8)
        super().__init__(service, cache, allocator, buffer)
        metadata = f"http://{host}:{metadata_port}/metadata"
        self._setup: list[str | int] = [
            local_host, metadata, segment_bytes, MOONCAKE_BUFFER_BYTES, protocol, rdma_devices, f"{host}:{port}",
        ]  # fmt: skip
        self._log = Path(os.devnull if log is None else log)
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s
        self._refused_until = 0.0
        self._worker: _Worker | None = None
        self._request()

    def close(self) -> None:
        """End the client's process, and with it what it lent to the store."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.end(FAREWELL_S + 1)

    def _write(self, name: str, size: int) -> None:
        self._check(self._request("write", KEY_PREFIX + name, size), "put")

    def _read(self, name: str) -> int | None:
        code = self._request("read", KEY_PREFIX + name, self._bytes)
        return None if code in (NOT_FOUND, BEING_WRITTEN) else self._check(code, "get")

    def _exists(self, name: str) -> bool:
        code = self._request("exists", KEY_PREFIX + name)
        return code not in (NOT_FOUND, BEING_WRITTEN) and self._check(code, "is_exist") == 1

    def _remove(self, name: str) -> bool:
        code = self._request("remove", KEY_PREFIX + name)
        return code != NOT_FOUND and self._check(code, "remove") == 0

    def _check(self, code: int, call: str) -> int:
        """Return a code that is none of an error; otherwise the client is given up, for a new one after a while."""
        if code < 0:
            self._give_up()
            raise StoreUnavailableError(f"Mooncake's {call} failed with code {code} (master {self._setup[-1]})")
        return code

    def _request(self, *request: str | int) -> int:
        """Let the client do something (nothing: only start) and return its code."""
        end = time.monotonic() + self._timeout_s
        if time.monotonic() < self._refused_until:
            raise StoreUnavailableError(f"the Mooncake Store of {self._setup[-1]} failed a moment ago")
        try:
            if self._worker is None:
                self._worker = _Worker(self._memory, self._bytes, self._setup, self._log)
                self._check(self._worker.reply(end), "setup")
            if not request:
                return 0
            return self._worker.reply(end, list(request))
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self._give_up()
            reason = "did not answer in time" if isinstance(error, TimeoutError) else "has ended"
            raise StoreUnavailableError(f"Mooncake's client {reason} (master {self._setup[-1]})") from error
        except BaseException:
            self._give_up()  # interrupted: its answer would be taken for the next one's
            raise

    def _give_up(self) -> None:
        worker, self._worker = self._worker, None
        self._refused_until = time.monotonic() + self._retry_after_s
        if worker is not None:
            worker.end(0.0)

    def __del__(self) -> None:
        with suppress(Exception):
            if self._worker is not None:
                self._worker.end(0.0)
            os.close(self._memory)


class _Worker:
    """A process that runs `mooncake_worker.py`, and the pipes to it."""

    def __init__(self, memory: int, size: int, setup: list[str | int], log: Path) -> None:
        requests_read, self._requests = os.pipe()
        self._replies, replies_write = os.pipe()
        passed = (requests_read, replies_write, memory)
        command = [sys.executable, "-P", str(WORKER), *map(str, (*passed, size)), json.dumps(setup)]
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    command, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
                )
        finally:
            for descriptor in (requests_read, replies_write):
                os.close(descriptor)
        self._received = b""

    def reply(self, end: float, request: list[str | int] | None = None) -> int:
        """Send a request and return the code that it is answered with by the time `end`; raises TimeoutError, OSError, EOFError."""
        if request is not None:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            received = os.read(self._replies, 4096)
            if not received:
                raise EOFError
            self._received += received
        line, self._received = self._received.split(b"\n", 1)
        code = json.loads(line)
        if isinstance(code, str):
            raise StoreUnavailableError(f"Mooncake's client cannot be loaded: {code}")
        return int(code)

    def end(self, patience_s: float) -> None:
        """Let the process end by itself for so long, then kill it."""
        for descriptor in (self._requests, self._replies):
            os.close(descriptor)
        with suppress(subprocess.TimeoutExpired):
            if patience_s:
                self._process.wait(patience_s)
        self._process.kill()
        self._process.wait()
