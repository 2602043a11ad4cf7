"""Test that the README's example does what it says, and that no page waits for its figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_examples() -> None:
    """They run one after the other as they stand (eagerly where there is no GPU) and print what their comments say."""
    loop, requests = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = [sys.executable, "-c", loop + requests]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "# 1100 FINISHED" in loop
    first, *records = found.stdout.splitlines()
    assert first == "1100 FINISHED", found.stderr
    kept, finished = (sum(int(line.split()[column]) for line in records) for column in (1, 2))
    assert (kept, finished) == (100 * 50, 100), found.stderr


def test_no_placeholders() -> None:
    """A figure that was never filled in is no figure."""
    for page in PAGES:
        assert not re.findall(r"\b[A-Z]+_(?:TABLE|FIGURES)\b", page.read_text()), page


def test_links_and_files_exist() -> None:
    """What a page links to, and every file that docs/structure.md names, is there."""
    for page in PAGES:
        for target in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    folders = [
        ROOT / name for name in ("zos", "zos/cli", "zos/v4", "device_kernels", "host_fallback", "tests", "docs", "")
    ]
    for name in set(re.findall(r"`([\w/]+\.(?:py|cu|cuh|cpp|md))`", (ROOT / "docs" / "structure.md").read_text())):
        assert any((folder / name).exists() for folder in folders), name


def test_structure_names_every_module() -> None:
    """A module that docs/structure.md does not name is one that a newcomer does not find."""
    text = (ROOT / "docs" / "structure.md").read_text()
    for folder in ("zos", "zos/cli", "zos/v4"):
        for path in (ROOT / folder).glob("[a-z]*.py"):
            assert f"`{path.name}`" in text, path


def test_guarantees_name_tests() -> None:
    """A promise whose test is gone would stand for nothing."""
    named = re.findall(r"`(\w+\.py)::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
