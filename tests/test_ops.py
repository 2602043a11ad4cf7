"""Test that the torch operators declare what they change, work when compiled, and refuse bad arguments before a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal, edit_operands
from zos.edits import BatchEdit, Edit

PREPARE = torch.ops.zos.prepare_v4_decode_metadata.default
POSITIONAL = [argument.name for argument in PREPARE._schema.arguments]
OUTPUTS = [argument.name for argument in PREPARE._schema.arguments if argument.is_write]


def service(device: str, **options: Any) -> zos.MetadataService:
    """Make a service with state 3 at position 1000 and state 1 at 20 (4 tokens)."""
    svc = zos.MetadataService(capacity=8, max_batch=4, device=device, **options)
    svc.admit(state_id=3, q_start=1000, seqlen_q=6)
    svc.admit(state_id=1, q_start=20, seqlen_q=4)
    svc.flush()
    return svc


def prepare_operands(svc: zos.MetadataService, batch: int = 4) -> dict[str, Any]:
    """Return fresh arguments for a batch of states 3, -1, 1, -1."""
    svc.set_batch([3, -1, 1], batch=batch)
    operands = svc.prepare().operands
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in operands.items()}


def positional(operands: dict[str, Any]) -> list[Any]:
    return [operands[name] for name in POSITIONAL]


@pytest.mark.parametrize("carry_tokens", [False, True])
def test_opcheck_prepare(device: str, carry_tokens: bool) -> None:
    """Schema, fake implementation and functionalisation agree with what the operator does."""
    operands = prepare_operands(service(device, carry_tokens=carry_tokens))
    torch.library.opcheck(PREPARE, tuple(positional(operands)))


def test_opcheck_commit_and_edits(device: str) -> None:
    """The same for the operators that change the table and tell of it."""
    svc = service(device, carry_tokens=True)
    operands = prepare_operands(svc)
    kept = torch.tensor([2, 0, 1, 0], dtype=torch.int32, device=device)
    tokens = torch.arange(24, device=device).reshape(4, 6)
    table = (operands["records"], operands["token_ids"])
    torch.library.opcheck(
        torch.ops.zos.commit.default,
        (*table, operands["tickets"], kept, kept > 1, tokens, operands["counters"], 6, 8192),
    )
    rows = [[3, Edit.SET_SEQLEN_Q, 4], [3, Edit.APPEND_READY, 1, 0]]
    others = edit_operands(rows, [[0, BatchEdit.SET_BATCH, 80, 4, -1], [1, BatchEdit.SET_APPENDED, 1, 0]], device)
    torch.library.opcheck(torch.ops.zos.apply_table_edits.default, (*table, *others))
    batch, state = torch.arange(4, dtype=torch.int32, device=device), torch.zeros(8, dtype=torch.int64, device=device)
    ready, numbers = (
        torch.zeros(8, 2, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    results = torch.zeros(4, 16 + 18 * 4, dtype=torch.int32, device=device)
    marks = torch.zeros(4, dtype=torch.int32, device=device)
    arguments = (*table, operands["tickets"], kept, kept > 1, tokens, operands["counters"], 6, 8192)
    torch.library.opcheck(
        torch.ops.zos.commit.default,
        (*arguments, batch, state, ready, results, numbers, tokens, False, marks, 2, 128, 134),
    )
    mailbox = torch.zeros(4, 8 + results.shape[1], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.zos.publish_results.default, (results, numbers.fill_(0), mailbox))


def test_inputs_stay_untouched(device: str) -> None:
    """Only declared outputs change: opcheck compares with a tolerance that hides +1 on large integers, this does not."""
    operands = prepare_operands(service(device))
    before = {name: value.clone() for name, value in operands.items() if isinstance(value, torch.Tensor)}
    PREPARE(*positional(operands))
    for name, value in before.items():
        if name not in OUTPUTS or name in ("records", "counters"):
            assert_bitwise_equal(operands[name], value, name)


def test_compiled_caller(device: str) -> None:
    """A compiled function that prepares and then reads the outputs sees what the eager one sees (functionalised mutation)."""
    svc = service(device)

    def caller(*arguments: Any) -> torch.Tensor:
        torch.ops.zos.prepare_v4_decode_metadata(*arguments)
        index = arguments[POSITIONAL.index("kv_swa_index")]
        return index[:, :4] + 1

    eager, compiled = prepare_operands(svc), prepare_operands(svc)
    expected = caller(*positional(eager))
    actual = torch.compile(caller, backend="aot_eager", fullgraph=True)(*positional(compiled))
    assert_bitwise_equal(actual, expected, "index + 1")
    for name in OUTPUTS:
        if eager[name] is not None and name != "chunk_places":
            assert_bitwise_equal(compiled[name], eager[name], name)


BAD_OPERANDS: list[tuple[str, Any, str]] = [
    ("records", lambda t: t.long(), "dtype of records"),
    ("records", lambda t: t[:, :8], "shape of records"),
    ("state_ids", lambda t: t.long(), "dtype of state_ids"),
    ("kv_swa_index", lambda t: t[:, :64], "shape of kv_swa_index"),
    ("kv_swa_index", lambda t: t.t().contiguous().t(), "stride of kv_swa_index"),
    ("kv_swa_full_index_pivots", lambda t: t[:-1], "shape of kv_swa_full_index_pivots"),
    ("positions", lambda t: t.int(), "dtype of positions"),
    ("positions", lambda t: t[:5], "shape of positions"),
    ("tickets", lambda t: t[:1], "shape of tickets"),
    ("counters", lambda t: t.int(), "dtype of counters"),
    ("chunk_places", lambda t: t[:0], "chunk_places"),
    ("chunk_places", lambda t: t.repeat(4)[::2], "chunk_places must be contiguous"),
    ("compression_write_slot", lambda t: t[0, 0], "shape of compression_write_slot"),
    ("ring", lambda ring: 132, "ring=132 is too short"),
    ("window", lambda window: 0, "window=0 is outside"),
    ("tokens_per_step", lambda step: 0, "tokens_per_step=0"),
    ("compression_ratios", lambda ratios: [0], "compression_ratios=0 is outside"),
    ("compression_entries", lambda entries: [6], "too short for ratio 2"),
    ("compression_entries", lambda entries: [], "expected as many of each"),
    ("compression_index", lambda t: t[:, :3], "shape of compression_index"),
    ("compression_ratios", lambda ratios: [2**32], "compression_ratios=4294967296"),
    ("compression_entries", lambda entries: [2**40], "compression_entries=1099511627776"),
    ("ring", lambda ring: 2**31, "ring=2147483648"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), BAD_OPERANDS, ids=[f"{b[0]}-{b[2]}" for b in BAD_OPERANDS])
def test_prepare_refuses(device: str, name: str, spoil: Any, message: str) -> None:
    """A wrong argument is named before anything is written."""
    operands = prepare_operands(service(device))
    outputs = {output: operands[output].clone() for output in OUTPUTS if operands[output] is not None}
    spoiled = {**operands, name: spoil(operands[name])}
    with pytest.raises(ValueError, match=message):
        PREPARE(*positional(spoiled))
    for output, before in outputs.items():
        assert_bitwise_equal(operands[output], before, output)


def test_prepare_refuses_unaligned_vectors(device: str) -> None:
    """A legal view whose address the kernel's vector stores cannot take is refused, not a misaligned access (A17's kind)."""
    operands = prepare_operands(service(device))
    for name, unit in (("kv_swa_index_offset_len", 8), ("kv_swa_full_index_pivots", 16), ("tickets", 16)):
        whole = operands[name]
        shifted = torch.zeros(whole.numel() + 1, dtype=torch.int32, device=device)[1:].view(whole.shape)
        with pytest.raises(ValueError, match=f"address of {name}: expected a multiple of {unit}"):
            PREPARE(*positional({**operands, name: shifted}))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_index_at_any_address(device: str, offset: int) -> None:
    """kv_swa_index is stored in 16-byte units only where its address allows."""
    operands = prepare_operands(service(device))
    expected = operands["kv_swa_index"].clone()
    shifted = torch.full((expected.numel() + offset,), -7, dtype=torch.int32, device=device)[offset:].view(
        expected.shape
    )
    PREPARE(*positional({**operands, "kv_swa_index": shifted}))
    assert_bitwise_equal(shifted, expected, "kv_swa_index")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.long(), "dtype of num_kept"),
        (lambda t: t[:2], "shape of num_kept"),
        (lambda t: torch.stack([t, t], 1)[:, 0], "stride of num_kept"),
        (lambda t: t.tolist(), "num_kept is a list"),
        (lambda t: torch.zeros(4, dtype=torch.int32, device="meta"), "device of num_kept"),
    ],
)
def test_commit_refuses(device: str, spoil: Any, message: str) -> None:
    """A wrong result tensor is named, and no sequence moves."""
    svc = service(device)
    svc.set_batch([3, -1, 1], batch=4)
    metadata = svc.prepare()
    before = svc.table.records.clone()
    good = torch.ones(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        svc.commit(metadata, spoil(good))
    with pytest.raises(ValueError, match="dtype of finished"):
        svc.commit(metadata, good, good)
    with pytest.raises(ValueError, match="carries no tokens"):
        svc.commit(metadata, good, None, torch.zeros(4, 6, dtype=torch.int64, device=device))
    assert_bitwise_equal(svc.table.records, before, "records")


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("edits", lambda t: t[0], "shape of edits"),
        ("edits", lambda t: t[:, :200].contiguous(), "words a multiple of 4 and 272 or more"),
        ("edits", lambda t: t.long(), "dtype of edits"),
        ("batch_states", lambda t: t[:1], "shape of batch_states"),
        ("ready", lambda t: t[0], "entries of ready=0"),
        ("ready", lambda t: t[:1], "shape of ready"),
        ("applied", lambda t: t[:0], "shape of applied"),
        ("applied_on_host", lambda t: t.int(), "dtype of applied_on_host"),
    ],
)
def test_edits_refuse(device: str, name: str, spoil: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """What would be read or written outside is named before anything is launched."""
    svc = service(device)
    names = ("batches", "edits", "batch_states", "ready", "applied", "applied_on_host", "tokens_per_step", "most")
    operands = dict(zip(names, edit_operands([], [], device), strict=True))
    operands[name] = spoil(operands[name])
    before = svc.table.records.clone()
    with pytest.raises(ValueError, match=message):
        torch.ops.zos.apply_table_edits(svc.table.records, None, *operands.values())
    assert_bitwise_equal(svc.table.records, before, "records")
