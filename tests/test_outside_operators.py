"""Test that operators take any tensors or refuse them by name: of other shapes, dtypes, strides and devices, with any contents.

Every tensor lies between bytes that are watched: what is written outside shows, and so does a change of an input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import zos
from tests.outside import NAMED, WHOLE, fuzz
from tests.reference import as_array, edit_operands
from zos.mailbox import Mailbox

GUARD_BYTES = 4096  # before and behind each tensor
GUARD = 0xA5
ALIGNED = 64
GEOMETRY = zos.RingGeometry(4, 1)  # R = 6, Q = 2
STATES, ROWS, CHUNK, WIDTH, HEADS = 5, 3, 12, 32, 2
OPERATORS = (
    *("prepare_v4_decode_metadata", "prepare_v4_prefill_metadata", "prefill_tail", "view_block", "commit"),
    *("apply_table_edits", "publish_results", "swa_ring_store", "swa_ring_load", "swa_decode_attention"),
    "swa_ring_snapshot",
)
# What nobody but the library writes, and kernels therefore trust. A CPU walks as many entries of a queue as batch_state says.
TRUSTED: dict[str, dict[str, set[str]]] = {
    "cpu": {"commit": {"batch_state"}},
    "cuda": {
        "prefill_tail": {"tickets", "batch_cu_seqlens_q"},
        "commit": {"batch_state", "results_state"},
        "apply_table_edits": {"edits", "batch_states", "applied"},
        "publish_results": {"results_state", "results"},
        "swa_ring_snapshot": {"marks", "slots", "taken", "plan", "progress"},
    },
}
Arguments = dict[str, Any]


def arguments_of(name: str) -> list[Any]:
    return list(getattr(torch.ops.zos, name).default._schema.arguments)


def valid(name: str, device: str) -> Arguments:
    """Arguments that an operator takes, by name."""
    svc = zos.MetadataService(STATES, ROWS, GEOMETRY, device, CHUNK, carry_tokens=True, snapshot_every=4)
    for state_id in range(4):
        svc.admit(state_id, q_start=8 * state_id, prompt_end=9 if state_id == 1 else 0)
    svc.set_batch([3, -1, 2], batch=ROWS)
    svc.set_prefill_batch([1, 3], batch=ROWS)
    decode, prefill = svc.prepare(), svc.prepare_prefill(full_index=True, tail=True)
    ring: Arguments = {
        "values": torch.randn(ROWS, WIDTH, device=device),
        "write_slot": torch.arange(ROWS, device=device),
        "swa_cache": torch.zeros(STATES, GEOMETRY.ring, 1, WIDTH + WIDTH // 32, dtype=torch.uint8, device=device),
        "cast_back": torch.zeros(ROWS, WIDTH, device=device),
        "load_plan": prefill.swa_load_plan,
        "out": torch.zeros(ROWS * GEOMETRY.window, WIDTH, device=device),
    }
    table: Arguments = {
        "records": svc.table.records,
        "token_ids": svc.table.token_ids,
        "tickets": decode.tickets,
        "counters": torch.zeros(4, dtype=torch.int64, device=device),
        "window": GEOMETRY.window,
        "ring": GEOMETRY.ring,
        "tokens_per_step": GEOMETRY.tokens_per_step,
        "max_prefill_tokens": CHUNK,
        "snapshot_every": 4,
        "num_kept": torch.ones(ROWS, dtype=torch.int32, device=device),
    }
    step_tokens = torch.ones(ROWS, GEOMETRY.tokens_per_step, dtype=torch.int64, device=device)
    mailbox = Mailbox(4, ROWS, GEOMETRY.tokens_per_step, True, svc.device, 0)
    results: Arguments = {
        "results": mailbox.results,
        "results_state": mailbox.results_state,
        "mailbox": torch.zeros(4, 8 + mailbox.results.shape[1], dtype=torch.int32, device=device),
    }
    count, state_bytes = 2, 64

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    given: dict[str, Arguments] = {
        "prepare_v4_decode_metadata": dict(decode.operands),
        "prepare_v4_prefill_metadata": dict(prefill.operands),
        "prefill_tail": {
            **table,
            "tickets": prefill.tickets,
            "batch_cu_seqlens_q": prefill.cu_seqlens_q,
            **vars(prefill.tail or 0),
        },
        "view_block": {**table, **vars(decode.block_view or 0)},
        "commit": {
            **table,
            **results,
            "finished": zeros(ROWS, dtype=torch.bool),
            "next_tokens": step_tokens,
            "kept_tokens": step_tokens,
            "batch": decode.state_ids,
            "batch_state": zeros(8),
            "ready": torch.full((4, 2), -1, dtype=torch.int32, device=device),
            "prefill": False,
            "marks": zeros(ROWS, dtype=torch.int32),
        },
        "apply_table_edits": {
            **table,
            **dict(
                zip(
                    ("batches", "edits", "batch_states", "ready", "applied", "applied_on_host"),
                    edit_operands([[3, 2, 1]], [], device),
                    strict=False,
                )
            ),
        },
        "publish_results": results,
        "swa_ring_store": ring,
        "swa_ring_load": {**ring, "window": GEOMETRY.window},
        "swa_decode_attention": {
            **ring,
            "q": torch.randn(ROWS, HEADS, WIDTH, device=device),
            "kv_swa_index": decode.kv_swa_index[:ROWS],
            "swa_len": decode.swa_len[:ROWS],
            "sink": torch.zeros(HEADS, device=device),
            "out": torch.zeros(ROWS, HEADS, WIDTH, device=device),
            "lse": torch.zeros(ROWS, HEADS, device=device),
            "softmax_scale": 0.1,
            "tokens_per_step": 2,
        },
        "swa_ring_snapshot": {
            **table,
            "marks": torch.tensor([8, -1, 16], dtype=torch.int32, device=device),
            "states": zeros(STATES, state_bytes, dtype=torch.uint8),
            "snapshots": zeros(count, state_bytes, dtype=torch.uint8),
            "slots": zeros(count, 8),
            "taken": zeros(count),
            "plan": zeros(count, 6),
            "progress": zeros(4),
            "skipped": zeros(1),
            "overshoot": 2,
        },
    }
    return {argument.name: given[name][argument.name] for argument in arguments_of(name)}


class Guarded:
    """A tensor in memory of its own, bytes of a known value before and behind it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        size = tensor.numel() * tensor.element_size()
        padded = -(-size // ALIGNED) * ALIGNED
        self._memory = torch.full((2 * GUARD_BYTES + padded,), GUARD, dtype=torch.uint8, device=tensor.device)
        self.tensor = self._memory[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype).view(tensor.shape)
        self.tensor.copy_(tensor)
        self._size = size
        self.remember()

    def remember(self) -> None:
        """What it holds now is what it must hold still, if nobody may write to it."""
        self._before = self._memory.clone()

    def check(self, written: bool) -> None:
        """Nothing outside has changed, and inside only what may be written."""
        inside = slice(GUARD_BYTES, GUARD_BYTES + self._size if written else GUARD_BYTES)
        now, before = as_array(self._memory).copy(), as_array(self._before)
        now[inside] = before[inside]
        wrong = np.flatnonzero(now != before)
        assert not len(wrong), f"byte {wrong[0] - GUARD_BYTES} of {self.name} ({self._size} bytes) has changed"


def call(name: str, arguments: Arguments) -> str | None:
    """Run an operator; what it says if it refuses by name. Torch's dispatcher has names of its own."""
    try:
        getattr(torch.ops.zos, name)(*arguments.values())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except NAMED as error:
        assert str(error)
        return str(error)
    except NotImplementedError as error:  # no implementation for sparse or meta tensors
        assert f"zos::{name}" in str(error)
        return str(error)
    except RuntimeError as error:  # an argument that the schema does not allow
        assert str(error).startswith(f"zos::{name}() "), error
        return str(error)
    return None


def other_tensor(data: Any, tensor: torch.Tensor) -> Any:
    """The tensor in another form, or something else."""
    ways: list[Any] = [
        lambda: tensor[:-1] if tensor.dim() else tensor,
        lambda: tensor[:0] if tensor.dim() else tensor,
        lambda: tensor[..., :-1] if tensor.dim() else tensor,
        lambda: tensor[..., 1:] if tensor.dim() else tensor,
        lambda: tensor[::2] if tensor.dim() else tensor,
        lambda: tensor.unsqueeze(0),
        lambda: tensor.unsqueeze(-1),
        lambda: tensor.flatten(),
        lambda: tensor.reshape(-1)[:1].squeeze() if tensor.numel() else tensor,
        lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
        lambda: tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor,
        lambda: tensor[:1].expand(tensor.shape) if tensor.dim() else tensor,
        lambda: torch.stack([tensor, tensor], -1)[..., 0],
        lambda: tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape),
        lambda: tensor.to(data.draw(st.sampled_from(DTYPES))),
        lambda: tensor.to("meta"),
        lambda: tensor.to_sparse() if tensor.dim() and tensor.dtype is not torch.bool else tensor,
        lambda: None,
        lambda: tensor.tolist(),
        lambda: data.draw(st.sampled_from(["x", 1, 2.5, [], object()])),
        lambda: tensor.float().requires_grad_(),
        lambda: torch.nn.Parameter(tensor, requires_grad=False),
    ]
    return data.draw(st.sampled_from(ways))()


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64),
)


@pytest.mark.parametrize("device", ["cpu"])  # what a check lets through that it should not would fault on a GPU
def test_any_form(device: str) -> None:
    """A tensor or number of another form is named, and nothing is written; what is taken writes nothing but outputs."""
    arguments = {name: valid(name, device) for name in OPERATORS}

    def check(name: str, data: Any) -> None:
        given = dict(arguments[name])
        held = {key: Guarded(key, value) for key, value in given.items() if isinstance(value, torch.Tensor)}
        given.update({key: guarded.tensor for key, guarded in held.items()})
        for key in data.draw(st.lists(st.sampled_from(list(given)), min_size=1, max_size=2, unique=True)):
            if isinstance(given[key], torch.Tensor):
                given[key] = other_tensor(data, given[key])
            elif isinstance(given[key], list):
                given[key] = data.draw(st.lists(st.sampled_from(WHOLE), max_size=6))
            else:
                given[key] = data.draw(st.sampled_from([*WHOLE, 2**31 - 1, 1.5, None, "x", float("nan"), True]))
        refused = call(name, given)
        outputs = {argument.name for argument in arguments_of(name) if argument.is_write}
        for key, guarded in held.items():
            guarded.check(written=refused is None and key in outputs)

    fuzz(check, 1500, st.sampled_from(OPERATORS), st.data())


def any_contents(data: Any, tensor: torch.Tensor) -> None:
    """Fill a tensor with anything: edges of its type, small numbers, what was there."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    array = as_array(tensor).copy() if tensor.dtype is not torch.bfloat16 else None
    if array is None or array.dtype == bool:
        return
    if array.dtype.kind == "f":
        values = rng.choice([0, 1, -1, np.nan, np.inf, -np.inf, 3e38, 1e-45, 448, 449], array.shape)
    else:
        info = np.iinfo(array.dtype)
        edges = [info.min, info.min + 1, info.max, info.max - 1, info.max - 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 30, 31]
        values = rng.choice(np.array([*edges, *edges[5:]], array.dtype), array.shape)
    share = data.draw(st.sampled_from([0.05, 0.3, 1]))
    values = np.where(rng.random(array.shape) < share, values, array).astype(array.dtype)
    tensor.copy_(torch.from_numpy(values))


def test_any_contents(device: str) -> None:
    """Whatever the device's memory holds: nothing is written but outputs, nothing outside of them, and the operator ends."""
    # The attention kernel takes other sizes: test_decode_attention.py has any index for both devices.
    operators = [name for name in OPERATORS if device == "cpu" or name != "swa_decode_attention"]
    arguments = {name: valid(name, device) for name in operators}

    def check(name: str, data: Any) -> None:
        given = dict(arguments[name])
        held = {key: Guarded(key, value) for key, value in given.items() if isinstance(value, torch.Tensor)}
        given.update({key: guarded.tensor for key, guarded in held.items()})
        foreign = [key for key in held if key not in TRUSTED[device].get(name, ())]
        for key in data.draw(st.lists(st.sampled_from(foreign), min_size=1, unique=True)):
            any_contents(data, held[key].tensor)
            held[key].remember()
        assert call(name, given) is None
        outputs = {argument.name for argument in arguments_of(name) if argument.is_write}
        for key, guarded in held.items():
            guarded.check(written=key in outputs)

    fuzz(check, 1000, st.sampled_from(operators), st.data())
