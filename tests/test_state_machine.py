"""Test that any order of calls leaves service and oracle alike: tables, records, batches, queues, counters and bounds.

ZOS_FUZZ_EXAMPLES=2000 (`make fuzz`) runs for longer, with fresh examples each time.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import zos
from tests.twins import Step, Twins
from zos.table import COLUMNS

EXAMPLES = int(os.environ.get("ZOS_FUZZ_EXAMPLES", "0"))
CAPACITY, MAX_BATCH, SLOTS, RECORDS = 5, 4, 2, 32  # so few states that calls meet
GEOMETRIES = (zos.RingGeometry(8, 3), zos.RingGeometry(8, 3, 11), zos.RingGeometry(1, 0), zos.RingGeometry(5, 7, 40))
STATE = st.integers(0, CAPACITY - 1)
SLOT = st.integers(0, SLOTS - 1)


class ServiceMachine(RuleBasedStateMachine):
    """Calls in any order; each is made of service and oracle, and everything is compared after each."""

    device = "cpu"

    @initialize(
        geometry=st.sampled_from(GEOMETRIES),
        layout=st.sampled_from(["packed", "strided"]),
        queue=st.booleans(),
        snapshot_every=st.sampled_from([0, 1, 7]),
    )
    def begin(self, geometry: zos.RingGeometry, layout: str, queue: bool, snapshot_every: int) -> None:
        """Make the two."""
        self.twins = Twins(
            self.device, capacity=CAPACITY, max_batch=MAX_BATCH, slots=SLOTS, records=RECORDS, queue=queue, geometry=geometry,
            token_layout=layout, max_prefill_tokens=40, snapshot_every=snapshot_every,
        )  # fmt: skip
        self.svc, self.queue, self.step_tokens = self.twins.svc, queue, geometry.tokens_per_step
        self.prepared: dict[tuple[int, bool], Step] = {}  # by slot and kind: the last one, whose tickets still stand
        self.unread = 0
        layout = zos.StateSlotLayout(geometry, stored_layers=1)
        self.folder = tempfile.TemporaryDirectory()
        self.cache = zos.SwaCache(layout, CAPACITY, self.device)
        self.store = zos.LocalStateStore(self.svc, self.cache, self.folder.name)
        self.stored: dict[str, tuple[int, int, torch.Tensor]] = {}  # by key: boundary, valid start, bytes
        for state_id in range(3):  # so that most calls meet a sequence in a batch
            self.twins.edit("admit", state_id, q_start=20 * state_id, prompt_end=25 if state_id == 1 else 0, chunk_q=9)
        self.twins.set_batch([0, -1, 2, 1])
        self.twins.set_prefill_batch([1, 0])

    def _some(self, data: Any, in_use: bool) -> int | None:
        states = [state_id for state_id in range(CAPACITY) if self.svc.in_use(state_id) == in_use]
        return data.draw(st.sampled_from(states)) if states else None

    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        """A sequence from anywhere: cold, far on, with a prompt left, about to stop."""
        state_id = self._some(data, in_use=False)
        if state_id is None:
            return
        q_start = data.draw(st.integers(0, 60))
        prompt_end = data.draw(st.sampled_from([0, q_start, q_start + 5, q_start + 90]))
        least_stop = max(q_start + 1, prompt_end)
        self.twins.edit(
            "admit",
            state_id,
            q_start=q_start,
            swa_valid_start=data.draw(st.integers(0, q_start)),
            prompt_end=prompt_end,
            chunk_q=data.draw(st.integers(0, 40)),
            decode_q=data.draw(st.integers(0, self.step_tokens)),
            stop_at=data.draw(st.sampled_from([0, least_stop, least_stop + 9])),
        )

    @rule(data=st.data(), method=st.sampled_from(["release", "pause", "resume"]))
    def act(self, data: Any, method: str) -> None:
        """What takes a state and nothing else."""
        state_id = self._some(data, in_use=True)
        if state_id is not None:
            self.twins.edit(method, state_id)

    @rule(data=st.data(), prompt_end=st.integers(0, 60))
    def reset(self, data: Any, prompt_end: int) -> None:
        """Start over."""
        state_id = self._some(data, in_use=True)
        if state_id is not None and int(self.svc.table.records[state_id, COLUMNS["stop_at"]]) == 0:
            self.twins.edit("reset", state_id, prompt_end=prompt_end)

    @rule(data=st.data())
    def lengthen(self, data: Any) -> None:
        """The next step's length, by the host."""
        state_id = self._some(data, in_use=True)
        if state_id is not None:
            self.twins.edit("set_seqlen_q", state_id, data.draw(st.integers(0, self.step_tokens)))

    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        """A copy in a free state."""
        source, target = self._some(data, in_use=True), self._some(data, in_use=False)
        if source is not None and target is not None:
            self.twins.edit("fork", source, target)

    @rule(data=st.data(), key=st.sampled_from("ab"), back=st.integers(-1, 9))
    def put(self, data: Any, key: str, back: int) -> None:
        """A state as it was some tokens ago: stored where its window is all there, else refused by name."""
        state_id = self._some(data, in_use=True)
        if state_id is None:
            return
        self.svc.flush()
        its, geometry = self.twins.oracle.records[state_id], self.svc.geometry
        boundary = its["q_start"] - back
        alive = its["phase"] in (zos.Phase.LIVE, zos.Phase.PAUSED, zos.Phase.FINISHED)
        whole = (
            its["head"] - boundary <= geometry.ring - geometry.window
        )  # nothing of the window before it is overwritten
        sound = alive and whole and max(1, its["swa_valid_start"]) <= boundary <= its["q_start"]
        content = torch.randint(0, 256, (self.cache.layout.stored_bytes,)).to(torch.uint8)
        self.cache.stored(state_id).copy_(content)
        if sound:
            self.store.put(key, state_id, boundary)
            self.stored[key] = boundary, its["swa_valid_start"], content
        else:
            with pytest.raises(zos.StoreError):
                self.store.put(key, state_id, boundary)

    @rule(data=st.data(), key=st.sampled_from("abc"), ahead=st.integers(-1, 40))
    def get(self, data: Any, key: str, ahead: int) -> None:
        """What was put last, byte for byte, in a free state; refused where nothing was, or no token of the prompt is left."""
        state_id = self._some(data, in_use=False)
        if state_id is None:
            return
        boundary, valid_start, content = self.stored.get(key, (0, 0, torch.zeros(0)))
        prompt_end = boundary + ahead if data.draw(st.booleans()) else 0
        if key not in self.stored or 0 < prompt_end <= boundary:
            with pytest.raises(zos.StoreError):
                self.store.get(key, state_id, prompt_end=prompt_end)
            return
        assert self.store.get(key, state_id, prompt_end=prompt_end) == state_id
        columns = {
            "q_start": boundary,
            "swa_valid_start": valid_start,
            "kv_cached_end": boundary,
            "prompt_end": prompt_end,
        }
        self.twins.oracle.admit(state_id, **columns)
        assert torch.equal(self.cache.stored(state_id).cpu(), content)

    @rule(state_id=STATE, seqlen_q=st.integers(-2, 50))
    def write_on_the_device(self, state_id: int, seqlen_q: int) -> None:
        """The caller's device code writes seqlen_q, sense or nonsense."""
        self.svc.flush()
        records = self.twins.oracle.records_array()
        records[state_id, COLUMNS["seqlen_q"]] = seqlen_q
        knows = self.twins._host_knows
        self.twins.load(records)
        self.twins._host_knows = knows  # a length moves no sequence by itself

    @rule(data=st.data(), seqlen_q=st.integers(0, 1))
    def fail_once(self, data: Any, seqlen_q: int) -> None:
        """The launch of a flush fails: nothing is lost, and the next one applies it."""
        state_id = self._some(data, in_use=True)
        if state_id is None:
            return
        self.svc.flush()
        self.twins.edit("set_seqlen_q", state_id, seqlen_q)
        launch = self.svc._edits.launch

        def fails() -> None:
            raise ArithmeticError("planned")

        self.svc._edits.launch = fails
        with pytest.raises(ArithmeticError, match="planned"):
            self.svc.flush()
        self.svc._edits.launch = launch

    @rule(
        rows=st.lists(st.one_of(STATE, st.just(-1)), min_size=1, max_size=MAX_BATCH),
        slot=SLOT,
        budget=st.booleans(),
        bucket=st.sampled_from([0, MAX_BATCH]),
    )
    def set_batch(self, rows: list[int], slot: int, budget: bool, bucket: int) -> None:
        """Any states, used or not, in any order, in a bucket of their number or a larger one."""
        ids = [state_id for n, state_id in enumerate(rows) if state_id == -1 or state_id not in rows[:n]]
        places, packed = max(bucket, len(ids)), self.svc.token_layout == "packed"
        tokens = max(self.step_tokens, places * self.step_tokens // 2) if budget and packed else None
        self.twins.set_batch(ids, places, slot=slot, max_tokens=tokens)
        self.prepared.pop((slot, False), None)

    @rule(rows=st.lists(STATE, min_size=1, max_size=MAX_BATCH, unique=True), slot=SLOT)
    def set_prefill_batch(self, rows: list[int], slot: int) -> None:
        """As set_batch."""
        self.twins.set_prefill_batch(rows, slot)
        self.prepared.pop((slot, True), None)

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), slot=SLOT)
    def set_ready(self, data: Any, slot: int) -> None:
        """A sequence waits."""
        state_id = self._some(data, in_use=True)
        waiting = [entry[0] for other in self.twins.slots for entry in other.queue or []]
        if state_id is not None and state_id not in waiting:
            self.twins.set_ready([state_id], slot)

    @rule(slot=SLOT, prefill=st.booleans())
    def prepare(self, slot: int, prefill: bool) -> None:
        """Prepare what is set; again gives the same."""
        if (self.twins._prefill_batches if prefill else self.twins._batches)[slot]:
            self.prepared[slot, prefill] = self.twins.prepare(slot, prefill)

    @rule(data=st.data(), times=st.integers(1, 2), slot=SLOT, prefill=st.booleans(), anew=st.booleans())
    def commit(self, data: Any, times: int, slot: int, prefill: bool, anew: bool) -> None:
        """A result, right or wrong, once or twice, whatever has happened since the prepare."""
        if self.unread >= RECORDS - 2:
            self.read(slot)
        if anew or (slot, prefill) not in self.prepared:
            self.prepare(slot, prefill)
        step = self.prepared.get((slot, prefill))
        if step is None:
            return
        lengths = [max(ticket[3], 0) for ticket in step.tickets]
        kept = [
            data.draw(st.one_of(st.integers(1, max(1, length)), st.just(0), st.integers(-3, 60))) for length in lengths
        ]
        finished = data.draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept)))
        for _ in range(times):
            self.twins.commit(step, kept, np.array(finished) if data.draw(st.booleans()) else None)
            self.unread += 1

    @rule(slot=SLOT)
    def read(self, slot: int) -> None:
        """Read the mailbox; the other slot's may wait."""
        self.twins.read(slot)
        self.unread = max(other.unread for other in self.twins.slots)

    @invariant()
    def alike(self) -> None:
        """Everything is the same on both sides."""
        if hasattr(self, "twins"):
            self.twins.compare()

    def teardown(self) -> None:
        """At the end everything is read, and the bounds are exact."""
        if hasattr(self, "twins"):
            self.store.close()
            self.folder.cleanup()
            for slot in range(SLOTS):
                self.twins.read(slot)
            assert torch.equal(self.svc.table.records.cpu(), torch.from_numpy(self.twins.oracle.records_array()))


TestService = ServiceMachine.TestCase
TestService.settings = settings(
    max_examples=EXAMPLES or 40,
    stateful_step_count=50,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class ServiceMachineOnAGpu(ServiceMachine):
    """The same on a device."""

    device = "cuda"


@pytest.mark.gpu
class TestServiceOnAGpu(ServiceMachineOnAGpu.TestCase):  # type: ignore[misc, name-defined]
    """Fewer examples: each comparison waits for the device."""

    settings = settings(TestService.settings, max_examples=EXAMPLES or 10)
