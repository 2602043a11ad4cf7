"""Request traces: reads Azure CSV and Mooncake JSON lines, and names file and line of whatever is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from zos.arguments import INT32_LARGEST
from zos.cli import InputError, short
from zos.geometry import RingGeometry

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")  # hash_ids may be absent
LARGEST_MS = 2**53  # beyond it a float has no room for whole milliseconds
LARGEST_LENGTH = INT32_LARGEST - RingGeometry().tokens_per_step  # the last step's drafts stand past the end
TOO_MANY_DIGITS = len(str(LARGEST_LENGTH)) + 1


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival_ms: float  # after the trace's first request
    prompt_tokens: int
    output_tokens: int  # 0: generates nothing; a replay skips and counts it
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks: equal ids are a shared prefix


class TraceError(InputError):
    """A trace cannot be read.

    Attributes
    ----------
    path : str
        The file.
    line : int
        The line, from 1.
    """

    def __init__(self, path: str | Path, line: int, message: str) -> None:
        self.path = str(path)
        self.line = line
        super().__init__(f"{path}:{line}: {message}")


def read_trace(path: str | Path) -> list[Request]:
    """Read a trace; its format is detected from its first line.

    Parameters
    ----------
    path : str or Path
        Azure CSV (TIMESTAMP, ContextTokens and GeneratedTokens among its columns) or Mooncake JSON lines (timestamp
        in ms, input_length, output_length, hash_ids).

    Returns
    -------
    list of Request
        In order of arrival; the first arrives at 0 ms.

    Raises
    ------
    TraceError
        A missing column or key, a length that is no whole number or not in 0 … 2^31 - 7 (prompt and output together
        too), a bad timestamp, a line that is no JSON object, binary junk, no request at all.
    OSError
        The file cannot be opened.

    Examples
    --------
    >>> read_trace("examples/traces/azure_llm_2023_conv_sample.csv")[1]
    Request(arrival_ms=4314.579, prompt_tokens=396, output_tokens=109, hash_ids=())
    """
    lines = [(number, text) for number, text in enumerate(_text(path).split("\n"), start=1) if text.strip()]
    if not lines:
        raise TraceError(path, 1, "empty file")
    requests: list[Request] = []
    parse: Callable[[str], Request] | None = None
    for number, text in lines:
        try:
            if parse is not None:
                requests.append(parse(text))
            elif text.lstrip().startswith("{") or (Path(path).suffix == ".jsonl" and AZURE_COLUMNS[0] not in text):
                parse = _mooncake_request
                requests.append(parse(text))
            else:
                parse = _AzureLines(text).request
        except ValueError as error:
            raise TraceError(path, number, str(error)) from None
    if not requests:
        raise TraceError(path, lines[0][0], "no request after the header")
    requests.sort(key=lambda request: request.arrival_ms)
    begin = requests[0].arrival_ms
    return [replace(request, arrival_ms=round(request.arrival_ms - begin, 3)) for request in requests]


def _text(path: str | Path) -> str:
    data = Path(path).read_bytes()
    if b"\0" in data:
        raise TraceError(path, data.count(b"\n", 0, data.index(b"\0")) + 1, "binary junk: a NUL byte")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(path, line, f"binary junk: byte {data[error.start]:#04x} is no UTF-8 text") from None


# ---- one line; what is wrong with it is a ValueError ------------------------------------------------------------


class _AzureLines:
    """The lines after an Azure CSV's header."""

    def __init__(self, header: str) -> None:
        names = [name.strip() for name in header.split(",")]
        missing = [column for column in AZURE_COLUMNS if column not in names]
        if missing:
            raise ValueError(f"missing column {', '.join(missing)}, nor is the line a Mooncake JSON object")
        twice = [column for column in AZURE_COLUMNS if names.count(column) > 1]
        if twice:
            raise ValueError(f"column {', '.join(twice)} stands twice")
        self._fields = len(names)
        self._places = [names.index(column) for column in AZURE_COLUMNS]
        self._first: datetime | None = None

    def request(self, text: str) -> Request:
        fields = text.split(",")
        if len(fields) != self._fields:
            raise ValueError(f"the line has {len(fields)} field(s), the header {self._fields}")
        stamp, prompt, output = (fields[place].strip() for place in self._places)
        when = _moment(stamp)
        first = self._first = self._first or when
        if (when.tzinfo is None) != (first.tzinfo is None):
            raise ValueError(f"bad TIMESTAMP {stamp!r}: only some lines have a time zone")
        lengths = (_whole_number(AZURE_COLUMNS[1], prompt), _whole_number(AZURE_COLUMNS[2], output))
        return _request((when - first) / timedelta(milliseconds=1), dict(zip(AZURE_COLUMNS[1:], lengths, strict=True)))


def _moment(stamp: str) -> datetime:
    try:
        # fromisoformat alone would take week dates and bare days too
        if re.match(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", stamp, re.ASCII):
            return datetime.fromisoformat(stamp)
    except ValueError:
        pass
    raise ValueError(f"bad TIMESTAMP {short(stamp)}: expected YYYY-MM-DD HH:MM:SS.ffffff")


def _whole_number(name: str, text: str) -> int:
    # int() alone would take underscores and other scripts' digits, and refuse very long numbers in its own words
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"{name}={short(text)} is no whole number")
    value = int(text.lstrip("+-0")[:TOO_MANY_DIGITS] or "0")
    return -value if text.startswith("-") else value


def _mooncake_request(text: str) -> Request:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"bad JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{short(entry)} is no JSON object")
    missing = [key for key in MOONCAKE_KEYS if key not in entry]
    if missing:
        raise ValueError(f"missing key {', '.join(missing)}")
    when = entry[MOONCAKE_KEYS[0]]
    if type(when) not in (int, float) or not 0 <= when < LARGEST_MS:  # NaN is not in it either
        raise ValueError(f"bad timestamp {short(when)}: expected milliseconds")
    hash_ids = entry.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(block) is int for block in hash_ids):
        raise ValueError(f"hash_ids={short(hash_ids)} is no list of whole numbers")
    return _request(float(when), {key: entry[key] for key in MOONCAKE_KEYS[1:]}, tuple(hash_ids))


def _request(arrival_ms: float, lengths: dict[str, Any], hash_ids: tuple[int, ...] = ()) -> Request:
    """Make a request of its prompt's and its output's length by name, in this order."""
    for name, value in lengths.items():
        if type(value) is not int:  # a bool is an int to isinstance
            raise ValueError(f"{name}={short(value)} is no whole number")
        if value < 0:
            raise ValueError(f"{name}={short(value)} is negative")
    prompt, output = lengths.values()
    for name, value in {**lengths, " + ".join(lengths): prompt + output}.items():
        if value > LARGEST_LENGTH:
            raise ValueError(f"{name}={short(value)} exceeds {LARGEST_LENGTH}: positions are int32")
    return Request(arrival_ms, prompt, output, hash_ids)
