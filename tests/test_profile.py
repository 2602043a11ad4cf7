"""Test that `zos profile` runs nsys as it must, leaves its files, and says what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import zos
from tests.test_cli import failure
from zos import nvtx
from zos.cli.audit import audit
from zos.cli.main import main
from zos.cli.nsys_export import read_export
from zos.cli.profile import find_nsys

DATA = Path(__file__).parent / "data"
STAND_IN = """#!{python}
import os, pathlib, shutil, subprocess, sys
words = sys.argv[1:]
pathlib.Path({log!r}).open("a").write(repr((words, os.environ.get("ZOS_NVTX"))) + "\\n")
out = words[words.index("-o") + 1]
if words[0] == "profile":
    if {mode!r} == "no report":
        sys.exit(1)
    pathlib.Path(out).write_text("a report")
    sys.exit(subprocess.run(words[words.index("-o") + 2 :]).returncode)
if {mode!r} == "no export":
    sys.exit("libdw.so.1: cannot open shared object file")
shutil.copy({export!r}, out)
"""


def stand_in(folder: Path, mode: str = "", export: str = "h200_waits.sqlite") -> tuple[Path, Path]:
    """A script in place of nsys, and where it notes how it was called."""
    nsys, log = folder / "nsys", folder / "log"
    nsys.write_text(STAND_IN.format(python=sys.executable, log=str(log), mode=mode, export=str(DATA / export)))
    nsys.chmod(0o755)
    return nsys, log


def profile(nsys: Path, out: Path, *command: str) -> list[str]:
    """Arguments of `zos profile`."""
    return ["profile", "--nsys", str(nsys), "--out", str(out), "--", *command]


def test_files_and_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command runs with ranges on; report, export, summaries and timeline lie in the folder and agree with the audit."""
    nsys, log = stand_in(tmp_path)
    out = tmp_path / "new" / "out"
    child = "import os; print('child', os.environ['ZOS_NVTX'])"
    assert main(profile(nsys, out, sys.executable, "-c", child)) == 0
    printed = capfd.readouterr().out
    assert "child 1" in printed and "offence: event synchronise: 7" in printed
    names = ["report.nsys-rep", "report.sqlite", "summary.json", "summary.md", "timeline.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert json.loads((out / "summary.json").read_text()) == audit(read_export(DATA / "h200_waits.sqlite"))
    assert "offence: event synchronise: 7" in (out / "summary.md").read_text()
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    words = log.read_text()
    for flag in ("'-s', 'none'", "'--cpuctxsw=none'", "'-t', 'cuda,nvtx'", "'--cuda-graph-trace=node'"):
        assert flag in words
    assert "cudaProfilerApi" not in words


def test_exit_code_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command that fails is audited all the same, and its exit code passed on."""
    nsys, _ = stand_in(tmp_path)
    assert main(profile(nsys, tmp_path / "out", sys.executable, "-c", "raise SystemExit(7)")) == 7
    assert "exit code 7" in capfd.readouterr().err


def test_no_nsys(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nsys: exit code 3, what to install, and the command does not run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("zos.cli.profile.ROOTS", ())
    monkeypatch.setattr("zos.cli.profile.find_nsys", lambda chosen: find_nsys(chosen, ()))
    mark = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    for arguments in (["profile", "--", *command], profile(tmp_path / "none", tmp_path / "out", *command)):
        assert main(arguments) == 3
        assert "install Nsight Systems" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(("mode", "message"), [("no report", "left no report"), ("no export", "libdw1")])
def test_nsys_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, message: str) -> None:
    """A report or an export that does not come is one line that names the libraries that nsys may lack."""
    nsys, _ = stand_in(tmp_path, mode)
    assert message in failure(capsys, *profile(nsys, tmp_path / "out", sys.executable, "-c", ""))


def test_no_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to run is an error of input."""
    assert "no command" in failure(capsys, *profile(stand_in(tmp_path)[0], tmp_path / "out"))


def test_nsys_is_found_in_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off PATH: the newest of Nsight Systems, then what comes with Nsight Compute; on PATH that one."""
    monkeypatch.setenv("PATH", "")
    expected = None
    for name in (
        "nsight-compute/2025.2.1/host/target-linux-x64/nsys",
        "nsight-systems/2024.1/bin/nsys",
        "nsight-systems/2025.3/bin/nsys",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
        expected = path
        assert find_nsys(None, (str(tmp_path),)) == expected
    nsys, _ = stand_in(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_nsys(None, (str(tmp_path),)) == nsys


def test_ranges_are_off_at_no_cost() -> None:
    """Without ZOS_NVTX the methods are the plain functions."""
    assert not nvtx.ENABLED
    for method in (zos.DecodeLoop._run_replay, zos.MetadataService.flush):
        assert not hasattr(method, "__wrapped__")


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is in one range, which ends also when it raises."""
    seen: list[str] = []
    monkeypatch.setattr(nvtx, "ENABLED", True)
    monkeypatch.setattr("torch.cuda.nvtx.range_push", seen.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: seen.append("end"))

    @nvtx.marked("zos.step")
    def step(number: int) -> float:
        return 1 / number

    assert step(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        step(0)
    assert seen == ["zos.step", "end", "zos.step", "end"]
