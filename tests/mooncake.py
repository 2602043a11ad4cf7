"""A real Mooncake Store on loopback: a master, and a process that lends it memory."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

import zos

REQUIRED = "ZOS_REQUIRE_MOONCAKE"  # set where its libraries are installed, so that nothing is skipped unseen
SEGMENT_BYTES = 256 * 2**20
START_S = 20.0
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store, (port, metadata_port, size) = MooncakeDistributedStore(), map(int, sys.argv[1:])
address = f"127.0.0.1:{port}"
code = store.setup("127.0.0.1", f"http://127.0.0.1:{metadata_port}/metadata", size, 2**24, "tcp", "", address)
print(code, flush=True)
for _ in sys.stdin:
    print(store.remove_all(True), flush=True)
"""


class MooncakeCluster:
    """A master on free ports, and a node that lends memory; killed at the end."""

    def __init__(self, folder: Path, node: bool = True) -> None:
        self.port, self.metadata_port, self._metrics_port = free_ports(3)
        self.start(folder, node)

    def start(self, folder: Path, node: bool = True) -> None:
        """Start both; after `kill`, on the same ports."""
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        binary = Path(spec.origin).with_name("mooncake_master")
        binary.chmod(binary.stat().st_mode | 0o111)
        log = (folder / "mooncake.log").open("a")
        command = [
            str(binary),
            f"--rpc_port={self.port}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.metadata_port}",
            f"--metrics_port={self._metrics_port}",
        ]
        self.master = subprocess.Popen(command, stdout=log, stderr=log)
        self.node: subprocess.Popen[str] | None = None
        try:
            for port in (self.port, self.metadata_port):
                wait_for(port, self.master)
            if not node:
                return
            command = [sys.executable, "-c", NODE, *map(str, (self.port, self.metadata_port, SEGMENT_BYTES))]
            self.node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            assert pipe(self.node.stdout).readline() == "0\n"
        except BaseException:
            self.kill()
            raise
        finally:
            log.close()

    @property
    def place(self) -> str:
        """Where stores find it."""
        return f"mooncake:127.0.0.1:{self.port}:{self.metadata_port}"

    @property
    def ports(self) -> dict[str, int]:
        """Where the master is, as arguments of MooncakeStateStore."""
        return {"port": self.port, "metadata_port": self.metadata_port}

    def clear(self) -> None:
        """Forget every object."""
        assert self.node is not None
        print(file=pipe(self.node.stdin), flush=True)
        assert int(pipe(self.node.stdout).readline()) >= 0

    def stall(self) -> None:
        """Let transfers into and out of the node's memory stand still, half done."""
        assert self.node is not None
        self.node.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Take everything away at once."""
        for process in (self.master, self.node):
            if process is not None:
                process.kill()
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()


def open_mooncake(
    place: str, svc: zos.MetadataService, cache: zos.SwaCache, allocator: zos.StateSlotAllocator | None
) -> zos.StateStore:
    """Open a store of a cluster's place, with the shortest memory for failures."""
    _, host, port, metadata_port = place.split(":")
    return zos.MooncakeStateStore(
        svc, cache, host, allocator, port=int(port), metadata_port=int(metadata_port), retry_after_s=0.0
    )


def require_mooncake() -> None:
    """Skip a test where Mooncake cannot be loaded, or fail it where it must not be missing."""
    found = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if found.returncode:
        reason = f"MOONCAKE IS NOT TESTED: {found.stderr.strip().splitlines()[-1]}"
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(reason)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process listens."""
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"mooncake_master ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end, f"nobody listens on port {port}"
            time.sleep(0.02)


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
