"""Test that `zos generate` and the example's loop give the dense twin's tokens, and that --check sees a difference."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_cli import failure
from zos.cli.main import main
from zos.metadata import PrefillMetadata
from zos.service import MetadataService
from zos.v4.config import V4Config
from zos.v4.dense import dense_forward
from zos.v4.generator import Generator
from zos.v4.model import V4Model

ROOT = Path(__file__).parents[1]
SIZES = ["--tokens", "12", "--batch", "2", "--chunk", "5"]


def figures(out: str) -> dict[str, str]:
    """The table's rows."""
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines() if not re.match(r"\d+:", line))


def test_texts_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str) -> None:
    """Each prompt's tokens stand in its line, in the order of the prompts, and are the dense twin's."""
    (tmp_path / "prompts").write_text("one more\nand the last\n", encoding="utf-8")
    options = ["--file", str(tmp_path / "prompts"), "--device", device, "--check", "--seed", "3", *SIZES]
    assert main(["generate", "first prompt", "é", *options]) == 0
    out = capsys.readouterr().out
    assert figures(out)["different from dense"] == "0 of 48"
    assert figures(out)["generated tokens"].startswith("48 ")
    ids = list(b"one more")
    model = V4Model(V4Config.tiny(), device, seed=3)
    for _ in range(12):
        ids.append(int(dense_forward(model, torch.tensor(ids, device=device)).logits[-1].argmax()))
    assert out.splitlines()[2] == "2: " + " ".join(map(str, ids[8:]))


def test_ids_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are taken as they are: those of a text's bytes give what the text gives, with drafts or without."""
    assert main(["generate", "--device", "cpu", "AB", *SIZES]) == 0
    text = capsys.readouterr().out.splitlines()[0]
    assert main(["generate", "--device", "cpu", "--ids", "--no-drafts", "65, 66", *SIZES]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == text
    assert figures(out)["accepted drafts per step"] == "0.000"


def test_tail(capsys: pytest.CaptureFixture[str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With consumers on the prompt's last window alone the tokens are those of a dense twin that sees no more."""
    asked = []

    def noting(svc: MetadataService, *arguments: object, tail: bool = False) -> PrefillMetadata:
        asked.append(tail)
        return prepare(svc, *arguments, tail=tail)

    prepare = MetadataService.prepare_prefill
    monkeypatch.setattr(MetadataService, "prepare_prefill", noting)
    prompt, options = "many more tokens than one window has " * 6, ["--device", device, "--check", "--chunk", "100"]
    assert main(["generate", prompt, "short", *options, *SIZES[:4], "--tail"]) == 0
    assert figures(capsys.readouterr().out)["different from dense"] == "0 of 24"
    assert len(asked) == 3 and all(asked)


def test_check_sees_a_wrong_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that cannot fail would prove nothing."""

    def run_and_spoil(generator: Generator) -> None:
        submitted = list(generator._waiting)
        original(generator)
        submitted[1].generated[7] ^= 1

    original = Generator.run
    monkeypatch.setattr(Generator, "run", run_and_spoil)
    assert main(["generate", "--device", "cpu", "--check", "AB", "CD", *SIZES]) == 1
    assert int(figures(capsys.readouterr().out)["different from dense"].split()[0]) >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompts"),
        ([""], "prompt 0 is empty"),
        (["--ids", "5 x"], "'5 x' is no list of token ids"),
        (["--ids", "5 256"], "256 is no token id below 256"),
        (["a", "--tokens", "0"], "--tokens"),
        (["--file", "/nowhere/prompts"], "/nowhere/prompts: No such file"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """One line that says what is wrong."""
    assert message in failure(capsys, "generate", *arguments)


def test_file_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are named, not shown as a traceback."""
    (tmp_path / "prompts").write_bytes(b"good\n\xff\xfe\n")
    assert "is no UTF-8 text" in failure(capsys, "generate", "--file", str(tmp_path / "prompts"))


def test_example(device: str) -> None:
    """The example's loop, made of the service's calls alone, finishes every prompt with the dense twin's tokens."""
    command = [sys.executable, "examples/generate_loop.py", "--device", device]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # a GPU's own python has no zos installed
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT, env=environment)
    assert found.returncode == 0, found.stderr
    lines = [re.fullmatch(r"('.*'): (\[.*\])", line) for line in found.stdout.splitlines()]
    texts = {ast.literal_eval(line[1]): ast.literal_eval(line[2]) for line in lines if line}
    assert len(texts) == 6
    model = V4Model(V4Config.tiny(), device, seed=1)
    for prompt, generated in texts.items():
        ids = torch.tensor([*prompt.encode(), *generated], device=device)
        assert dense_forward(model, ids).logits[len(prompt) - 1 : -1].argmax(1).tolist() == generated, prompt
