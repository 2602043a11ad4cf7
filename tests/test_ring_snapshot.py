"""Test that a snapshot holds what the ring held at its boundary, that no slot is filled twice, and that skips are counted."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import zos
from host_fallback.ring_snapshot import CHECK
from tests.reference import as_array, assert_bitwise_equal

GEOMETRY = zos.RingGeometry(16, 5)
LAYOUT = zos.StateSlotLayout(GEOMETRY, stored_layers=2, dropped_layers=1)
STATES, ROWS = 12, 8
CODE_BITS = 24


def service(device: str, every: int = 7, **options: Any) -> zos.MetadataService:
    options = {"capacity": STATES, "max_batch": ROWS, "geometry": GEOMETRY, "compression_ratios": (), **options}
    return zos.MetadataService(device=device, max_prefill_tokens=64, snapshot_every=every, **options)


def settle(svc: zos.MetadataService) -> None:
    """Let the device finish what is launched, so that the host finds all there is."""
    if svc.device.type == "cuda":
        torch.cuda.synchronize()


class Model:
    """What operator and pool do, in plain Python: which slots are taken, and by what."""

    def __init__(self, slots: int) -> None:
        self.free = [True] * slots
        self.number = self.skipped = 0
        self.unread: list[tuple[zos.Snapshot, np.ndarray]] = []  # and the state's bytes

    def snapshot(self, marks: np.ndarray, tickets: np.ndarray, records: np.ndarray, states: np.ndarray) -> None:
        """Take the marked rows' states in row order, while there is room."""
        for mark, (state_id, generation, *_) in zip(marks.tolist(), tickets.tolist(), strict=True):
            if mark < 0:
                continue
            head = int(records[state_id, 8])
            sound = records[state_id, 6] == generation and head - mark <= GEOMETRY.ring - GEOMETRY.window
            if not sound or not any(self.free):
                self.skipped += 1
                continue
            slot = self.free.index(True)
            self.free[slot] = False
            self.number += 1
            self.unread.append(
                (zos.Snapshot(state_id, generation, mark, head, slot, self.number), states[state_id].copy())
            )


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_equals_the_model(device: str, slots: int, seed: int) -> None:
    """Random marks, late ones among them, and a host that frees in any order: every slot, number, byte and count."""
    rng = np.random.default_rng([seed, slots])
    svc, cache = service(device), zos.SwaCache(LAYOUT, STATES + 2, device)
    pool, model = zos.SnapshotPool(svc, cache, slots), Model(slots)
    metadata = svc.slot_metadata(0, ROWS, ROWS * 6)
    assert metadata.marks is not None
    held: list[tuple[zos.Snapshot, np.ndarray]] = []
    for _ in range(60):
        records = rng.integers(0, 50, (STATES, 16)).astype(np.int32)
        states = rng.permutation(STATES)[:ROWS]
        tickets = np.stack([states, records[states, 6], records[states, 2], records[states, 1]], 1).astype(np.int32)
        tickets[rng.random(ROWS) < 0.1, 1] += 1  # no longer the life that was marked
        marked = rng.random(ROWS) < rng.choice([0, 0.2, 1])
        marks = np.where(marked, records[states, 8] - rng.integers(0, 8, ROWS), -1).clip(-1).astype(np.int32)
        for tensor, array in ((svc.table.records, records), (metadata.tickets, tickets), (metadata.marks, marks)):
            tensor.copy_(torch.from_numpy(array))
        cache.slab.copy_(torch.from_numpy(rng.integers(0, 256, cache.slab.numel(), dtype=np.uint8)))
        stored = as_array(cache.all_stored()).copy()
        for _ in range(2):  # a second look finds no marks
            pool.snapshot(metadata)
        cache.slab.fill_(77)  # the next step
        settle(svc)
        model.snapshot(marks, tickets, records, stored)
        assert (as_array(metadata.marks) == -1).all() and pool.skipped == model.skipped
        if rng.random() < 0.6:
            assert pool.poll() == [snapshot for snapshot, _ in model.unread]
            held, model.unread = held + model.unread, []
        rng.shuffle(held)  # type: ignore[arg-type]
        for _ in range(rng.integers(0, len(held) + 1)):
            snapshot, expected = held.pop()
            assert_bitwise_equal(pool.read(snapshot), expected, f"bytes of {snapshot}")
            pool.free(snapshot)
            model.free[snapshot.slot] = True
    assert model.number > 3 and model.skipped > 0


def operands_of(states: torch.Tensor, snapshots: torch.Tensor) -> dict[str, Any]:
    """Arguments of the operator in order: states 3 and 1 are marked, and every slot is free."""
    count, device = len(snapshots), states.device
    shapes = {"slots": (count, 8), "taken": (count,), "plan": (count, 6), "progress": (4,), "skipped": (1,)}
    return {
        "records": torch.zeros(4, 16, dtype=torch.int32, device=device),
        "tickets": torch.tensor([[3, 0, 0, 1], [1, 0, 0, 1]], dtype=torch.int32, device=device),
        "marks": torch.zeros(2, dtype=torch.int32, device=device),
        "states": states,
        "snapshots": snapshots,
        **{name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in shapes.items()},
        "overshoot": 6,
    }


@pytest.mark.parametrize(
    ("size", "pitch", "offset"), [(7, 7, 1), (4099, 5000, 0), (4096, 4100, 0), (4096, 4096, 8), (1 << 23, (1 << 23) + 48, 16)]
)  # fmt: skip
def test_any_address_and_size(device: str, size: int, pitch: int, offset: int) -> None:
    """States at odd addresses, of odd sizes, longer than the grid copies in one go: all bytes, and none beside a slot."""
    slab = torch.randint(0, 256, (offset + 4 * pitch,), dtype=torch.uint8, device=device)
    guarded = torch.full((4, size), 77, dtype=torch.uint8, device=device)
    operands = operands_of(slab[offset:].as_strided((4, size), (pitch, 1), offset), guarded[1:3])
    torch.ops.zos.swa_ring_snapshot(*operands.values())
    assert_bitwise_equal(guarded[1:3], operands["states"][[3, 1]], f"{size} bytes")
    assert (guarded[::3] == 77).all()
    assert operands["slots"][:, 0].tolist() == [1, 2] and operands["progress"][:2].tolist() == [2, 0]


def test_opcheck(device: str) -> None:
    """Schema, fake implementation and functionalisation agree with what the operator does."""
    slab = torch.zeros(6, 64, dtype=torch.uint8, device=device)
    torch.library.opcheck(torch.ops.zos.swa_ring_snapshot.default, tuple(operands_of(slab[:4], slab[4:]).values()))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("marks", lambda t: t[:1], "shape of marks"),
        ("tickets", lambda t: t.long(), "dtype of tickets"),
        ("states", lambda t: t[:3], r"shape of states: expected \[4 or more, 64\]"),
        ("states", lambda t: t[:, :32], "shape of states"),
        ("states", lambda t: t.repeat(1, 2)[:, ::2], "stride of states"),
        ("states", lambda t: t.char(), "dtype of states"),
        ("snapshots", lambda t: t[:0], "shape of snapshots"),
        ("snapshots", lambda t: t.repeat(1, 2)[:, :64], "stride of snapshots"),
        ("slots", lambda t: t[:, :7], "shape of slots"),
        ("taken", lambda t: t[:1], "shape of taken"),
        ("plan", lambda t: t[:1], "shape of plan"),
        ("progress", lambda t: t[:3], "shape of progress"),
        ("skipped", lambda t: t.int(), "dtype of skipped"),
        ("overshoot", lambda number: -1, "overshoot=-1"),
    ],
)
def test_operator_refuses(device: str, name: str, spoil: Any, message: str) -> None:
    """What would be read or written outside is named, and no mark is lost."""
    slab = torch.zeros(6, 64, dtype=torch.uint8, device=device)
    operands = operands_of(slab[:4], slab[4:])
    with pytest.raises(ValueError, match=message):
        torch.ops.zos.swa_ring_snapshot(*{**operands, name: spoil(operands[name])}.values())
    assert operands["marks"].tolist() == [0, 0]


def values_of(code: torch.Tensor, layers: int) -> torch.Tensor:
    """Vectors that name the token whose code they hold, exactly, also once quantised: float32 [layers, T, values of an entry]."""
    width = LAYOUT.entry.values
    coded = code[None, :, None] + 31 * torch.arange(layers, device=code.device)[:, None, None]
    return 1.0 + ((coded >> (torch.arange(width, device=code.device) % CODE_BITS)) & 1).float()


def token_codes(state_id: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return (state_id.long() + 1) * 65537 + position * 7919


def store(cache: zos.SwaCache, metadata: Any, kept: torch.Tensor) -> None:
    """Write a step's tokens; those that will not be kept write something else."""
    row = metadata.token_row.clamp(min=0).long()
    j = torch.arange(metadata.tokens, device=row.device) - metadata.cu_seqlens_q[row]
    code = token_codes(metadata.token_state_id, metadata.positions)
    values = values_of(torch.where(j < kept[row], code, ~code), LAYOUT.stored_layers)
    torch.ops.zos.swa_ring_store(values, metadata.swa_write_slot, cache.layers(0, LAYOUT.stored_layers))


def expected_window(snapshot: zos.Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """(ring slots, uint8 [stored layers, slots, entry bytes]) of the window before a snapshot's boundary."""
    begin = max(0, snapshot.boundary - GEOMETRY.window)
    positions = torch.arange(begin, snapshot.boundary)
    codes = token_codes(torch.full((len(positions),), snapshot.state_id), positions)
    entries = torch.zeros(LAYOUT.stored_layers, 1, len(positions), 1, LAYOUT.entry.entry_bytes, dtype=torch.uint8)
    torch.ops.zos.swa_ring_store(values_of(codes, LAYOUT.stored_layers), positions - begin, entries)
    return (positions % GEOMETRY.ring).numpy(), entries[:, 0, :, 0].numpy()


def check_window(pool: zos.SnapshotPool, snapshot: zos.Snapshot) -> None:
    """The stored bytes hold every token before the boundary, in its place."""
    rings = pool.read(snapshot).view(LAYOUT.stored_layers, -1)[:, : GEOMETRY.ring * LAYOUT.entry.entry_bytes]
    slots, expected = expected_window(snapshot)
    found = as_array(rings.reshape(LAYOUT.stored_layers, GEOMETRY.ring, -1))[:, slots]
    assert_bitwise_equal(found, expected, f"window of {snapshot}")


@pytest.mark.parametrize("every", [7, 32])
@pytest.mark.parametrize("slots", [1, 256])  # more than all boundaries together
def test_a_loop_runs_on(device: str, every: int, slots: int, seed: int) -> None:
    """Chunks, then captured decode steps with rejections, while the host reads late: whole windows, every boundary counted."""
    rng = np.random.default_rng([seed, every, slots])
    svc, cache = service(device, every), zos.SwaCache(LAYOUT, STATES, device)
    pool = zos.SnapshotPool(svc, cache, slots)
    svc.attach_snapshots(pool)
    taken: list[zos.Snapshot] = []

    def look() -> None:
        for snapshot in pool.poll():
            check_window(pool, snapshot)
            pool.free(snapshot)
            taken.append(snapshot)

    def step(metadata: zos.DecodeMetadata) -> torch.Tensor:
        length = metadata.seqlens_q
        kept = torch.where(length > 0, 1 + metadata.seqlens_k % length.clamp(min=1), 0).to(torch.int32)
        store(cache, metadata, kept)
        return kept

    for state_id in range(ROWS):
        svc.admit(state_id, prompt_end=int(rng.integers(0, 3 * every)), chunk_q=int(rng.integers(0, 20)))
    svc.set_prefill_batch(range(ROWS))
    svc.flush()
    while (svc.table.q_start < svc.table.prompt_end).any():
        prefill = svc.prepare_prefill()
        prefilling = (svc.table.q_start < svc.table.prompt_end)[:ROWS]
        store(cache, prefill, prefill.seqlens_q)
        svc.commit(prefill, torch.where(prefilling, prefill.seqlens_q, 1).to(torch.int32))
        if rng.random() < 0.5:
            look()
    loop = zos.DecodeLoop(svc, step, records=0)
    loop.set_batch(range(ROWS))
    for number in range(40):
        loop.run()
        if rng.random() < 0.4:
            look()
        if number == 20:  # another sequence in the same state
            reached = int(svc.table.q_start[0])
            svc.release(0)
            svc.admit(0)
    settle(svc)
    look()
    lengths = {(state_id, 1): length for state_id, length in enumerate(as_array(svc.table.q_start)[:ROWS].tolist())}
    lengths[0, 3] = lengths[0, 1]
    lengths[0, 1] = reached
    crossed = [(*life, boundary) for life, length in lengths.items() for boundary in range(every, length + 1, every)]
    names = [snapshot[:3] for snapshot in taken]
    assert len(set(names)) == len(names) and set(names) <= set(crossed)
    assert len(names) + pool.skipped == len(crossed)
    assert (pool.skipped == 0) if slots > 1 else (pool.skipped > 0)
    assert [snapshot.number for snapshot in taken] == list(range(1, len(taken) + 1))


def test_a_former_life_is_not_stored(device: str) -> None:
    """Its state was released between commit and snapshot: by then another sequence may write there."""
    svc = service(device)
    pool = zos.SnapshotPool(svc, zos.SwaCache(LAYOUT, STATES, device), 2)
    svc.admit(3, 10)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    svc.commit(metadata, metadata.seqlens_q)
    assert metadata.marks is not None and metadata.marks.tolist() == [14]
    svc.release(3)
    svc.admit(3, 10)
    svc.flush()
    pool.snapshot(metadata)
    settle(svc)
    assert pool.poll() == [] and pool.skipped == 1


def test_a_finished_sequence_is_stored(device: str) -> None:
    """Its next turn begins with the same tokens."""
    svc = service(device)
    pool = zos.SnapshotPool(svc, zos.SwaCache(LAYOUT, STATES, device), 2)
    svc.attach_snapshots(pool)
    svc.admit(3, 10, stop_at=14)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    svc.commit(metadata, metadata.seqlens_q)
    settle(svc)
    assert [snapshot[:4] for snapshot in pool.poll()] == [(3, 1, 14, 16)]


def test_warmup_takes_none(device: str) -> None:
    """A warm-up between a step and its result leaves the pool and the marks of the slot alone."""
    svc = service(device)
    pool = zos.SnapshotPool(svc, zos.SwaCache(LAYOUT, STATES, device), 1)
    svc.admit(3, 10)
    svc.set_batch([3], batch=1)
    metadata = svc.prepare()
    svc.commit(metadata, metadata.seqlens_q)
    svc.attach_snapshots(pool)
    svc.warmup()
    settle(svc)
    assert metadata.marks is not None and metadata.marks.tolist() == [14]
    assert pool.poll() == [] and pool.skipped == 0


def test_a_snapshot_half_seen_is_not_taken() -> None:
    """A CPU that sees the number before the words that go with it must look again, not store a state under another's name."""
    svc = service("cpu")
    pool = zos.SnapshotPool(svc, zos.SwaCache(LAYOUT, STATES, "cpu"), 1)
    svc.attach_snapshots(pool)
    svc.admit(3, 10)
    svc.set_batch([3], batch=1)
    svc.commit(svc.prepare(), torch.tensor([6], dtype=torch.int32))
    pool._slots_host[0, CHECK] ^= 1
    assert pool.poll() == []
    pool._slots_host[0, CHECK] ^= 1
    assert [snapshot.boundary for snapshot in pool.poll()] == [14]


def test_freed_once_and_by_its_owner(device: str) -> None:
    """A slot given back twice would be filled while its next snapshot is being read."""
    svc = service(device, every=1)
    pool = zos.SnapshotPool(svc, zos.SwaCache(LAYOUT, STATES, device), 1)
    svc.attach_snapshots(pool)
    svc.admit(3)
    svc.set_batch([3], batch=1)

    def run() -> None:
        metadata = svc.prepare()
        svc.commit(metadata, metadata.seqlens_q)
        settle(svc)

    run()
    (first,) = pool.poll()
    run()
    assert pool.poll() == [] and pool.skipped == 1
    pool.free(first)
    run()
    (second,) = pool.poll()
    assert (second.slot, second.boundary) == (0, 18)
    for call in (pool.free, pool.read):
        with pytest.raises(ValueError, match=r"boundary=6, .* is not held"):
            call(first)
    run()
    assert pool.skipped == 2
    pool.free(second)
    with pytest.raises(ValueError, match="is not held"):
        pool.free(second)


@pytest.mark.parametrize(
    ("options", "layout", "states", "slots", "message"),
    [
        ({"every": 0}, LAYOUT, STATES, 1, "snapshot_every=0"),
        ({}, zos.StateSlotLayout(zos.RingGeometry(16, 4), 2), STATES, 1, r"cache has rings for .*draft_tokens=4"),
        ({}, LAYOUT, STATES - 1, 1, "num_state_slots=11, fewer than capacity=12"),
        ({}, zos.StateSlotLayout(GEOMETRY, 0, 1), STATES, 1, "stored_layers=0"),
        ({}, LAYOUT, STATES, 0, "num_snapshots=0"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: dict[str, int], layout: zos.StateSlotLayout, states: int, slots: int, message: str
) -> None:
    """Before anything is launched, with the rule and the value."""
    with pytest.raises(ValueError, match=message):
        zos.SnapshotPool(service("cpu", **options), zos.SwaCache(layout, states, "cpu"), slots)


def test_of_another_service() -> None:
    """A pool reads the table of the service that it was made for, whose states its cache holds."""
    svc, other = service("cpu"), service("cpu")
    pool = zos.SnapshotPool(svc, zos.SwaCache(LAYOUT, STATES, "cpu"), 1)
    other.set_batch([], batch=1)
    with pytest.raises(ValueError, match="another MetadataService"):
        other.attach_snapshots(pool)
    with pytest.raises(ValueError, match="another MetadataService"):
        pool.snapshot(other.prepare())


def test_the_host_reads_while_steps_run(device: str) -> None:
    """A thread that reads and frees beside the loop meets no torn state: each window is of the boundary that it is said to be."""
    svc, cache = service(device, every=6), zos.SwaCache(LAYOUT, STATES, device)
    pool = zos.SnapshotPool(svc, cache, 3)
    svc.attach_snapshots(pool)
    for state_id in range(ROWS):
        svc.admit(state_id)
    svc.set_batch(range(ROWS))
    over, read, failures = threading.Event(), [0], []

    def reader() -> None:
        try:
            while not over.is_set():
                for snapshot in pool.poll():
                    check_window(pool, snapshot)
                    pool.free(snapshot)
                    read[0] += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(300):
        metadata = svc.prepare()
        store(cache, metadata, metadata.seqlens_q)
        svc.commit(metadata, metadata.seqlens_q)
    over.set()
    thread.join()
    settle(svc)
    assert not failures, failures
    assert read[0] + len(pool.poll()) + pool.skipped == 300 * ROWS and read[0] > 3
