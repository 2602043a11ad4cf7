"""Test that host-visible mistakes are named before anything is staged or launched, and that buffers never move."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal, poison
from zos.cli.compare import metadata_arrays


def service(device: str = "cpu", **options: Any) -> zos.MetadataService:
    svc = zos.MetadataService(**{"capacity": 16, "max_batch": 4, "device": device, "max_prefill_tokens": 64, **options})
    svc.admit(state_id=1, q_start=10, stop_at=50)
    svc.flush()
    return svc


BAD_CALLS: list[tuple[str, Any, type[Exception], str]] = [
    ("admit in use", lambda s: s.admit(state_id=1), ValueError, "state_id=1 is in use"),
    ("admit id", lambda s: s.admit(state_id=16), IndexError, r"state_id=16 is outside 0 … 15"),
    ("admit negative id", lambda s: s.admit(state_id=-1), IndexError, "state_id=-1"),
    ("admit id type", lambda s: s.admit(state_id=2.0), ValueError, "state_id=2.0 is not a whole number"),
    ("admit id bool", lambda s: s.admit(state_id=True), ValueError, "not a whole number"),
    ("q_start", lambda s: s.admit(state_id=2, q_start=-1), ValueError, "q_start=-1 is outside"),
    ("q_start big", lambda s: s.admit(state_id=2, q_start=2**31), ValueError, "q_start=2147483648"),
    ("valid_start", lambda s: s.admit(state_id=2, q_start=128, swa_valid_start=200), ValueError,
     "swa_valid_start=200 exceeds q_start=128 of state_id 2"),
    ("valid_start negative", lambda s: s.admit(state_id=2, swa_valid_start=-1), ValueError, "swa_valid_start=-1"),
    ("stop_at", lambda s: s.admit(state_id=2, q_start=20, stop_at=20), ValueError, "stop_at=20 must exceed q_start=20"),
    ("stop_at prompt", lambda s: s.admit(state_id=2, prompt_end=30, stop_at=29), ValueError,
     "stop_at=29 must not be below prompt_end=30"),
    ("seqlen_q", lambda s: s.admit(state_id=2, seqlen_q=65), ValueError, r"seqlen_q=65 is outside 0 … 64"),
    ("sum", lambda s: s.admit(state_id=2, q_start=2**31 - 3, seqlen_q=6), ValueError, "q_start \\+ seqlen_q=2147483651"),
    ("chunk", lambda s: s.admit(state_id=2, seqlen_q=9, prompt_end=8), ValueError, "reaches past prompt_end=8"),
    ("chunk_q", lambda s: s.admit(state_id=2, chunk_q=65), ValueError, "chunk_q=65"),
    ("decode_q", lambda s: s.admit(state_id=2, decode_q=7), ValueError, "decode_q=7 is outside 0 … 6"),
    ("tokens", lambda s: s.admit(state_id=2, tokens=[1]), ValueError, "carry_tokens=False"),
    ("set_seqlen_q free", lambda s: s.set_seqlen_q(2, 1), ValueError, "state_id=2 is not in use"),
    ("set_seqlen_q", lambda s: s.set_seqlen_q(1, -1), ValueError, "seqlen_q=-1"),
    ("set_valid_start", lambda s: s.set_valid_start(1, -1), ValueError, "swa_valid_start=-1"),
    ("pause free", lambda s: s.pause(2), ValueError, "state_id=2 is not in use"),
    ("resume free", lambda s: s.resume(2), ValueError, "not in use"),
    ("reset free", lambda s: s.reset(2), ValueError, "not in use"),
    ("reset past stop", lambda s: s.reset(1, prompt_end=51), ValueError, "stop_at=50 must not be below prompt_end=51"),
    ("release free", lambda s: s.release(2), ValueError, "not in use"),
    ("release id", lambda s: s.release(99), IndexError, "state_id=99"),
    ("batch rows", lambda s: s.set_batch([1, 2, 3], batch=2), ValueError, "3 rows, more than batch=2"),
    ("batch size", lambda s: s.set_batch([1], batch=5), ValueError, r"batch=5 is outside 0 … 4"),
    ("batch duplicate", lambda s: s.set_batch([1, 2, 1]), ValueError, "state_id 1 twice"),
    ("batch id", lambda s: s.set_batch([16]), IndexError, "state_id=16"),
    ("batch id -2", lambda s: s.set_batch([-2]), IndexError, "state_id=-2"),
    ("batch id float", lambda s: s.set_batch([-1.0]), ValueError, "state_id=-1.0 is not a whole number"),
    ("batch of a number", lambda s: s.set_batch(5), ValueError, "state_ids=5 is not a sequence"),
    ("admit array", lambda s: s.admit(torch.zeros(2)), ValueError, "is not a whole number"),
    ("commit nothing", lambda s: s.commit(None, torch.zeros(1)), ValueError, "metadata is a NoneType"),
    ("budget low", lambda s: s.set_batch([1, 2], batch=2, max_tokens=5), ValueError, r"max_tokens=5 is outside 6 … 12"),
    ("budget high", lambda s: s.set_batch([1, 2], batch=2, max_tokens=13), ValueError, "max_tokens=13"),
    ("slot", lambda s: s.set_batch([1], slot=1), IndexError, "slot=1 is outside 0 … 0"),
    ("slot -1", lambda s: s.prepare(slot=-1), IndexError, "slot=-1"),
    ("launched", lambda s: s.launched(-1), ValueError, "steps=-1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), [bad[1:] for bad in BAD_CALLS], ids=[bad[0] for bad in BAD_CALLS]
)
def test_bad_call(call: Any, error: type[Exception], message: str) -> None:
    """The call is refused with argument, rule and value, and neither staged nor half applied."""
    svc = service()
    svc.set_batch([1], batch=1)
    before = metadata_arrays(svc.prepare())
    records = svc.table.records.clone()
    with pytest.raises(error, match=message):
        call(svc)
    for name, array in metadata_arrays(svc.prepare()).items():
        assert_bitwise_equal(array, before[name], name)
    assert_bitwise_equal(svc.table.records, records, "records")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"metadata_slots": 0}, "metadata_slots=0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0"),
        ({"token_layout": "ragged"}, "token_layout='ragged' is none of packed, strided"),
        ({"compression_ratios": (2, 2)}, "names a ratio twice"),
        ({"compression_ratios": (0,)}, "ratio=0"),
        ({"compression_ratios": range(1, 18)}, "names 17 rings, more than 16"),
        ({"compression_ratios": (zos.CompressionRing(2, tokens_per_step=3),)}, "for 3 tokens per step, not 6"),
        ({"capacity": (2**31 - 1) // 134 + 1}, r"capacity \* ring=21474"),
        ({"device": "meta"}, "device=meta"),
        ({"device": "banana"}, "device='banana' is no device"),
        ({"device": None}, "device=None is no device"),
        ({"compression_ratios": 2}, "compression_ratios=2 is not a sequence"),
    ],
)
def test_bad_configuration(options: dict[str, Any], message: str) -> None:
    """A service that could produce wrong slots does not come to be."""
    with pytest.raises(ValueError, match=message):
        zos.MetadataService(**{"capacity": 16, "max_batch": 4, "device": "cpu", **options})


def test_strided_has_no_budget() -> None:
    """A row owns its places in the strided layout."""
    with pytest.raises(ValueError, match="no token budget"):
        service(token_layout="strided").set_batch([1], max_tokens=6)


def test_prepare_without_a_batch() -> None:
    """Nothing was asked for."""
    with pytest.raises(ValueError, match="slot=0 has no batch"):
        service().prepare()


def test_slot_numbers_just_fit(device: str) -> None:
    """Capacity * ring just under 2^31: the last state's slots are int32 and right."""
    geometry = zos.RingGeometry(window=128, draft_tokens=5, ring=2**20)
    svc = zos.MetadataService(capacity=2**11 - 1, max_batch=1, geometry=geometry, device=device)
    svc.admit(state_id=2**11 - 2, q_start=2**20 - 6)
    svc.set_batch([2**11 - 2])
    assert svc.prepare().swa_write_slot[5].item() == (2**11 - 2) * 2**20 + 2**20 - 1
    with pytest.raises(ValueError, match="capacity \\* ring"):
        zos.MetadataService(capacity=2**11, max_batch=1, geometry=geometry, device=device)


def test_buffers_never_move(device: str) -> None:
    """A captured graph stays valid because every output keeps its address, and the same shape gives the same object."""
    svc = service(device)
    svc.set_batch([1], batch=2)
    first = svc.prepare()
    addresses = {
        name: getattr(first, name).data_ptr() for name in ("kv_swa_index", "positions", "tickets", "cu_seqlens_q")
    }
    svc.set_batch([1], batch=4)
    second = svc.prepare()
    svc.set_batch([1], batch=2)
    assert svc.prepare() is first
    for name, address in addresses.items():
        assert getattr(second, name).data_ptr() == address


def test_private_metadata_is_private(device: str) -> None:
    """A warm-up leaves table, batches, metadata and counters as they are, and staged edits staged."""
    svc = service(device)
    svc.set_batch([1], batch=2)
    metadata = svc.prepare()
    before, records = metadata_arrays(metadata), svc.table.records.clone()
    svc.set_seqlen_q(1, 3)
    svc.warmup()
    for name, array in metadata_arrays(metadata).items():
        assert_bitwise_equal(array, before[name], name)
    assert_bitwise_equal(svc.table.records, records, "records")
    assert svc.counters() == {"stale": 0, "duplicate": 0, "deferred": 0, "errors": 0}
    assert svc.prepare().seqlens_q.tolist() == [3, 0]


def test_empty_batch(device: str) -> None:
    """B = 0: empty outputs, cu_seqlens_q [0], num_tokens 0 whatever was there before; committing it is nothing."""
    svc = service(device)
    svc.set_batch([1], batch=4)
    poison(svc.prepare())
    svc.set_batch([], batch=0)
    metadata = svc.prepare()
    assert metadata.cu_seqlens_q.tolist() == [0]
    assert metadata.num_tokens.tolist() == [0]
    assert metadata.kv_swa_index.shape == (0, 128)
    svc.commit(metadata, torch.zeros(0, dtype=torch.int32, device=device))
    svc.set_batch([1], batch=1)
    assert svc.prepare().num_tokens.tolist() == [6]


def test_check_names_every_state(device: str) -> None:
    """All states in error at once, each with field, value and rule; the others keep working."""
    svc = service(device)
    for state_id in (2, 3):
        svc.admit(state_id=state_id, q_start=10)
    svc.set_batch([1, 2, 3], batch=3)
    svc.flush()
    svc.table.seqlen_q[2] = 9
    svc.table.swa_valid_start[3] = 11
    poison(svc.slot_metadata(0, 3, 18))
    assert svc.prepare().seqlens_q.tolist() == [6, 0, 0]
    with pytest.raises(zos.DeviceStateError) as caught:
        svc.check()
    assert str(caught.value).splitlines() == [
        "2 state(s) in error",
        "state_id 2: seqlen_q=9 (SEQLEN_Q_RANGE): must be 0 … tokens per step (of a prefill batch: max_prefill_tokens)",
        "state_id 3: swa_valid_start=11 (VALID_START_PAST_Q_START): must not exceed q_start",
    ]


def test_device_seqlen_q_does_not_revive(device: str) -> None:
    """A drafter that writes seqlen_q on the device cannot bring a finished or free state back: liveness is phase."""
    svc = service(device)
    svc.set_batch([1, 4], batch=2)
    svc.release(1)
    svc.flush()
    svc.table.seqlen_q[:] = 6
    assert svc.prepare().seqlens_k.tolist() == [0, 0]


def test_ids_of_any_integer_type() -> None:
    """NumPy and torch scalars are whole numbers too, and a generator is a sequence of ids."""
    svc = service()
    svc.admit(np.int64(3), q_start=torch.tensor(7))
    svc.set_batch((np.int32(i) for i in (3, -1)), batch=2)
    assert svc.prepare().seqlens_k.tolist() == [13, 0]


def test_copies_are_refused() -> None:
    """A copy would share or lose the memory that operators are bound to, and corrupt both."""
    svc = service()
    svc.set_batch([1], batch=1)
    metadata = svc.prepare()
    for original in (svc, metadata):
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                duplicate(original)


def test_default_device_of_torch_does_not_matter() -> None:
    """Engines build models under a default device; the pinned buffers stay on the host."""
    with torch.device("meta"):
        svc = service()
        svc.set_batch([1], batch=1)
        svc.prepare()
        svc.warmup()
    assert svc.prepare().seqlens_k.tolist() == [16]


def test_own_graph_makes_the_batch_unknown(device: str) -> None:
    """After `launched` the host cannot know what was prepared: metadata of either size may be the newest."""
    svc = service(device)
    svc.set_batch([1], batch=1)
    small = svc.prepare()
    svc.set_batch([1], batch=2)
    svc.prepare()
    svc.flush()
    small.launch_prepare()  # what a replay of a graph captured with one row does
    svc.launched(1)
    svc.commit(small, torch.tensor([2], dtype=torch.int32, device=device))
    svc.check()
    assert svc.table.q_start[1].item() == 12
