"""Test that any argument at all of any public call is taken or refused by name, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import zos
from tests.outside import NAMED, NASTY, anything, fuzz

LONGEST_MESSAGE = 2000
GEOMETRY = zos.RingGeometry(4, 1)

CALLS: dict[str, tuple[str, ...]] = {  # method -> its parameters
    "admit": (
        *("state_id", "q_start", "seqlen_q", "swa_valid_start", "stop_at", "prompt_end", "chunk_q", "decode_q"),
        *("kv_cached_end", "tokens", "prefix_hit"),
    ),
    "check_admission": ("q_start", "stop_at", "tokens", "unknown"),
    "fork": ("src", "dst"),
    "set_seqlen_q": ("state_id", "seqlen_q"),
    "set_valid_start": ("state_id", "swa_valid_start"),
    "pause": ("state_id",),
    "resume": ("state_id",),
    "reset": ("state_id", "prompt_end"),
    "release": ("state_id",),
    "in_use": ("state_id",),
    "set_batch": ("state_ids", "batch", "max_tokens", "slot"),
    "set_prefill_batch": ("state_ids", "batch", "slot"),
    "set_ready": ("state_ids", "slot"),
    "bounds": ("state_ids",),
    "known_batch": ("slot",),
    "ready_room": ("slot",),
    "slot_steps_launched": ("slot",),
    "lives_on": ("state_id", "step", "slot"),
    "poll": ("slot",),
    "wait": ("step", "slot", "timeout_s"),
    "drain": ("slot", "timeout_s"),
    "prepare": ("slot",),
    "prepare_prefill": ("slot", "full_index", "tail"),
    "commit": ("metadata", "num_kept", "finished", "next_tokens", "kept_tokens"),
    "view_block": ("metadata", "num_kept"),
    "attach_snapshots": ("pool",),
}
SMALL = st.integers(0, 7)
SANE: dict[str, st.SearchStrategy[Any]] = {  # values that a call would take, more or less; of other parameters SMALL
    "state_ids": st.lists(SMALL, max_size=4),
    "tokens": st.lists(SMALL, max_size=2),
    "slot": st.integers(0, 1),
    **dict.fromkeys(("full_index", "tail", "causal", "overlap", "carry_tokens"), st.booleans()),
    **dict.fromkeys(("finished", "next_tokens", "kept_tokens", "max_tokens"), st.none()),
    "num_kept": st.just(torch.ones(2, dtype=torch.int32)),
    "prefix_hit": st.none() | SMALL,
    "unknown": st.nothing(),
    "device": st.just("cpu"),
    "token_layout": st.sampled_from(zos.service.TOKEN_LAYOUTS),
    "compression_ratios": st.lists(st.integers(1, 4), max_size=3, unique=True),
    "slab": st.none(),
}


def some_arguments(data: Any, parameters: tuple[str, ...]) -> dict[str, Any]:
    """Values of some parameters: one of them anything, any other anything or sane."""
    chosen = data.draw(st.lists(st.sampled_from(parameters), min_size=1, unique=True))
    wild = anything()
    return {
        name: data.draw(wild if number == 0 or not data.draw(st.integers(0, 5)) else SANE.get(name, SMALL))
        for number, name in enumerate(chosen)
    }


def in_force(svc: zos.MetadataService) -> tuple[Any, ...]:
    """What a refused call must leave as it is, on the host and on the device."""
    slots = [(slot.batch, slot.tokens, slot.prefill_batch, slot.rows.tolist()) for slot in svc._slots]
    return (
        svc.table.records.tolist(),
        svc._batches.tolist(),
        len(svc._edits._edits),
        copy.copy(svc._stop_at),
        list(svc._lives),
        slots,
        [list(slot.waiting) for slot in svc._slots],
    )


def refused(call: Callable[[], Any]) -> bool:
    """Whether a call is refused by name."""
    try:
        call()
    except NAMED as error:
        assert 0 < len(str(error)) < LONGEST_MESSAGE, f"{type(error).__name__} says nothing, or too much"
        return True
    return False


def test_any_argument(device: str) -> None:
    """A call with nonsense names it and stages nothing; whatever was taken, a batch of others is prepared and committed."""

    def made() -> zos.MetadataService:
        svc = zos.MetadataService(8, 4, GEOMETRY, device, 16, carry_tokens=True, metadata_slots=2)
        svc.attach_mailbox()
        for state_id in (0, 1):
            svc.admit(state_id, q_start=10)
        svc.set_batch([0, 1], batch=2)
        svc.set_prefill_batch([0])
        svc.flush()
        return svc

    for name, parameters in CALLS.items():
        svc = made()
        needed = {
            "state_id": 2 if name == "admit" else 0,
            "src": 0,
            "dst": 2,
            "state_ids": [0],
            "step": 0,
            "seqlen_q": 1,
        }
        needed |= {
            "swa_valid_start": 0,
            "metadata": svc.prepare(),
            "num_kept": torch.ones(2, dtype=torch.int32).to(device),
        }
        for parameter, value in itertools.product(parameters, NASTY):
            given = {key: needed[key] for key in parameters if key in needed and name != "check_admission"}
            before, call = in_force(svc), functools.partial(getattr(svc, name), **{**given, parameter: value})
            if not refused(call):
                svc = made()
                needed["metadata"] = svc.prepare()
            elif not name.startswith("prepare"):
                assert in_force(svc) == before

    def check(name: str, data: Any) -> None:
        svc = made()
        arguments = some_arguments(data, CALLS[name])
        if "slot" in arguments and data.draw(st.booleans()):
            del arguments["slot"]
        if name in ("commit", "view_block") and data.draw(st.integers(0, 3)):
            arguments["metadata"] = svc.prepare()
        before = in_force(svc)
        if refused(lambda: getattr(svc, name)(**arguments)):
            if not name.startswith("prepare"):  # which flushes what was staged before
                assert in_force(svc) == before
            return
        for state_id in range(2, 8):
            if svc.in_use(state_id):
                svc.release(state_id)
        for state_id in (0, 1):
            if not svc.in_use(state_id):
                svc.admit(state_id, q_start=10)
            svc.reset(state_id)
        svc.set_batch([0, 1], batch=2)
        metadata = svc.prepare()
        svc.commit(metadata, metadata.seqlens_q)
        svc.drain()
        assert metadata.positions.tolist() == [0, 1, 0, 1] and svc.table.q_start[:2].tolist() == [2, 2]

    fuzz(check, 1000, st.sampled_from(list(CALLS)), st.data())


def test_a_wait_that_would_never_end(device: str) -> None:
    """No time is ever past NaN: a record that does not come would be waited for without end."""
    svc = zos.MetadataService(1, 1, GEOMETRY, device)
    svc.attach_mailbox()
    for timeout_s in (math.nan, -1.0, "1", None, True):
        with pytest.raises(ValueError, match="timeout_s="):
            svc.wait(0, timeout_s=timeout_s)  # type: ignore[arg-type]


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "RingGeometry": zos.RingGeometry,
    "CompressionRing": zos.CompressionRing,
    "StateSlotLayout": lambda **options: zos.StateSlotLayout(GEOMETRY, **options),
    "StateSlotAllocator": zos.StateSlotAllocator,
    "MetadataService": lambda **options: zos.MetadataService(**{"capacity": 4, "max_batch": 2, **options}),
    "SwaCache": lambda **options: zos.SwaCache(
        **{"layout": zos.StateSlotLayout(GEOMETRY, stored_layers=1), "num_state_slots": 2, **options}
    ),
    "plan_bounded_replay": zos.plan_bounded_replay,
}
PARAMETERS: dict[str, tuple[str, ...]] = {
    "RingGeometry": ("window", "draft_tokens", "ring", "causal"),
    "CompressionRing": ("ratio", "tokens_per_step", "overlap", "entries"),
    "StateSlotLayout": ("stored_layers", "dropped_layers", "draft_layers"),
    "StateSlotAllocator": ("state_ids",),
    "MetadataService": (
        *("capacity", "max_batch", "token_layout", "device", "compression_ratios", "metadata_slots", "snapshot_every"),
        *("max_prefill_tokens", "carry_tokens"),
    ),
    "SwaCache": ("num_state_slots", "slab", "slot_pitch", "device"),
    "plan_bounded_replay": ("prefix_hit", "prompt_end", "window"),
}


def test_any_size() -> None:
    """What is made with nonsense is refused by name, and not by an allocation that fails or a number that wraps."""

    def make(name: str, arguments: dict[str, Any]) -> None:
        if name in ("MetadataService", "SwaCache"):
            arguments = {"device": "cpu", **arguments}
        refused(lambda: CONSTRUCTORS[name](**arguments))

    def check(name: str, data: Any) -> None:
        make(name, some_arguments(data, PARAMETERS[name]))

    for name, parameters in PARAMETERS.items():
        for parameter, value in itertools.product(parameters, NASTY):
            make(name, {parameter: value})

    fuzz(check, 600, st.sampled_from(list(CONSTRUCTORS)), st.data())
