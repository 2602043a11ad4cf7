"""Test that `zos` finds its commands, and that bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zos.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "examples" / "traces" / "azure_llm_2023_conv_sample.csv"


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must end with exit code 2 and one line on stderr; return that line."""
    try:
        code: int | str | None = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    return err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`zos --help` lists the command, and the command explains itself."""
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error names what there is."""
    assert "'replay', 'parity', 'layout', 'bench', 'generate', 'audit', 'profile'" in failure(capsys, "reply")
    assert "required: COMMAND" in failure(capsys)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--max-batch", value) for value in ("0", "-1", "x", "1.5", "1_0", "65537")),
        *(("--limit", value) for value in ("0", "-3", "x")),
        *(("--step-ms", value) for value in ("0", "-1", "nan", "inf", "x")),
        *(("--acceptance", value) for value in ("1.5", "-0.1", "nan", "x")),
        *(("--check", value) for value in ("0", "-1", "sometimes")),
        ("--seed", "x"),
        ("--layout", "dense"),
        ("--device", "tpu"),
        ("--plot", "run.pdf"),
    ],
)
def test_bad_option(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    """The message names the option and the value."""
    message = failure(capsys, "replay", SAMPLE, f"{option}={value}")
    assert message.startswith("zos replay: error: ")
    assert option in message and value in message


def test_unwritable_output_is_said_before_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Not after minutes of replay."""
    for option, name in (("--json", "run.json"), ("--plot", "run.png")):
        path = tmp_path / "missing" / name
        assert f"{path}: its folder does not exist" in failure(capsys, "replay", SAMPLE, option, path)


def test_missing_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No file, or a folder."""
    assert f"{tmp_path}/none.csv: No such file" in failure(capsys, "replay", tmp_path / "none.csv")
    assert f"{tmp_path}: Is a directory" in failure(capsys, "replay", tmp_path)


def test_bad_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """File and line, no traceback."""
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,x\n")
    message = failure(capsys, "replay", path)
    assert message == f"zos replay: error: {path}:2: GeneratedTokens='x' is no whole number\n"


def test_python_m_zos() -> None:
    """`python -m zos` is the console script."""
    command = [sys.executable, "-m", "zos", "replay", str(SAMPLE), "--limit", "3", "--device", "cpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""  # no progress bar where stderr is no terminal
    assert run.stdout.startswith("device ")
