"""Test that a Mooncake Store that fails costs an error and some seconds, and never the engine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zos
from tests.mooncake import MooncakeCluster, free_ports, require_mooncake
from tests.reference import as_array, assert_bitwise_equal
from tests.stores import service_and_cache
from zos import MooncakeStateStore

ROOT = Path(__file__).parent.parent
LONGEST_S = 10.0
STALLED_S = 1.0  # after so long a call that waits for the node stands in the middle of its transfer


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    """A cluster to be broken."""
    require_mooncake()
    cluster = MooncakeCluster(tmp_path)
    yield cluster
    cluster.kill()


def opened(
    cluster: MooncakeCluster, allocator: zos.StateSlotAllocator | None = None, **options: Any
) -> tuple[zos.MetadataService, zos.SwaCache, MooncakeStateStore]:
    """A store of the full size, with "key" in it, put from state 1."""
    svc, cache = service_and_cache("cpu", zos.StateSlotLayout(stored_layers=20))
    store = MooncakeStateStore(svc, cache, "127.0.0.1", allocator, **cluster.ports, **options)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    return svc, cache, store


@pytest.mark.parametrize("call", ["put", "get"])
def test_master_killed_in_the_middle(cluster: MooncakeCluster, call: str) -> None:
    """The call ends with an error within ten seconds, nothing has changed, and the sequence starts by bounded replay."""
    allocator = zos.StateSlotAllocator([2])
    svc, cache, store = opened(cluster, allocator)
    svc.flush()
    before = as_array(svc.table.records).copy(), as_array(cache.slab).copy()
    calls: dict[str, Callable[[], object]] = {"put": lambda: store.put("new", 1, 999), "get": lambda: store.get("key")}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            calls[call]()
        except zos.StoreUnavailableError as error:
            errors.append(error)

    cluster.stall()
    caller = threading.Thread(target=run)
    begin = time.monotonic()
    caller.start()
    caller.join(STALLED_S)
    assert caller.is_alive(), "the call was over before the master was killed"
    cluster.master.kill()
    caller.join(LONGEST_S - STALLED_S)
    assert not caller.is_alive() and time.monotonic() - begin < LONGEST_S
    assert len(errors) == 1
    for name, old, new in zip(("records", "slab"), before, (svc.table.records, cache.slab), strict=True):
        assert_bitwise_equal(new, old, name)

    state_id = allocator.take()
    assert state_id == 2
    svc.admit(state_id, prefix_hit=1000, prompt_end=1100)
    svc.set_prefill_batch([state_id])
    metadata = svc.prepare_prefill()
    assert metadata.positions[: metadata.num_tokens].tolist() == list(range(872, 1100))
    svc.commit(metadata, metadata.seqlens_q)
    assert svc.table.q_start[state_id].item() == 1100
    svc.check()
    store.close()


def test_a_failed_store_is_left_alone(cluster: MooncakeCluster) -> None:
    """One sequence waits for a store that is gone; those after it start by bounded replay at once, until it is tried again."""
    _, _, store = opened(cluster, retry_after_s=30.0)
    cluster.kill()
    begin = time.monotonic()
    with pytest.raises(zos.StoreUnavailableError):
        store.get("key", 2)
    assert time.monotonic() - begin < LONGEST_S
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(zos.StoreUnavailableError, match="a moment ago"):
            store.get("key", 2)
    assert time.monotonic() - begin < 1.0
    store.close()


def test_master_comes_back(cluster: MooncakeCluster, tmp_path: Path) -> None:
    """A store that was gone is used again, without the engine being started anew; what is stored then is found."""
    svc, cache, store = opened(cluster, retry_after_s=0.0)
    cluster.kill()
    with pytest.raises(zos.StoreUnavailableError):
        store.get("key", 2)
    cluster.start(tmp_path)
    with pytest.raises(zos.MissingStateError):
        store.get("key", 2)
    store.put("key", 1, 1000)
    store.get("key", 2)
    assert_bitwise_equal(cache.stored(2), cache.stored(1), "stored part")
    assert svc.in_use(2)
    store.close()


def test_no_master(tmp_path: Path) -> None:
    """An address where nobody answers is an error of the constructor, in time; the client's log is kept where it is asked for."""
    require_mooncake()
    ports = dict(zip(("port", "metadata_port"), free_ports(2), strict=True))
    log = tmp_path / "client.log"
    begin = time.monotonic()
    with pytest.raises(zos.StoreUnavailableError, match="in time"):
        MooncakeStateStore(*service_and_cache("cpu"), "127.0.0.1", **ports, timeout_s=2.0, log=log)
    assert time.monotonic() - begin < LONGEST_S
    assert "client" in log.read_text()


def test_client_killed(mooncake: MooncakeCluster) -> None:
    """The client's end is an error of one call; the next one starts another client and finds what was stored."""
    svc, cache, store = opened(mooncake, retry_after_s=0.0)
    assert store._worker is not None
    os.kill(store._worker._process.pid, signal.SIGKILL)
    with pytest.raises(zos.StoreUnavailableError, match="has ended"):
        store.get("key", 2)
    assert not svc.in_use(2)
    assert store.get("key", 2) == 2
    assert_bitwise_equal(cache.stored(2), cache.stored(1), "stored part")
    store.close()
    assert store._worker is None


EXIT = """
import threading, sys, time
from tests.stores import open_place, service_and_cache
svc, cache = service_and_cache("cpu")
store = open_place(sys.argv[1])(svc, cache)
svc.admit(1, q_start=1000)
store.put("key", 1, 1000)
print(store._worker._process.pid, flush=True)
input()
threading.Thread(target=store.get, args=("key", 2), daemon=True).start()
time.sleep(0.5)
print("end", flush=True)
"""


def test_exit_in_the_middle(cluster: MooncakeCluster) -> None:
    """An engine that ends does not wait for a call that is stuck, and leaves no process behind."""
    command = [sys.executable, "-c", EXIT, cluster.place]
    engine = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    client = int(engine.stdout.readline())
    cluster.stall()
    print(file=engine.stdin, flush=True)
    assert engine.stdout.readline() == "end\n"
    assert engine.wait(LONGEST_S) == 0
    end = time.monotonic() + LONGEST_S
    while running(client):
        assert time.monotonic() < end, "the client outlives its engine"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_lent_memory(tmp_path: Path) -> None:
    """Without a node the store has no room but what an engine lends it."""
    require_mooncake()
    cluster = MooncakeCluster(tmp_path, node=False)
    try:
        with pytest.raises(zos.StoreUnavailableError, match="put failed"):
            opened(cluster)
        _, cache, lender = opened(cluster, segment_bytes=64 * 2**20)
        svc, other = service_and_cache("cpu", cache.layout, seed=1)
        reader = MooncakeStateStore(svc, other, "127.0.0.1", **cluster.ports)
        assert reader.get("key", 2) == 2
        assert_bitwise_equal(other.stored(2), cache.stored(1), "stored part")
        for store in (lender, reader):
            store.close()
    finally:
        cluster.kill()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"protocol": "udp"}, "protocol='udp'"),
        ({"port": 0}, "port=0"),
        ({"metadata_port": 65_536}, "metadata_port=65536"),
        ({"segment_bytes": -1}, "segment_bytes=-1"),
    ],
)
def test_arguments(options: dict[str, object], text: str) -> None:
    """A wrong argument is named before anything is started."""
    with pytest.raises(ValueError, match=text):
        MooncakeStateStore(*service_and_cache("cpu"), "127.0.0.1", **options)  # type: ignore[arg-type]


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(zos.StoreUnavailableError, match=r"install zos\[mooncake\]"):
        MooncakeStateStore(*service_and_cache("cpu"), "127.0.0.1")


def test_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library of the machine is missing, its name reaches the caller."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(zos.StoreUnavailableError, match=r"libibverbs\.so\.1"):
        MooncakeStateStore(*service_and_cache("cpu"), "127.0.0.1")
