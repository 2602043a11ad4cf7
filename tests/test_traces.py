"""Test that traces are read as they stand, and that every bad one is refused with its file and line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from zos.cli.traces import LARGEST_LENGTH, Request, TraceError, read_trace

SAMPLES = Path(__file__).parents[1] / "examples" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\r\n"
LINE = '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0, 1]}\n'


def written(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_azure_sample() -> None:
    """CRLF, seven digits after the second, arrivals from the first request on."""
    requests = read_trace(SAMPLES / "azure_llm_2023_conv_sample.csv")
    assert len(requests) == 300
    assert requests[:2] == [Request(0.0, 374, 44), Request(4314.579, 396, 109)]
    assert sum(request.output_tokens for request in requests) == 76870


def test_mooncake_sample() -> None:
    """Milliseconds, lengths and block hashes."""
    requests = read_trace(SAMPLES / "mooncake_fast25_conversation_sample.jsonl")
    assert len(requests) == 200
    assert requests[0] == Request(0.0, 6758, 500, tuple(range(14)))
    assert all(earlier.arrival_ms <= later.arrival_ms for earlier, later in pairwise(requests))


def test_order_is_that_of_arrival(tmp_path: Path) -> None:
    """A later line may have arrived earlier."""
    late = ROW.replace("18:15:46", "18:15:45").replace("374", "7")
    assert read_trace(written(tmp_path, HEADER + ROW + late)) == [Request(0.0, 7, 44), Request(1000.0, 374, 44)]


def test_format_is_detected_by_content(tmp_path: Path) -> None:
    """The name of a file says nothing, nor do a byte order mark, blank lines or further columns."""
    assert read_trace(written(tmp_path, "\n" + LINE, "trace.csv")) == [Request(0.0, 10, 5, (0, 1))]
    assert read_trace(written(tmp_path, "\ufeff" + HEADER + "\r\n" + ROW, "trace.jsonl")) == [Request(0.0, 374, 44)]
    more = "Model,GeneratedTokens,TIMESTAMP,ContextTokens\nm,44,2024-05-10 00:00:00.009930+00:00,374"
    assert read_trace(written(tmp_path, more)) == [Request(0.0, 374, 44)]


def test_lengths_of_zero_are_read(tmp_path: Path) -> None:
    """A request without a prompt or without output is in real traces; a replay decides what to do with it."""
    assert read_trace(written(tmp_path, HEADER + ROW.replace("374", "0").replace(",44", ",0"))) == [Request(0.0, 0, 0)]
    assert read_trace(written(tmp_path, LINE.replace(', "hash_ids": [0, 1]', ""))) == [Request(0.0, 10, 5)]


BAD = {
    "empty file": (b"", 1, "empty file"),
    "blank file": (b"\r\n \n", 1, "empty file"),
    "header only": (HEADER, 1, "no request"),
    "missing column": ("TIMESTAMP,ContextTokens\r\n" + ROW, 1, "missing column GeneratedTokens"),
    "no header": (ROW, 1, "missing column TIMESTAMP, ContextTokens, GeneratedTokens"),
    "short line": (HEADER + ROW + "2023-11-16 18:15:46,374\r\n", 3, "2 field(s), the header 3"),
    "long line": (HEADER + ROW.replace("\r\n", ",1\r\n"), 2, "4 field(s), the header 3"),
    "negative length": (HEADER + ROW + ROW.replace(",44", ",-44"), 3, "GeneratedTokens=-44 is negative"),
    "huge negative": (HEADER + ROW.replace(",44", ",-" + "9" * 5000), 2, "is negative"),
    "non-number": (HEADER + ROW.replace("374", "many"), 2, "ContextTokens='many' is no whole number"),
    "NaN": (HEADER + ROW.replace("374", "nan"), 2, "ContextTokens='nan' is no whole number"),
    "float": (HEADER + ROW.replace("374", "3.5"), 2, "ContextTokens='3.5' is no whole number"),
    "underscore": (HEADER + ROW.replace("374", "3_7"), 2, "is no whole number"),
    "other digits": (HEADER + ROW.replace("374", "٣٧٤"), 2, "is no whole number"),
    "nothing": (HEADER + ROW.replace("374", ""), 2, "ContextTokens='' is no whole number"),
    "above int32": (HEADER + ROW.replace("374", str(2**31)), 2, "ContextTokens=2147483648 exceeds 2147483641"),
    "5000 digits": (HEADER + ROW.replace("374", "9" * 5000), 2, "exceeds"),
    "sum above int32": (
        HEADER + ROW.replace("374", str(LARGEST_LENGTH)), 2, "ContextTokens + GeneratedTokens=2147483685 exceeds",
    ),
    "bad timestamp": (HEADER + ROW.replace("18:15", "25:15"), 2, "bad TIMESTAMP '2023-11-16 25:15:46.6805900'"),
    "week date": (HEADER + ROW.replace("2023-11-16 18:15:46.6805900", "2023-W46-4"), 2, "bad TIMESTAMP"),
    "some with zone": (HEADER + ROW + "2023-11-16 18:15:46+00:00,1,1\n", 3, "only some lines have a time zone"),
    "NUL": (HEADER.encode() + ROW.encode() + b"\x7fELF\0\0\n", 3, "binary junk: a NUL byte"),
    "no UTF-8": (HEADER.encode() + b"\xff\xfe,1,1\n", 2, "binary junk: byte 0xff is no UTF-8 text"),
    "bad JSON": (LINE + LINE[:30] + "\n" + LINE, 2, "bad JSON"),
    "deep JSON": (LINE + "[" * 100_000 + "\n", 2, "bad JSON"),
    "huge JSON": (LINE + LINE.replace("10", "9" * 5000), 2, "bad JSON"),
    "list": (LINE + "\n[1, 2]\n", 3, "[1, 2] is no JSON object"),
    "missing key": (LINE.replace("input_length", "length"), 1, "missing key input_length"),
    "missing keys": ("{}", 1, "missing key timestamp, input_length, output_length"),
    "JSON negative": (LINE.replace("10", "-1"), 1, "input_length=-1 is negative"),
    "JSON NaN": (LINE.replace("10", "NaN"), 1, "input_length=nan is no whole number"),
    "JSON bool": (LINE.replace("10", "true"), 1, "input_length=True is no whole number"),
    "JSON float": (LINE.replace("10", "10.0"), 1, "input_length=10.0 is no whole number"),
    "JSON string": (LINE.replace("10", '"10"'), 1, "input_length='10' is no whole number"),
    "JSON null": (LINE.replace("10", "null"), 1, "input_length=None is no whole number"),
    "JSON above int32": (LINE.replace(": 5", f": {2**31}"), 1, "output_length=2147483648 exceeds"),
    "JSON timestamp": (LINE.replace(": 0,", ': "now",'), 1, "bad timestamp 'now'"),
    "JSON timestamp NaN": (LINE.replace(": 0,", ": NaN,"), 1, "bad timestamp nan"),
    "JSON timestamp inf": (LINE.replace(": 0,", ": 1e999,"), 1, "bad timestamp inf"),
    "JSON timestamp bool": (LINE.replace(": 0,", ": false,"), 1, "bad timestamp False"),
    "JSON timestamp negative": (LINE.replace(": 0,", ": -1,"), 1, "bad timestamp -1"),
    "JSON timestamp huge": (LINE.replace(": 0,", f": {10**400},"), 1, "bad timestamp 1000"),
    "JSON hash_ids": (LINE.replace("[0, 1]", "[0, 1.5]"), 1, "hash_ids=[0, 1.5] is no list of whole numbers"),
    "JSON hash_ids no list": (LINE.replace("[0, 1]", "7"), 1, "hash_ids=7 is no list of whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_trace_names_file_and_line(tmp_path: Path, case: str) -> None:
    """Junk must not become requests, nor a traceback."""
    text, line, message = BAD[case]
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200
    assert (caught.value.path, caught.value.line) == (str(path), line)


def test_junk_in_a_jsonl_is_not_taken_for_csv(tmp_path: Path) -> None:
    """Where the first line tells nothing, the name does."""
    with pytest.raises(TraceError, match=r":1: bad JSON"):
        read_trace(written(tmp_path, "hello\n", "trace.jsonl"))
    with pytest.raises(TraceError, match=r":1: 5 is no JSON object"):
        read_trace(written(tmp_path, "5\n", "trace.jsonl"))


def test_missing_file() -> None:
    """The system's own error, which names the file."""
    with pytest.raises(FileNotFoundError):
        read_trace("no/such/trace.csv")
