"""Test that any file at all (a trace, a profile's export, a stored state) is taken or refused by name, and no other is touched.

Here are whole files and the commands that read them, arbitrary and as edits of real ones; test_traces.py, test_audit.py and
test_store_format.py have the single rules. `make fuzz-inputs` runs it for an hour.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import zos
from tests.outside import WHOLE, edited, files_stay, fuzz
from tests.stores import service_and_cache
from tests.test_audit import CLEAN, WAITS
from tests.test_traces import SAMPLES
from zos.arguments import INT32_LARGEST
from zos.cli import InputError
from zos.cli.main import main
from zos.cli.nsys_export import read_export
from zos.cli.traces import LARGEST_MS, Request, TraceError, read_trace
from zos.state_store import stored_name
from zos.store_format import key_bytes

LONGEST_LINE = 600  # of a message, its path aside
REPLAYED_TOKENS = 300  # a trace that asks for more is read, not replayed
SAMPLE_LINES = 6
LAYOUT = zos.StateSlotLayout(zos.RingGeometry(4, 1), stored_layers=1, dropped_layers=1)


def sample(name: str) -> bytes:
    """The first lines of a public trace."""
    return b"".join((SAMPLES / name).read_bytes().splitlines(keepends=True)[:SAMPLE_LINES])


AZURE = sample("azure_llm_2023_conv_sample.csv")
MOONCAKE = sample("mooncake_fast25_conversation_sample.jsonl")


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str | None:
    """Run a command: None where it went well, else its one line on stderr."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    if code == 0:
        assert out and not err and out.replace("\n", "").isprintable()
        return None
    assert (code, out) == (2, ""), (code, out, err)
    assert err.endswith("\n") and len(err.splitlines()) == 1, err
    assert err.startswith(f"zos {arguments[0]}: error: ") and "Traceback" not in err
    assert len(err) < LONGEST_LINE + sum(len(str(argument)) for argument in arguments)
    assert err.rstrip("\n").isprintable(), f"control characters in {err!r}"
    return err


def assert_trace(requests: list[Request]) -> None:
    """What read_trace promises."""
    assert requests and requests[0].arrival_ms == 0
    arrivals = [request.arrival_ms for request in requests]
    assert arrivals == sorted(arrivals) and all(map(math.isfinite, arrivals)) and arrivals[-1] < 100 * LARGEST_MS
    for request in requests:
        assert type(request.prompt_tokens) is type(request.output_tokens) is int
        assert min(request.prompt_tokens, request.output_tokens) >= 0
        assert (
            request.prompt_tokens + request.output_tokens <= INT32_LARGEST - 6
        )  # the last step's drafts stand past the end
        assert all(type(block) is int for block in request.hash_ids)


VALUES = st.one_of(
    st.sampled_from([*WHOLE, 2**31 - 7, 2**31 - 6, "7", 7.0, math.nan, math.inf, None, True, [], {}, [1, 2]]),
    st.text(max_size=9),
)
LENGTHS = st.sampled_from([0, 5, 2**31 - 7, 2**31 - 6])
ROWS = st.fixed_dictionaries(
    {"timestamp": st.integers(0, 9) | VALUES},
    optional={"input_length": LENGTHS | VALUES, "output_length": LENGTHS | VALUES, "hash_ids": VALUES},
)
EXTREME_ROWS = st.fixed_dictionaries(
    {"timestamp": st.integers(0, 9), "input_length": LENGTHS, "output_length": LENGTHS}
)
TRACES = st.one_of(
    st.binary(max_size=200),
    edited(AZURE),
    edited(MOONCAKE),
    st.lists(ROWS | EXTREME_ROWS, min_size=1, max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    st.lists(st.lists(st.text(max_size=12), min_size=3, max_size=3).map(",".join), max_size=4).map(
        lambda rows: "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]).encode("utf-8", "surrogatepass")
    ),
    st.text(max_size=80).map(lambda text: b"{" + text.encode("utf-8", "surrogatepass")),
)


def test_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any trace is read as what it must be, or refused in one line that names file and line."""
    monkeypatch.chdir(tmp_path)

    def check(data: bytes, suffix: str) -> None:
        path = tmp_path / f"trace{suffix}"
        path.write_bytes(data)
        with files_stay(tmp_path):
            try:
                requests = read_trace(path)
            except TraceError as error:
                message = run(capsys, "replay", path, "--device=cpu")
                assert message == f"zos replay: error: {error}\n" and f"{path}:{error.line}: " in message
                assert 1 <= error.line <= data.count(b"\n") + 1
                return
            assert_trace(requests)
            if sum(request.prompt_tokens + request.output_tokens for request in requests) <= REPLAYED_TOKENS:
                run(capsys, "replay", path, "--device=cpu", "--check=off")

    fuzz(check, 400, TRACES, st.sampled_from([".csv", ".jsonl", ""]))


# ---- exports of profiles --------------------------------------------------------------------------------------------------------

# A journal that a writer left behind: who opens the database to write rolls it back and removes it.
JOURNAL = bytes.fromhex("d9d505f920a163d7 00000000 00000000 00000001 00000200 00001000").ljust(512, b"\0")
CELLS = st.one_of(
    st.sampled_from([None, 0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 1.5, 1e300, "", "zos.step", "a\nb", b"\xff"]),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.just("x" * 5000),
    st.just("\x1b[31m\r"),
)


def damaged(path: Path, data: Any) -> None:
    """Statements on an export: cells of any type, rows doubled or gone, columns and tables renamed, gone or of another kind."""
    with sqlite3.connect(path) as database:
        database.create_function("any_cell", 0, lambda: data.draw(CELLS))
        for _ in range(data.draw(st.integers(1, 4))):
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            if not names:
                return
            table = data.draw(st.sampled_from(names))
            table = table.replace('"', '""')
            columns = [row[1].replace('"', '""') for row in database.execute(f'PRAGMA table_info("{table}")')]
            column = data.draw(st.sampled_from(columns)) if columns else "rowid"
            few = data.draw(st.sampled_from(["rowid % 7 = 3", "1", "rowid = 1"]))
            statement = data.draw(
                st.sampled_from(
                    [
                        f'UPDATE "{table}" SET "{column}" = any_cell() WHERE {few}',
                        f'UPDATE "{table}" SET "{column}" = any_cell() WHERE {few}',
                        f'UPDATE "{table}" SET "{column}" = CAST("{column}" AS TEXT) WHERE {few}',
                        f'INSERT INTO "{table}" SELECT * FROM "{table}"',
                        f'DELETE FROM "{table}" WHERE {few}',
                        f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "o\'th""er"',
                        f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
                        f'ALTER TABLE "{table}" RENAME TO "an""other"',
                        f'DROP TABLE "{table}"',
                        f'CREATE VIEW IF NOT EXISTS v AS SELECT * FROM "{table}"',
                    ]
                )
            )
            try:
                database.execute(statement)
            except sqlite3.Error:
                continue


def test_exports(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any database and any bytes give figures or one line that names the file; the export is only read."""
    monkeypatch.chdir(tmp_path)

    def check(data: Any) -> None:
        path = tmp_path / "export?#%.sqlite"
        source = data.draw(st.sampled_from([CLEAN, WAITS]))
        Path(f"{path}-journal").unlink(missing_ok=True)
        if data.draw(st.integers(0, 3)):
            shutil.copyfile(source, path)
            damaged(path, data)
        else:
            path.write_bytes(data.draw(st.one_of(st.binary(max_size=300), edited(source.read_bytes()))))
        Path(f"{path}-journal").write_bytes(JOURNAL)
        out = tmp_path / "figures.json"
        out.unlink(missing_ok=True)
        with files_stay(tmp_path, out.name):
            message = run(capsys, "audit", path, f"--json={out}")
        if message is None:
            assert json.loads(out.read_text())["steps"] > 0
            return
        assert not out.exists()
        try:
            read_export(path)
        except InputError:
            assert str(path) in message

    fuzz(check, 400, st.data())


# ---- stored states --------------------------------------------------------------------------------------------------------------

KEYS = st.one_of(
    st.text(max_size=30), st.binary(max_size=30), st.sampled_from(["", "../../x", "/", "a\0b", "\ud800", b""])
)


def test_stored_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies under a key is the state that was put or refused by name, and then table, cache and folder are as before."""
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    def check(data: Any) -> None:
        folder = tmp_path / str(next(numbers)) / "store"
        svc, cache = service_and_cache("cpu", LAYOUT)
        store = zos.LocalStateStore(svc, cache, folder, zos.StateSlotAllocator([2, 3]))
        svc.admit(0, q_start=100)
        key = data.draw(KEYS)
        with files_stay(folder.parent, "store", f"store/{stored_name(key_bytes(key))}.state"):
            store.put(key, 0, 100)
        path = folder / f"{stored_name(key_bytes(key))}.state"
        original = path.read_bytes()
        lies = data.draw(st.sampled_from([*["bytes"] * 6, "nothing", "folder", "loop", "other key"]))
        wanted = key
        if lies == "bytes":
            edits = edited(original)
            path.write_bytes(data.draw(st.one_of(edits, edits, edits, st.binary(max_size=99), st.just(original))))
        elif lies == "other key":
            wanted = data.draw(KEYS)
            path.rename(folder / f"{stored_name(key_bytes(wanted))}.state")
        else:
            path.unlink()
            if lies == "folder":
                path.mkdir()
            elif lies == "loop":
                os.symlink(path, path)
        table, slab = svc.table.records.clone(), cache.slab.clone()
        with files_stay(folder.parent):
            try:
                state_id = store.get(wanted)
            except zos.StoreError:
                assert path.exists() is False or not path.is_file() or path.read_bytes() != original or wanted != key
                svc.flush()
                assert torch.equal(svc.table.records, table) and torch.equal(cache.slab, slab)
                assert store._allocator is not None and store._allocator.take() == 2
                return
        assert key_bytes(wanted) == key_bytes(key) and path.read_bytes() == original
        assert torch.equal(cache.stored(state_id), cache.stored(0))

    fuzz(check, 200, st.data())
