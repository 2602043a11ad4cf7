"""What fuzzing shares: runs for a time budget, a watch for hangs and for files that nobody asked for, and values of every kind.

ZOS_FUZZ_SECONDS is the budget of all properties together, with fresh examples; without it (CI) few, derandomised ones are run.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("ZOS_FUZZ_SECONDS", "0"))
PROPERTIES = 7  # that share the time, on a CPU: calls of `fuzz` in test_outside_*.py
LONGEST_EXAMPLE_S = 20
EXAMPLES_A_ROUND = 300  # of a run by time
NAMED = (ValueError, IndexError, TypeError)  # and what zos.errors derives from them


def fuzz(check: Callable[..., None], examples: int, *strategies: st.SearchStrategy[Any]) -> None:
    """Check a property on examples: so many, or for its share of ZOS_FUZZ_SECONDS."""

    def watched(values: tuple[Any, ...]) -> None:
        with ends():
            check(*values)

    checked = settings(
        max_examples=EXAMPLES_A_ROUND if SECONDS else examples,
        derandomize=not SECONDS,
        deadline=None,  # that of `ends` also ends what hangs
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(st.tuples(*strategies))(watched))
    until = time.monotonic() + SECONDS / PROPERTIES
    checked()
    while time.monotonic() < until:
        checked()


@contextmanager
def ends(seconds: float = LONGEST_EXAMPLE_S) -> Iterator[None]:
    """Fail what takes longer, and end the process where even that does not come through: in a kernel that never returns."""

    def late(number: int, frame: FrameType | None) -> NoReturn:
        raise AssertionError(f"does not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder (None) below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextmanager
def files_stay(folder: Path, *but: str) -> Iterator[None]:
    """Fail where a file below a folder appears, goes or changes, but those named."""
    before = contents(folder)
    yield
    after = contents(folder)
    touched = {name for name, content in before.items() if name not in after or after[name] != content}
    touched |= after.keys() - before.keys()
    assert touched <= set(but), f"touched {sorted(touched - set(but))}"


# ---- bytes and values ----------------------------------------------------------------------------------------------------------


def edited(original: bytes) -> st.SearchStrategy[bytes]:
    """The same bytes after a few edits: pieces exchanged, cut out, doubled, moved, the end cut off."""

    @st.composite
    def draw_edited(draw: Any) -> bytes:
        data, in_place = original, draw(st.booleans())  # then nothing behind an edit moves
        for _ in range(draw(st.integers(1, 4))):
            begin = draw(st.integers(0, len(data)))
            end = min(len(data), begin + draw(st.one_of(st.integers(0, 8), st.integers(0, 99))))
            piece = data[begin:end]
            others = [st.binary(max_size=12), st.sampled_from(WORDS), st.just(piece * 2), st.just(b"")]
            same = st.binary(min_size=len(piece), max_size=len(piece))
            data = data[:begin] + draw(same if in_place else st.one_of(others)) + data[end:]
        return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 7)) == 0 else data

    return draw_edited()


WORDS = (
    *(b"\n", b"\r\n", b"\r", b",", b'"', b"{", b"}", b"[", b"]", b"null", b"NaN", b"-Infinity", b"1e999", b"-1", b"0"),
    *(b"2147483647", b"2147483648", b"9" * 400, b"\0", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x0c", b"\x1c"),
    *(b"hash_ids", b"timestamp", b"TIMESTAMP", b"ContextTokens", b"2023-11-16 18:15:46", b"9999-12-31 23:59:59.9"),
    *(b"0001-01-01 00:00:00+23:59", b"+00:00", b"true", b"\\ud800", b'{"a":' * 50),
)
WHOLE = (-(2**63) - 1, -(2**31) - 1, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 64, 2**31, 2**32 + 1, 2**63, 2**70)


NASTY = (  # of which every parameter gets each
    *(None, "x", b"", math.nan, 1.5, 2j, [], [[1]], {}, object(), -1, 2**70, np.array([1, 2]), np.float32(2)),
    *(torch.tensor([1, 2]), torch.tensor(2.5), torch.zeros(0), torch.ones(1, device="meta", dtype=torch.uint8)),
)


def anything() -> st.SearchStrategy[Any]:
    """Values of every kind that a call might be handed; no whole number that would ask for gigabytes."""
    scalars = st.one_of(
        st.sampled_from(WHOLE),
        st.sampled_from(WHOLE),
        st.floats(),
        st.none(),
        st.booleans(),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.sampled_from(
            [np.int64(3), np.uint8(2), np.float32(2), np.bool_(True), np.array(3), np.array([1, 2]), 2j, object()]
        ),
        st.builds(torch.tensor, st.sampled_from([1, 2.5, [1, 2], [[1]], [], True])),
    )
    return st.one_of(scalars, scalars, st.lists(scalars, max_size=5), st.dictionaries(st.integers(0, 3), scalars))
