"""Test that `zos audit` counts what a profiled loop did, on real exports of an H200, and names what is wrong with any other file.

`data/h200_clean.sqlite`: 20 steps of a DecodeLoop in NVTX ranges `zos.step`, nothing else. `data/h200_waits.sqlite`: the same, and
before each replay a copy of 64 bytes to the device; in every 4th step a kernel, a copy back and its stream synchronise, in every
5th a device synchronise, in every 3rd an event synchronise. Both keep only the
tables that hold rows of interest.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_cli import failure
from zos.cli import InputError
from zos.cli.audit import audit
from zos.cli.main import main
from zos.cli.nsys_export import read_export

DATA = Path(__file__).parent / "data"
CLEAN, WAITS = DATA / "h200_clean.sqlite", DATA / "h200_waits.sqlite"
STEPS = 20
RUNTIME, KERNEL = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"


def changed(tmp_path: Path, source: Path, *statements: str) -> Path:
    """A copy of an export after SQL statements."""
    path = tmp_path / "changed.sqlite"
    shutil.copy(source, path)
    path.chmod(0o644)
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    return path


def test_clean_run() -> None:
    """One graph launch a step and nothing else: 20 steps, their four kernels, times of the size that the bodies have."""
    found = audit(read_export(CLEAN))
    assert (found["steps"], found["found_by"], found["offences"]) == (STEPS, "NVTX ranges zos.step", [])
    assert found["per_step"] == {"graph launch": {"median": 1, "p99": 1, "max": 1}}
    kernels = {kernel["name"]: kernel["count"] for kernel in found["kernels"]}
    names = ("spin_kernel", "commit", "publish_results", "prepare_v4_decode_metadata")
    assert kernels == dict.fromkeys(names, STEPS)
    assert 46 < found["kernels"][0]["median_us"] < 47  # of a body of 90,000 cycles
    assert found["gpu_busy_us"]["median"] + found["gpu_idle_within_us"]["median"] == pytest.approx(51.6, abs=0.3)


def test_waits_are_counted() -> None:
    """Every deliberate wait and copy is an offence with its number; that of the profiler after the last step is none."""
    offences = audit(read_export(WAITS))["offences"]
    assert offences == [
        "kernel launch: 5 in 5 steps, first in step 0",
        "device synchronise: 4 in 4 steps, first in step 0",
        "stream synchronise: 5 in 5 steps, first in step 0",
        "event synchronise: 7 in 7 steps, first in step 0",
        "memcpy host to device, 64 B: 20 in 20 steps, first in step 0",
        "memcpy device to host, 64 B: 5 in 5 steps, first in step 0",
    ]


def test_gaps_against_the_database() -> None:
    """Gaps are those between the last kernel of a graph launch and the first of the next, straight from the tables."""
    with sqlite3.connect(CLEAN) as database:
        spans = database.execute(
            f"SELECT MIN(start), MAX(end) FROM {KERNEL} GROUP BY correlationId ORDER BY 1"
        ).fetchall()
    gaps = [(after[0] - before[1]) / 1e3 for before, after in itertools.pairwise(spans)]
    found = audit(read_export(CLEAN))
    assert found["gap_to_next_us"]["median"] == round(float(np.median(gaps)), 3)
    worst = sorted(range(len(gaps)), key=gaps.__getitem__)[::-1][:3]
    assert [gap["after_step"] for gap in found["worst_gaps"]] == worst
    assert found["worst_gaps"][0]["us"] == round(max(gaps), 3)
    assert "outside of CUDA 198" in found["worst_gaps"][0]["host"]  # the host slept


def test_without_ranges(tmp_path: Path) -> None:
    """Any engine's export: steps go from one graph launch to the next, with the same counts."""
    found = audit(read_export(changed(tmp_path, WAITS, "DROP TABLE NVTX_EVENTS")))
    assert (found["steps"], found["found_by"]) == (STEPS, "graph launches")
    by_launch = {offence.split(" in ")[0] for offence in found["offences"]}
    # Between the first launch and the last: what came before the first is in no step.
    assert "memcpy host to device, 64 B: 19" in by_launch and "event synchronise: 6" in by_launch


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        f"ALTER TABLE {KERNEL} DROP COLUMN demangledName",
        f"ALTER TABLE {KERNEL} DROP COLUMN mangledName",
        f"ALTER TABLE {KERNEL} ADD COLUMN somethingNew INT",
        "INSERT INTO NVTX_EVENTS (start, eventType, text) VALUES (5, 34, 'a mark, which has no end')",
    ],
)
def test_other_schemas(tmp_path: Path, statement: str) -> None:
    """Versions of Nsight Systems differ in what they write; the figures do not."""
    assert audit(read_export(changed(tmp_path, CLEAN, statement))) == audit(read_export(CLEAN))


def test_whole_graphs(tmp_path: Path) -> None:
    """Traced as whole graphs there are no kernels, and each replay is one span."""
    path = changed(
        tmp_path,
        CLEAN,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT MIN(start) AS start, MAX(end) AS end, correlationId "
        f"FROM {KERNEL} GROUP BY correlationId",
        f"DROP TABLE {KERNEL}",
    )
    found, whole = audit(read_export(path)), audit(read_export(CLEAN))
    assert found["gap_to_next_us"] == whole["gap_to_next_us"]
    assert found["gpu_idle_within_us"]["max"] == 0 and found["kernels"][0]["name"] == "graph"


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit codes and JSON; the export itself is left as it was."""
    before = WAITS.read_bytes()
    assert main(["audit", str(CLEAN), "--assert-zero-overhead"]) == 0
    assert "no offence" in capsys.readouterr().out
    assert main(["audit", str(WAITS), "--json", str(tmp_path / "out.json")]) == 0
    assert main(["audit", str(WAITS), "--assert-zero-overhead"]) == 1
    assert "offence: event synchronise: 7" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text()) == audit(read_export(WAITS))
    assert WAITS.read_bytes() == before and sorted(path.name for path in DATA.iterdir()) == [CLEAN.name, WAITS.name]


def test_steps_by_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A range that is not there is an error that lists those that are."""
    assert "no NVTX range forward" in failure(capsys, "audit", str(CLEAN), "--step", "forward")
    assert "ranges: zos.step" in failure(capsys, "audit", str(CLEAN), "--step", "forward")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE StringIds", "no table StringIds"),
        (f"ALTER TABLE {KERNEL} RENAME COLUMN start TO begin", f"table {KERNEL} has no column start"),
        (f"UPDATE {KERNEL} SET start = 'soon'", "from 'soon'"),
        (f"UPDATE {RUNTIME} SET correlationId = 'none'", "column correlationId holds 'none'"),
        (f"UPDATE {RUNTIME} SET end = start - 1", "has a row from"),
    ],
)
def test_not_an_export(tmp_path: Path, statement: str, message: str) -> None:
    """What cannot be read is named: table, column, value."""
    with pytest.raises(InputError, match=message):
        audit(read_export(changed(tmp_path, CLEAN, statement)))


def test_no_database(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Missing, empty, a folder, a text: one line each."""
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no database\n" * 100)
    for name in ("missing", "empty", "text", "."):
        assert str(tmp_path / name).rstrip("/.") in failure(capsys, "audit", str(tmp_path / name))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Truncated or with flipped bytes: figures or a named error, never a crash."""
    content = bytearray(CLEAN.read_bytes())
    for _ in range(data.draw(st.integers(0, 12))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "export.sqlite"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = audit(read_export(path))
    except InputError:
        return
    assert found["steps"] > 0
