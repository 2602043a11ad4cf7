"""Test that whatever comes from outside (traces, profiles, stored states, arguments) is taken rightly or refused by name.

No crash, no hang, nothing half-changed, no file touched but the ones asked for. With ZOS_FUZZ_SECONDS=3600 (`make fuzz-inputs`)
each test takes its share of that time, with fresh examples.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zos
from tests.reference import as_array
from tests.stores import LAYOUT, service_and_cache
from tests.test_cli import ROOT
from tests.test_ops import prepare_operands, service
from zos.cli import InputError
from zos.cli.audit import audit
from zos.cli.nsys_export import read_export
from zos.cli.traces import TraceError, read_trace
from zos.store_format import HEADER_BYTES

SECONDS = float(os.environ.get("ZOS_FUZZ_SECONDS", "0"))
NUMBER_OF_TESTS = 6
TRACES = [path.read_bytes()[:4000] for path in sorted((ROOT / "examples" / "traces").glob("*sample*"))]
EXPORT = (ROOT / "tests" / "data" / "h200_waits.sqlite").read_bytes()
TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS", "StringIds",
          "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")  # fmt: skip
COLUMNS = ("start", "end", "nameId", "shortName", "text", "textId", "id", "value", "copyKind", "bytes", "correlationId",
           "globalTid")  # fmt: skip
EXTREMES = (0, 1, -1, 6, 7, 134, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63) - 1)
NAMED = (ValueError, TypeError, IndexError)  # IndexError for ids, as DESIGN has it


def fuzzed(examples: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Decorate a test: some examples, always the same, or as many as its share of ZOS_FUZZ_SECONDS has time for."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        options = settings(
            max_examples=examples,
            deadline=None,
            derandomize=not SECONDS,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        run = options(given(**strategies)(test))

        def until_time_is_up() -> None:
            end = time.monotonic() + SECONDS / NUMBER_OF_TESTS
            run()
            while time.monotonic() < end:
                run()

        until_time_is_up.__doc__ = test.__doc__
        return until_time_is_up

    return decorate


@st.composite
def edited(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """One of the originals with some bytes exchanged, lines repeated, or its end cut off; or anything."""
    content = draw(st.sampled_from([*originals, b""])) or draw(st.binary(max_size=300))
    for _ in range(draw(st.integers(0, 4))):
        at, length = draw(st.integers(0, len(content))), draw(st.integers(0, 12))
        middle = draw(
            st.one_of(
                st.binary(max_size=12), st.just(content[at : at + 80]), st.sampled_from([b"\n", b",", b"1e999", b"-1"])
            )
        )
        content = content[:at] + middle + content[at + length :]
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content


@fuzzed(300, content=edited(TRACES), suffix=st.sampled_from([".csv", ".jsonl", ""]))
def test_traces(content: bytes, suffix: str) -> None:
    """A trace is read whole, in order and with sane numbers, or refused with its file and line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        path.write_bytes(content)
        try:
            requests = read_trace(path)
        except TraceError as error:
            assert str(error).startswith(f"{path}:{error.line}: ") and "\n" not in str(error)
            return
        finally:
            assert list(Path(folder).iterdir()) == [path] and path.read_bytes() == content
    arrivals = [request.arrival_ms for request in requests]
    assert arrivals == sorted(arrivals) and all(0 <= arrival < 2**53 for arrival in arrivals)
    assert all(0 <= n < 2**31 for request in requests for n in (request.prompt_tokens, request.output_tokens))


@fuzzed(60, content=edited([EXPORT]))
def test_damaged_exports(content: bytes) -> None:
    """A profile's export with other bytes: figures, or a named error; the file stays what it was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "export.sqlite"
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            assert audit(read_export(path))["steps"] > 0
        assert list(Path(folder).iterdir()) == [path] and path.read_bytes() == content


VALUES = st.one_of(
    st.none(), st.sampled_from([value for value in EXTREMES if abs(value) < 2**63]), st.integers(0, 10**6), st.text(max_size=8),
    st.floats(), st.binary(max_size=4),
)  # fmt: skip


@fuzzed(80, data=st.data())
def test_other_schemas(data: Any) -> None:
    """A database whose tables have the right names and any columns and values."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "export.sqlite"
        with sqlite3.connect(path) as database:
            for table in data.draw(st.lists(st.sampled_from(TABLES), unique=True)):
                columns = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True))
                database.execute(f"CREATE TABLE {table} ({', '.join(f'{c!r}' for c in columns)})".replace("'", '"'))
                for _ in range(data.draw(st.integers(0, 6))):
                    marks = ", ".join("?" * len(columns))
                    database.execute(f"INSERT INTO {table} VALUES ({marks})", [data.draw(VALUES) for _ in columns])
        database.close()
        try:
            assert audit(read_export(path))["steps"] >= 0
        except InputError as error:
            assert "\n" not in str(error)


@fuzzed(120, data=st.data())
def test_stored_states(data: Any) -> None:
    """Bytes exchanged in a stored state: what was stored, or a StoreError and nothing changed, here or in the directory."""
    svc, cache = service_and_cache("cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = zos.LocalStateStore(svc, cache, Path(folder))
        svc.admit(1, q_start=1000)
        store.put("key", 1, 1000)
        svc.flush()
        (path,) = (file for file in Path(folder).rglob("*") if file.is_file())
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(
                st.one_of(st.integers(0, 200), st.integers(0, HEADER_BYTES + 64), st.integers(0, len(content) - 1))
            )
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
        files = {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
        records, slab = as_array(svc.table.records).copy(), as_array(cache.slab).copy()
        try:
            store.get("key", 3)
        except zos.StoreError:
            svc.flush()
            assert np.array_equal(as_array(svc.table.records), records) and np.array_equal(as_array(cache.slab), slab)
            assert not svc.in_use(3)
        else:
            begin, of = cache.slot_pitch, LAYOUT.stored_bytes
            assert np.array_equal(as_array(cache.slab)[3 * begin : 3 * begin + of], slab[begin : begin + of])
        assert files == {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
        store.close()


def anything(data: Any) -> Any:
    """What a caller may hand over by mistake, or rightly."""
    kind = data.draw(st.sampled_from(["int", "list", "tensor", "array", "other"]))
    numbers = st.lists(st.one_of(st.sampled_from(EXTREMES[:-3]), st.integers(-2, 9)), max_size=6)
    if kind == "int":
        return data.draw(st.one_of(st.sampled_from(EXTREMES), st.integers(-3, 40)))
    if kind == "list":
        return data.draw(st.one_of(numbers, st.lists(VALUES, max_size=3)))
    if kind == "tensor":
        shape = data.draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bool, torch.uint8]))
        tensor = torch.zeros([2 * size for size in shape], dtype=dtype) + data.draw(st.integers(-1, 7))
        tensor = tensor.to(dtype)[tuple(slice(None, None, 2) for _ in shape)]  # with strides
        return tensor.contiguous() if data.draw(st.booleans()) else tensor
    if kind == "array":
        return np.array(
            data.draw(st.lists(st.integers(0, 9), max_size=6)), data.draw(st.sampled_from(["i4", "i8", "f4", "u1"]))
        )
    return data.draw(st.one_of(VALUES, st.just(True), st.just({})))


CALLS = {
    "admit": (
        "state_id",
        "q_start",
        "seqlen_q",
        "swa_valid_start",
        "prompt_end",
        "chunk_q",
        "decode_q",
        "stop_at",
        "tokens",
    ),
    "reset": ("state_id", "prompt_end"),
    "release": ("state_id",),
    "pause": ("state_id",),
    "resume": ("state_id",),
    "fork": ("src", "dst"),
    "set_seqlen_q": ("state_id", "seqlen_q"),
    "set_batch": ("state_ids", "batch", "slot", "max_tokens"),
    "set_prefill_batch": ("state_ids", "batch", "slot"),
    "set_ready": ("state_ids", "slot"),
    "prepare": ("slot",),
    "bounds": ("state_ids",),
    "commit": ("num_kept", "finished", "next_tokens"),
}


@fuzzed(400, data=st.data())
def test_calls(data: Any) -> None:
    """Any argument to any call of the service: it works, or names what is wrong and has changed nothing."""
    svc = service("cpu", carry_tokens=True)
    svc.set_batch([3, 1])
    metadata = svc.prepare()
    method = data.draw(st.sampled_from(sorted(CALLS)))
    parameters = data.draw(st.lists(st.sampled_from(CALLS[method]), min_size=1, unique=True))
    values = [anything(data) for _ in parameters]
    before = as_array(svc.table.records).copy()
    try:
        if method == "commit":
            arguments = {"num_kept": metadata.seqlens_q, **dict(zip(parameters, values, strict=True))}
            svc.commit(metadata, arguments["num_kept"], arguments.get("finished"), arguments.get("next_tokens"))
        else:
            getattr(svc, method)(**dict(zip(parameters, values, strict=True)))
    except NAMED as error:
        assert str(error), f"{method}{values!r}: {type(error).__name__} without a word"
        svc.flush()
        assert np.array_equal(as_array(svc.table.records), before), (
            f"{method}{values!r} was refused and changed the table"
        )
    svc.flush()
    svc.set_batch([3, 1])
    svc.prepare()


def operators() -> dict[str, dict[str, Any]]:
    """Good arguments of the operators, by name."""
    svc = service("cpu")
    decode = prepare_operands(svc)
    svc.reset(3, prompt_end=40)
    svc.set_prefill_batch([3, 1])
    prefill = dict(svc.prepare_prefill(full_index=True).operands)
    zeros = torch.zeros
    kept = zeros(4, dtype=torch.int32)
    entries, slots = zeros(2, 134, 1, 528, dtype=torch.uint8), zeros(3, dtype=torch.int64)
    lists = zeros(3, 128, dtype=torch.int32), zeros(3, dtype=torch.int32)
    given = {
        "prepare_v4_decode_metadata": decode,
        "prepare_v4_prefill_metadata": prefill,
        "commit": {**decode, "num_kept": kept, "finished": None, "next_tokens": None, "max_prefill_tokens": 8192},
        "swa_ring_store": {"values": zeros(3, 512), "write_slot": slots, "swa_cache": entries, "cast_back": zeros(3, 512)},
        "swa_ring_load": {
            "swa_cache": entries, "load_plan": zeros(1, 3, 4, dtype=torch.int32), "out": zeros(128, 512), "window": 128,
        },
        "swa_decode_attention": {
            "q": zeros(3, 2, 512), "swa_cache": entries, "kv_swa_index": lists[0], "swa_len": lists[1], "sink": None,
            "out": zeros(3, 2, 512), "lse": zeros(3, 2), "softmax_scale": 1.0, "tokens_per_step": 1,
        },
    }  # fmt: skip
    schemas = {name: [a.name for a in getattr(torch.ops.zos, name).default._schema.arguments] for name in given}
    return {name: {key: of[key] for key in schemas[name] if key in of} for name, of in given.items()}


@fuzzed(500, data=st.data())
def test_operator_arguments(data: Any) -> None:
    """Any one argument of an operator exchanged: it runs, or names what is wrong and has written nothing."""
    operator, operands = data.draw(st.sampled_from(sorted(operators().items(), key=lambda item: item[0])))
    name = data.draw(st.sampled_from(sorted(operands)))
    operands[name] = anything(data)
    before = {key: value.clone() for key, value in operands.items() if isinstance(value, torch.Tensor)}
    try:
        getattr(torch.ops.zos, operator)(**operands)
    except (*NAMED, RuntimeError) as error:
        # RuntimeError: torch's own, for what does not fit the operator's schema. A batch's size makes other shapes wrong, too.
        assert any(word in str(error) for word in (*operands, f"zos::{operator}")), (
            f"{operator}: {name}={operands[name]!r}: {error}"
        )
        for key, value in before.items():
            assert torch.equal(value.nan_to_num(), operands[key].nan_to_num()), f"{name} was refused, and {key} written"


def test_the_share_of_each() -> None:
    """NUMBER_OF_TESTS is what shares the time."""
    assert (
        sum("until_time_is_up" in getattr(test, "__qualname__", "") for test in globals().values()) == NUMBER_OF_TESTS
    )


@pytest.mark.parametrize("method", CALLS)
def test_names_of_parameters(method: str) -> None:
    """A wrong name would be refused as such, and nothing tried."""
    parameters = inspect.signature(getattr(zos.MetadataService, method)).parameters
    assert set(CALLS[method]) <= set(parameters) or (
        method == "commit" and set(CALLS[method]) <= {*parameters, "num_kept"}
    )


def test_a_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that stages its edit before it checks a later argument is found."""
    set_seqlen_q = zos.MetadataService.set_seqlen_q

    def hasty(svc: zos.MetadataService, state_id: int, seqlen_q: int) -> None:
        set_seqlen_q(svc, 3, 2)
        set_seqlen_q(svc, state_id, seqlen_q)

    monkeypatch.setattr(zos.MetadataService, "set_seqlen_q", hasty)
    monkeypatch.setitem(globals(), "CALLS", {"set_seqlen_q": CALLS["set_seqlen_q"]})
    with pytest.raises(AssertionError, match="was refused and changed the table"):
        test_calls()
