"""Test that a state put into an external store is got back byte for byte, or not at all; on every back end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import as_array, assert_bitwise_equal, random_steps
from tests.stores import LAYOUT, Open, discard, found, open_local, open_place, plant, service_and_cache
from zos.store_format import HEADER_BYTES, LONGEST_KEY

ROOT = Path(__file__).parent.parent


@pytest.fixture(params=["local", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store is: what `open_place` takes."""
    if request.param == "local":
        return f"local:{tmp_path / 'states'}"
    cluster = request.getfixturevalue("mooncake")
    cluster.clear()
    return str(cluster.place)


@pytest.fixture
def opened(place: str) -> Iterator[Open]:
    """Open stores of the same place."""
    stores: list[zos.StateStore] = []

    def opened(*arguments: Any) -> zos.StateStore:
        stores.append(open_place(place)(*arguments))
        return stores[-1]

    yield opened
    for store in stores:
        discard(store)


def everything(svc: zos.MetadataService, cache: zos.SwaCache) -> tuple[np.ndarray, np.ndarray]:
    svc.flush()
    return as_array(svc.table.records).copy(), as_array(cache.slab).copy()


# ---- put and get ------------------------------------------------------------------------------------------------


def test_bytes_and_table(device: str, opened: Open, seed: int) -> None:
    """The stored part arrives byte for byte, the rest of the slab keeps its bytes, and the sequence goes on at the boundary."""
    svc, cache = service_and_cache(device, seed=seed)
    allocator = zos.StateSlotAllocator([3])
    store = opened(svc, cache, allocator)
    svc.admit(1, q_start=1000, swa_valid_start=900)
    store.put("key", 1, 1000)
    expected = as_array(cache.slab).copy()
    begin, bytes_ = cache.slot_pitch, LAYOUT.stored_bytes
    expected[3 * begin : 3 * begin + bytes_] = expected[begin : begin + bytes_]
    assert store.get("key", prompt_end=1500, chunk_q=100, stop_at=1600) == 3
    assert_bitwise_equal(cache.slab, expected, "slab")
    svc.flush()
    columns = ("phase", "q_start", "head", "swa_valid_start", "kv_cached_end", "prompt_end", "seqlen_q", "stop_at")
    row = [getattr(svc.table, name)[3].item() for name in columns]
    assert row == [zos.Phase.LIVE, 1000, 1000, 900, 1000, 1500, 100, 1600]
    assert allocator.free == 0
    svc.check()


def test_full_size(device: str, opened: Open, seed: int) -> None:
    """The model family's layout: 20 layers, 1,415,040 bytes and a header."""
    svc, cache = service_and_cache(device, zos.StateSlotLayout.v41_flash(), seed=seed)
    store = opened(svc, cache)
    svc.admit(2, q_start=4096)
    store.put("key", 2, 4096)
    assert len(found(store, "key")) == HEADER_BYTES + 1_415_040
    assert store.get("key", 0) == 0
    assert_bitwise_equal(cache.stored(0), cache.stored(2), "stored part")


PUT = """
import sys, time
from tests.stores import open_place, service_and_cache
svc, cache = service_and_cache("cpu", seed=int(sys.argv[2]))
store = open_place(sys.argv[1])(svc, cache)
svc.admit(1, q_start=1000)
store.put("key", 1, 998)
print("put", flush=True)
time.sleep(600)
"""


def test_another_process(place: str, seed: int) -> None:
    """What was put outlives the process that put it, which has no time to say goodbye."""
    writer = subprocess.Popen(
        [sys.executable, "-c", PUT, place, str(seed)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None and writer.stdout.readline() == "put\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    _, written = service_and_cache("cpu", seed=seed)
    svc, cache = service_and_cache("cpu", seed=seed + 1)
    store = open_place(place)(svc, cache)
    assert store.get("key", 2) == 2
    assert_bitwise_equal(cache.stored(2), written.stored(1), "stored part")
    svc.flush()
    assert svc.table.q_start[2].item() == 998


def test_histories(device: str, opened: Open, seed: int) -> None:
    """After any chunks, steps and rejections, a boundary is taken exactly while its window is in the ring, and then holds it.

    Every entry begins with its position and how often that was written, so that a rejected draft's bytes would show.
    """
    rng = np.random.default_rng(seed)
    window, ring = 16, 22
    layout = zos.StateSlotLayout(zos.RingGeometry(window, 5), stored_layers=1)
    svc, cache = service_and_cache(device, layout)
    store = opened(svc, cache)
    svc.admit(0, prompt_end=70, chunk_q=9)
    svc.admit(1, prefix_hit=40, prompt_end=61)
    svc.set_batch([0, 1])
    svc.set_prefill_batch([0, 1])
    written = [np.zeros(1000, np.int32) for _ in range(2)]
    taken = 0
    for metadata, _ in random_steps(svc, 12, rng):
        records = as_array(svc.table.records)
        for state_id in range(2):
            q_start, head, valid = (
                int(records[state_id, zos.table.COLUMNS[c]]) for c in ("q_start", "head", "swa_valid_start")
            )
            for boundary in range(max(0, head - ring + window - 2), head + 2):
                fits = 1 <= boundary <= q_start and head - boundary <= ring - window and boundary >= valid
                if not fits:
                    with pytest.raises(zos.BoundaryError, match=f"={boundary}|boundary=0"):
                        store.put("key", state_id, boundary)
                    continue
                taken += 1
                store.put("key", state_id, boundary)
                assert store.get("key", 2) == 2
                positions = np.arange(max(boundary - window, valid), boundary)
                entries = as_array(cache.layer(0))[2, positions % ring, 0, :8].copy().view(np.int32)
                assert_bitwise_equal(entries[:, 0], positions.astype(np.int32), "positions")
                assert_bitwise_equal(entries[:, 1], written[state_id][positions], "times written")
                svc.release(2)
        slots = as_array(metadata.swa_write_slot)
        rows, positions = as_array(metadata.token_row), as_array(metadata.positions)
        live = rows >= 0
        for state_id in range(2):
            np.add.at(written[state_id], positions[live & (rows == state_id)], 1)
        live &= slots >= 0
        entries = np.stack(
            [positions[live], [written[r][p] for r, p in zip(rows[live], positions[live], strict=True)]], 1
        )
        flat = cache.layer(0)[:, :, 0, :8]
        state, slot = torch.from_numpy(slots[live] // ring), torch.from_numpy(slots[live] % ring)
        flat[state.to(device), slot.to(device)] = torch.from_numpy(entries.astype(np.int32).view(np.uint8)).to(device)
    assert taken > 100


def test_snapshot_bytes(device: str, opened: Open, seed: int) -> None:
    """Bytes copied earlier make the same stored state as a put at that time, header included."""
    svc, cache = service_and_cache(device, seed=seed)
    store = opened(svc, cache)
    svc.admit(1, q_start=1000, swa_valid_start=7)
    store.put("key", 1, 997)
    expected = found(store, "key")
    store.put_bytes("key", 997, 1000, cache.stored(1).cpu(), swa_valid_start=7)
    assert found(store, "key") == expected
    with pytest.raises(zos.BoundaryError, match="boundary=990 is 10 behind head=1000"):
        store.put_bytes("key", 990, 1000, cache.stored(1))
    with pytest.raises(ValueError, match="payload is"):
        store.put_bytes("key", 1000, 1000, cache.stored(1)[1:])
    assert found(store, "key") == expected


@pytest.mark.parametrize("entry", [zos.EntryFormat.mxfp8(), zos.EntryFormat.v4()], ids=lambda entry: entry.name)
@pytest.mark.parametrize(("ours", "theirs"), [(134, 140), (140, 134), (134, 133), (134, 268)])
def test_another_ring(opened: Open, entry: zos.EntryFormat, ours: int, theirs: int, seed: int) -> None:
    """A reader whose ring is longer or shorter finds each position where its own steps look for it."""
    rng = np.random.default_rng(seed)
    layouts = [zos.StateSlotLayout(zos.RingGeometry(ring=ring), 3, 1, entry=entry) for ring in (ours, theirs)]
    (svc, cache), (other_svc, other) = (service_and_cache("cpu", layout, seed=seed) for layout in layouts)
    boundary = int(rng.integers(1, 2000))
    head = boundary + int(rng.integers(0, ours - 128 + 1))
    opened(svc, cache).put_bytes("key", boundary, head, cache.stored(1))
    opened(other_svc, other).get("key", 2)
    for layer in range(3):
        for view in (zos.SwaCache.data, zos.SwaCache.scales):
            held, expected = view(other, layer)[2], view(cache, layer)[1]
            positions = np.arange(max(0, boundary - 128), boundary)
            assert_bitwise_equal(held[positions % theirs], expected[positions % ours], f"layer {layer}")
    other_svc.flush()
    assert other_svc.table.q_start[2].item() == boundary


def test_a_ring_much_longer_is_refused(opened: Open) -> None:
    """A reader's buffer has an end, and a state that exceeds it is refused before it is read."""
    long, short = (zos.StateSlotLayout(zos.RingGeometry(ring=ring), 2, 1) for ring in (300, 134))
    svc, cache = service_and_cache("cpu", long)
    svc.admit(1, q_start=1000)
    opened(svc, cache).put("key", 1, 1000)
    svc, cache = service_and_cache("cpu", short)
    with pytest.raises(zos.CorruptStateError, match="more than any state of this layout"):
        opened(svc, cache).get("key", 1)


@pytest.mark.parametrize(
    "key", ["", "../../etc/passwd", "a/b\\c\0d\n", "名前", "\ud800", b"\xff\x00", "x" * LONGEST_KEY]
)
def test_any_key(opened: Open, key: str | bytes) -> None:
    """A key is no file name: none escapes the directory or meets another."""
    svc, cache = service_and_cache("cpu")
    store = opened(svc, cache)
    svc.admit(1, q_start=1000)
    store.put("other", 1, 999)
    assert not store.contains(key)
    store.put(key, 1, 1000)
    assert store.contains(key) and store.get(key, 0) == 0
    svc.flush()
    assert svc.table.q_start[0].item() == 1000
    assert store.delete(key) and not store.contains(key) and not store.delete(key)
    with pytest.raises(zos.MissingStateError):
        store.get(key, 2)
    assert store.contains("other")


@pytest.mark.parametrize("key", ["x" * (LONGEST_KEY + 1), "名" * 2000, 3, None])
def test_no_key(opened: Open, key: object) -> None:
    """A key that the header cannot hold is refused, not cut."""
    store = opened(*service_and_cache("cpu"))
    for call in (store.contains, store.delete, store.get):
        with pytest.raises(ValueError, match="key"):
            call(key)  # type: ignore[arg-type]


# ---- refusals ---------------------------------------------------------------------------------------------------


def versioned(blob: bytes) -> bytes:
    return blob[:8] + (2).to_bytes(4, "little") + blob[12:]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda blob: blob[:11], zos.CorruptStateError, "11 bytes found are no stored state"),
        (lambda blob: blob[: HEADER_BYTES - 1], zos.CorruptStateError, "truncated"),
        (lambda blob: blob[:HEADER_BYTES], zos.CorruptStateError, "has 0 bytes behind its header"),
        (lambda blob: blob[:-1], zos.CorruptStateError, "bytes behind its header instead of"),
        (lambda blob: blob + b"\0", zos.CorruptStateError, "bytes behind its header instead of"),
        (lambda blob: bytes(len(blob)), zos.CorruptStateError, "no stored state"),
        (versioned, zos.OtherVersionError, "version 2"),
    ],
)
def test_other_bytes(opened: Open, change: Callable[[bytes], bytes], error: type[zos.StoreError], text: str) -> None:
    """What is no whole state of this version is refused by name, and nothing has changed."""
    svc, cache = service_and_cache("cpu")
    allocator = zos.StateSlotAllocator([2])
    store = opened(svc, cache, allocator)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    plant(store, "key", change(found(store, "key")))
    before = everything(svc, cache)
    with pytest.raises(error, match=text):
        store.get("key")
    for name, old, new in zip(("records", "slab"), before, everything(svc, cache), strict=True):
        assert_bitwise_equal(new, old, name)
    assert not svc.in_use(2) and allocator.free == 1


def test_flipped_bits(opened: Open, seed: int) -> None:
    """No bit of header or payload can change without the reader noticing."""
    rng = np.random.default_rng(seed)
    svc, cache = service_and_cache("cpu")
    store = opened(svc, cache)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    blob = found(store, "key")
    before = everything(svc, cache)
    numbers = [
        *range(0, 8 * 140, 7),
        *rng.integers(0, 8 * len(blob), 100).tolist(),
        8 * HEADER_BYTES - 1,
        8 * len(blob) - 1,
    ]
    for number in numbers:
        flipped = bytearray(blob)
        flipped[number // 8] ^= 1 << number % 8
        plant(store, "key", bytes(flipped))
        with pytest.raises((zos.CorruptStateError, zos.OtherVersionError)):
            store.get("key", 2)
    for name, old, new in zip(("records", "slab"), before, everything(svc, cache), strict=True):
        assert_bitwise_equal(new, old, name)


@pytest.mark.parametrize(
    "layout",
    [
        zos.StateSlotLayout(stored_layers=1, dropped_layers=1),
        zos.StateSlotLayout(stored_layers=2, dropped_layers=2),
        zos.StateSlotLayout(zos.RingGeometry(window=64, ring=134), 2, 1),
        zos.StateSlotLayout(stored_layers=2, dropped_layers=1, entry=zos.EntryFormat.v4()),
        zos.StateSlotLayout(stored_layers=2, dropped_layers=1, compression=[(zos.CompressionRing(2), 64, 1)]),
    ],
)
def test_other_layout(opened: Open, layout: zos.StateSlotLayout) -> None:
    """Bytes that mean something else in this layout are never restored."""
    svc, cache = service_and_cache("cpu", layout)
    svc.admit(1, q_start=1000)
    opened(svc, cache).put("key", 1, 1000)
    svc, cache = service_and_cache("cpu")
    before = everything(svc, cache)
    with pytest.raises(zos.OtherLayoutError):
        opened(svc, cache).get("key", 2)
    for name, old, new in zip(("records", "slab"), before, everything(svc, cache), strict=True):
        assert_bitwise_equal(new, old, name)


def test_other_key(opened: Open) -> None:
    """A file copied to another key's name is not that key's state."""
    svc, cache = service_and_cache("cpu")
    store = opened(svc, cache)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    plant(store, "another", found(store, "key"))
    with pytest.raises(zos.OtherKeyError, match="b'key', not b'another'"):
        store.get("another", 2)


def test_put_refused(device: str, opened: Open) -> None:
    """A state without a sequence, in error or out of range is not stored, and what the key held stays."""
    svc, cache = service_and_cache(device)
    store = opened(svc, cache)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    kept = found(store, "key")
    svc.admit(0, q_start=500, decode_q=1)
    with pytest.raises(zos.StateNotLiveError, match="state_id=2 is not in use"):
        store.put("key", 2, 10)
    with pytest.raises(IndexError):
        store.put("key", 4, 10)
    with pytest.raises(ValueError, match="whole number"):
        store.put("key", 1, 1.5)  # type: ignore[arg-type]
    for boundary, text in (
        (1001, "exceeds q_start=1000"),
        (993, "7 behind head=1000"),
        (0, "outside"),
        (-5, "outside"),
    ):
        with pytest.raises(zos.BoundaryError, match=text):
            store.put("key", 1, boundary)
    svc.set_batch([0])
    svc.commit(svc.prepare(), torch.tensor([5, 0], dtype=torch.int32, device=device))  # 5 of 1 kept: an error
    with pytest.raises(zos.StateNotLiveError, match="state_id=0 is ERROR"):
        store.put("key", 0, 500)
    assert found(store, "key") == kept


def test_paused_and_finished(device: str, opened: Open) -> None:
    """A conversation is stored when its turn ends; that it does not run any more is no reason against it."""
    svc, cache = service_and_cache(device)
    store = opened(svc, cache)
    svc.admit(1, q_start=1000, stop_at=1003)
    svc.pause(1)
    store.put("paused", 1, 1000)
    svc.resume(1)
    svc.set_batch([1])
    svc.commit(svc.prepare(), torch.tensor([3, 0], dtype=torch.int32, device=device))
    store.put("finished", 1, 1003)
    assert svc.table.phase[1].item() == zos.Phase.FINISHED
    for state_id, key in ((2, "paused"), (3, "finished")):
        store.get(key, state_id)
    svc.flush()
    assert svc.table.q_start[2:].tolist() == [1000, 1003]


def test_get_refused(opened: Open) -> None:
    """Whatever stands against an admission is found before the slot is touched, and the allocator keeps its slot."""
    layout = zos.StateSlotLayout(stored_layers=2, compression=[(zos.CompressionRing(2), 64, 1)])
    svc, cache = service_and_cache("cpu", layout)
    allocator = zos.StateSlotAllocator([2])
    store = opened(svc, cache, allocator)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    store.put("odd", 1, 999)
    before = everything(svc, cache)
    refusals = [
        (zos.StateInUseError, "state_id=1 is in use", "key", 1, {}),
        (IndexError, "state_id=4", "key", 4, {}),
        (zos.BoundaryError, "leaves no token of prompt_end=1000", "key", None, {"prompt_end": 1000}),
        (zos.BoundaryError, "ratio 2 pools tokens below q_start=999", "odd", None, {}),
        (ValueError, "stop_at=900 must exceed", "key", None, {"stop_at": 900}),
        (ValueError, "q_start given", "key", None, {"q_start": 3}),
        (ValueError, "nonsense is no argument", "key", None, {"nonsense": 3}),
        (ValueError, "without prompt_end", "key", None, {"rebuild_dropped": True}),
        (zos.MissingStateError, "b'nothing'", "nothing", None, {}),
    ]
    for error, text, key, state_id, options in refusals:
        with pytest.raises(error, match=text):
            store.get(key, state_id, **options)
        assert allocator.free == 1
    for name, old, new in zip(("records", "slab"), before, everything(svc, cache), strict=True):
        assert_bitwise_equal(new, old, name)
    assert store.get("key") == 2
    with pytest.raises(zos.NoFreeStateError):
        store.get("key")
    with pytest.raises(ValueError, match="no allocator"):
        opened(svc, cache).get("key")


def test_failed_admission(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot whose restore fails half-way goes back to the allocator; so does one that somebody else admitted to."""
    svc, cache = service_and_cache("cpu")
    allocator = zos.StateSlotAllocator([2])
    store = opened(svc, cache, allocator)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(svc, "admit", fail)
        with pytest.raises(MemoryError):
            store.get("key")
    assert allocator.free == 1
    svc.admit(2)
    with pytest.raises(zos.StateInUseError, match="state_id=2 of the allocator"):
        store.get("key")
    assert allocator.free == 1


def test_rebuild_dropped(device: str, opened: Open) -> None:
    """Rings that are not stored are rebuilt from a window before the boundary; no entry below it is emitted again."""
    svc, cache = service_and_cache(device)
    store = opened(svc, cache)
    svc.admit(0, q_start=1000)
    svc.admit(1, q_start=1000, swa_valid_start=950)
    for state_id, start in ((0, 872), (1, 950)):
        store.put("key", state_id, 1000)
        store.get("key", 2, rebuild_dropped=True, prompt_end=1200)
        svc.flush()
        row = [getattr(svc.table, name)[2].item() for name in ("q_start", "swa_valid_start", "kv_cached_end", "head")]
        assert row == [start, start, 1000, start]
        svc.release(2)


def test_service_and_cache_belong_together(opened: Open) -> None:
    """A store over the wrong cache would restore one sequence into another's ring."""
    svc, _ = service_and_cache("cpu")
    for layout, capacity, text in (
        (zos.StateSlotLayout(zos.RingGeometry(ring=140)), 4, "ring=140"),
        (zos.StateSlotLayout(zos.RingGeometry(window=64, ring=134)), 4, "window=64"),
        (zos.StateSlotLayout(stored_layers=0, dropped_layers=1), 4, "nothing to store"),
        (LAYOUT, 3, "3 state slots"),
    ):
        with pytest.raises(ValueError, match=text):
            opened(svc, zos.SwaCache(layout, capacity, "cpu"))


# ---- several at once --------------------------------------------------------------------------------------------


def test_concurrent_writers(opened: Open) -> None:
    """Readers get one writer's whole state or another's, never a mixture, and the last one stays."""
    stop, writers = time.monotonic() + 1.0, []
    states = [torch.full((LAYOUT.stored_bytes,), value, dtype=torch.uint8) for value in range(1, 4)]

    def write(payload: torch.Tensor, store: zos.StateStore) -> None:
        while time.monotonic() < stop:
            store.put_bytes("key", 1000, 1000, payload)

    stores = [opened(*service_and_cache("cpu")) for _ in states]
    stores[0].put_bytes("key", 1000, 1000, states[0])
    for payload, store in zip(states, stores, strict=True):
        writers.append(threading.Thread(target=write, args=(payload, store)))
        writers[-1].start()
    svc, cache = service_and_cache("cpu")
    reader, seen = opened(svc, cache), set()
    while any(writer.is_alive() for writer in writers):
        try:
            reader.get("key", 2)
        except (zos.MissingStateError, zos.CorruptStateError):
            assert not isinstance(reader, zos.LocalStateStore)  # which replaces a file in one go
            continue
        svc.release(2)
        values = cache.stored(2).unique().tolist()
        assert len(values) == 1
        seen.add(values[0])
    assert len(seen) > 1
    stores[1].put_bytes("key", 1000, 1000, states[2])
    reader.get("key", 2)
    assert cache.stored(2).unique().tolist() == [3]
    for store in (*stores, reader):
        store.close()


# ---- the directory ----------------------------------------------------------------------------------------------


def test_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves what the key held, and no half-written file."""
    svc, cache = service_and_cache("cpu")
    store = open_local(tmp_path)(svc, cache)
    svc.admit(1, q_start=1000)
    store.put("key", 1, 1000)
    kept, files = found(store, "key"), sorted(tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(zos.StoreUnavailableError, match="No space left"):
        store.put("key", 1, 999)
    assert found(store, "key") == kept and sorted(tmp_path.iterdir()) == files


def test_leftovers(tmp_path: Path) -> None:
    """What killed writers left is removed by and by; a writer at work loses nothing."""
    old, fresh = tmp_path / ".a.0.tmp", tmp_path / ".b.0.tmp"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    open_local(tmp_path)(*service_and_cache("cpu"))
    assert not old.exists() and fresh.exists()


def test_directory_is_none(tmp_path: Path) -> None:
    """A file in the directory's place, or in a state's, is the store's error and not the engine's."""
    (tmp_path / "file").write_text("")
    with pytest.raises(zos.StoreUnavailableError):
        open_local(tmp_path / "file")(*service_and_cache("cpu"))
