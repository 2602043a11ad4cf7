"""Reads the sqlite export of an Nsight Systems report: the schema is probed, since tables come only when used and columns vary."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from zos.cli import InputError, plain, short

COPY_KINDS = {1: "host to device", 2: "device to host", 8: "device to device", 9: "host to host", 10: "peer to peer"}
LARGEST_TIME = 2**63 - 1


class Activity(NamedTuple):
    """What the GPU did; times in ns."""

    start: int
    end: int
    what: str  # kernel's name, kind of copy, "memset", or "graph" where graphs were traced as a whole
    size: int  # bytes of a copy or memset, else 0
    correlation: int  # of the host call that launched it


class Call(NamedTuple):
    """A call of the CUDA API, or an NVTX range; times in ns."""

    start: int
    end: int
    name: str
    thread: int
    correlation: int = -1


@dataclass(frozen=True)
class Export:
    """What an export says, each list by start."""

    work: list[Activity]
    calls: list[Call]  # of the CUDA runtime and driver
    ranges: list[Call]  # NVTX


def read_export(path: Path) -> Export:
    """Read an export; the file is opened read-only. InputError for a file that is none, or lacks what every export has."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        address = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            return _read(_Tables(database, path))
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise InputError(f"{path}: not a readable sqlite export of Nsight Systems: {plain(str(error))}") from None


class _Tables:
    """Rows of the tables that are there, with defaults for the columns that are not."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database, self._path = database, path
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.columns = {
            name: {row[1] for row in database.execute(f'PRAGMA table_info("{_quoted(name)}")')} for (name,) in names
        }

    def rows(self, table: str, required: tuple[str, ...], optional: dict[str, object]) -> list[tuple[Any, ...]]:
        """All rows of a table, [] where it is missing: the required columns, then the optional ones or their defaults."""
        if table not in self.columns:
            return []
        missing = [column for column in required if column not in self.columns[table]]
        if missing:
            raise InputError(f"{self._path}: table {table} has no column {', '.join(missing)}")
        there = [column for column in optional if column in self.columns[table]]
        names = ", ".join(f'"{column}"' for column in (*required, *there))
        found = []
        for row in self._database.execute(f'SELECT {names} FROM "{table}"'):
            values = dict(zip(there, row[len(required) :], strict=True))
            rest = [default if values.get(column) is None else values[column] for column, default in optional.items()]
            found.append((*row[: len(required)], *rest))
        return found


def _quoted(name: str) -> str:
    return name.replace('"', '""')


def _read(tables: _Tables) -> Export:
    if not tables.columns:
        raise InputError(f"{tables._path}: an empty database, no export of Nsight Systems")
    if "StringIds" not in tables.columns:
        raise InputError(f"{tables._path}: no table StringIds: not an export of Nsight Systems")
    strings = {number: str(value) for number, value in tables.rows("StringIds", ("id", "value"), {})}
    work: list[Activity] = []
    for start, end, name, demangled, correlation in _spans(
        tables, "CUPTI_ACTIVITY_KIND_KERNEL", {"shortName": -1, "demangledName": -1, "correlationId": -1}
    ):
        work.append(Activity(start, end, strings.get(name) or strings.get(demangled, "a kernel"), 0, correlation))
    for start, end, kind, size, correlation in _spans(
        tables, "CUPTI_ACTIVITY_KIND_MEMCPY", {"copyKind": 0, "bytes": 0, "correlationId": -1}
    ):
        work.append(Activity(start, end, f"memcpy {COPY_KINDS.get(kind, f'of kind {kind}')}", size, correlation))
    for start, end, size, correlation in _spans(
        tables, "CUPTI_ACTIVITY_KIND_MEMSET", {"bytes": 0, "correlationId": -1}
    ):
        work.append(Activity(start, end, "memset", size, correlation))
    for start, end, correlation in _spans(tables, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", {"correlationId": -1}):
        work.append(Activity(start, end, "graph", 0, correlation))
    calls = [
        Call(start, end, strings.get(name, "a call").split("_v")[0], thread, correlation)
        for start, end, name, thread, correlation in _spans(
            tables, "CUPTI_ACTIVITY_KIND_RUNTIME", {"nameId": -1, "globalTid": 0, "correlationId": -1}
        )
    ]
    ranges = []
    for start, end, text, number, thread in _spans(tables, "NVTX_EVENTS", {"text": "", "textId": -1, "globalTid": 0}):
        ranges.append(Call(start, end, str(text or strings.get(number, "")), thread))
    return Export(sorted(work), sorted(calls), sorted(ranges))


def _spans(tables: _Tables, table: str, optional: dict[str, object]) -> list[tuple[Any, ...]]:
    """Rows with a beginning and an end (marks have none); InputError for times that are no numbers."""
    found = []
    for start, end, *rest in tables.rows(table, ("start", "end"), optional):
        if end is None:
            continue
        if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end <= LARGEST_TIME:
            raise InputError(f"{tables._path}: table {table} has a row from {short(start)} to {short(end)}")
        numbers = [column for column, default in optional.items() if isinstance(default, int)]
        values = dict(zip(optional, rest, strict=True))
        for column in numbers:
            if not isinstance(values[column], int):
                raise InputError(f"{tables._path}: table {table}, column {column} holds {short(values[column])}")
        found.append((start, end, *rest))
    return found
