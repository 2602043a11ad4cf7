"""Test that prefix hits of a replay start from stored states where there are some, by bounded replay elsewhere, and are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zos.state_store
from tests.mooncake import MooncakeCluster
from tests.replays import AZURE, MOONCAKE, mooncake_trace, replay_figures
from zos.cli.dense_ring import RestoredPrefixes
from zos.cli.main import main
from zos.errors import StoreUnavailableError

LATER = 60_000  # ms, when all requests before are through
REQUESTS = [
    (0, 1600, 20, [1, 2, 3, 4]),  # stores 512, 1024, 1536
    (0, 1030, 9, [1, 2, 8]),  # in the same step: nothing is stored yet, so bounded replay from 1024 - 128
    (LATER, 2100, 20, [1, 2, 3, 5, 6]),  # from 1536; stores 2048
    (LATER, 1024, 7, [1, 2]),  # the whole prompt is a hit: from 512, so that tokens are left
    (LATER, 300, 5, [11]),
    (
        2 * LATER,
        2600,
        20,
        [1, 2, 3, 5, 6, 7],
    ),  # nothing is stored at 2560, so bounded replay from 2560 - 128; stores 2560
    (2 * LATER, 300, 5, [11]),  # a hit within a block: bounded replay from 300 - 128
    (3 * LATER, 700, 30, [1, 20]),  # from 512
    (3 * LATER, 600, 5),  # of no known prefix: nothing to store
]
FIGURES = {
    "states_stored": 5,
    "puts_failed": 0,
    "hits_restored": 3,
    "hits_without_state": 2,
    "gets_failed": 0,
    "hits_replayed": 3,
}
OPTIONS = ("--device=cpu", "--max-batch=4", "--max-prefill-tokens=1024")


def replayed(folder: Path, place: str, *options: str, code: int = 0) -> dict[str, dict[str, int]]:
    trace = mooncake_trace(folder, REQUESTS)
    return replay_figures(folder, trace, *OPTIONS, f"--store={place}", *options, code=code)


@pytest.fixture(params=["local", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return f"local:{tmp_path / 'states'}"
    cluster: MooncakeCluster = request.getfixturevalue("mooncake")
    cluster.clear()
    return cluster.place


@pytest.mark.parametrize("ring", [True, False])
def test_restored_and_replayed(tmp_path: Path, place: str, ring: bool) -> None:
    """Every hit is adopted the way that can be told from the trace, and every entry that is read afterwards is the right one."""
    found = replayed(tmp_path, place, *["--ring"] * ring)
    assert found["mismatches"] == 0 and (found["ring_entries_compared"] or 0) >= 10_000 * ring
    assert found["store"] == FIGURES
    saved = (1024 - 128) + 1536 + 512 + (2560 - 128) + (300 - 128) + 512
    assert (found["prefill"]["prefix_hits"], found["prefill"]["tokens_saved"]) == (6, saved)


def test_on_a_gpu(tmp_path: Path, device: str) -> None:
    """Both paths store and restore alike, inside captured graphs as well."""
    found = replayed(tmp_path, f"local:{tmp_path / 'states'}", "--ring", f"--device={device}")
    assert found["mismatches"] == 0 and found["store"] == FIGURES


def test_chunks(tmp_path: Path) -> None:
    """Longer chunks store less often; a hit then starts from the last end of a chunk below it."""
    found = replayed(tmp_path, f"local:{tmp_path / 'states'}", "--ring", "--chunk=1024")
    assert found["mismatches"] == 0
    assert found["store"]["hits_restored"] == 2 and found["store"]["states_stored"] == 2


def test_sample(tmp_path: Path) -> None:
    """A public trace: most hits find a state."""
    options = ("--device=cpu", "--limit=14", "--check=100", f"--store=local:{tmp_path / 'states'}")
    found = replay_figures(tmp_path, MOONCAKE, *options)
    assert found["mismatches"] == 0
    assert found["store"]["hits_restored"] > 0 and found["store"]["gets_failed"] == 0
    assert found["store"]["states_stored"] == len(list((tmp_path / "states").glob("*.state")))


def test_wrong_bytes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restore that leaves the ring as it is, or brings another position's entries, is a mismatch: bytes come from the store."""
    original = zos.state_store.remapped
    for broken in (lambda payload, *_: np.zeros(len(payload), np.uint8), lambda *a: np.roll(original(*a), 528)):
        with monkeypatch.context() as patch:
            patch.setattr(zos.state_store, "remapped", broken)
            found = replayed(tmp_path, f"local:{tmp_path / 'states'}", "--ring", code=1)
        assert found["mismatches"] > 0 and "dense model" in capsys.readouterr().err


def test_lost_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that the store evicted are missing: those hits start by bounded replay."""
    monkeypatch.setattr(zos.LocalStateStore, "_write", lambda *_: None)
    found = replayed(tmp_path, f"local:{tmp_path / 'states'}", "--ring")
    assert found["mismatches"] == 0
    assert (found["store"]["hits_restored"], found["store"]["hits_without_state"]) == (0, 5)


def test_failing_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that fails costs its hits their state and nothing else; what it said is printed once."""

    def fail(*_: object) -> None:
        raise StoreUnavailableError("gone")

    for method, count in (("_read", "gets_failed"), ("_write", "puts_failed")):
        with monkeypatch.context() as patch:
            patch.setattr(zos.LocalStateStore, method, fail)
            found = replayed(tmp_path, f"local:{tmp_path / method}", "--ring")
        assert found["mismatches"] == 0 and found["store"][count] > 0 and found["store"]["hits_restored"] == 0
        said = capsys.readouterr()
        assert said.err.count("StoreUnavailableError: gone") == 1 and "(failed: puts" in said.out


def test_store_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A place that cannot be opened is bad input, not a crash."""
    (tmp_path / "file").write_text("")
    trace = mooncake_trace(tmp_path, REQUESTS)
    assert main(["replay", str(trace), *OPTIONS, f"--store=local:{tmp_path / 'file'}"]) == 2
    assert "--store local:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--store=local:",), "neither local:DIRECTORY nor mooncake:HOST"),
        (("--store=redis:host",), "neither local:DIRECTORY nor mooncake:HOST"),
        (("--store=mooncake::1",), "neither local:DIRECTORY nor mooncake:HOST"),
        (("--store=mooncake:host:0",), "neither local:DIRECTORY nor mooncake:HOST"),
        (("--store=mooncake:host:1:2:3",), "neither local:DIRECTORY nor mooncake:HOST"),
        (("--store=local:x", "--chunk=500"), "--chunk 500 is no multiple of a block"),
        (("--store=local:x", "--max-prefill-tokens=300"), "--max-prefill-tokens 300 holds no block"),
        (("--store=local:x", "--churn"), "--store does not go with --churn"),
    ],
)
def test_options(options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --store cannot do is said before anything runs."""
    assert main(["replay", str(mooncake_trace(tmp_path, REQUESTS)), "--device=cpu", *options]) == 2
    assert text in capsys.readouterr().err


def test_trace_without_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Without block hashes there are no prefixes to be stored."""
    assert main(["replay", str(AZURE), "--device=cpu", "--store=local:x"]) == 2
    assert "needs a trace with hash_ids" in capsys.readouterr().err


def test_restored_prefixes(seed: int) -> None:
    """Below its boundary a restored life of a state holds what another wrote; later lives and later positions are its own."""
    restored = RestoredPrefixes(4)
    restored.add(2, 7, 1024, writer=3, writer_generation=5)
    state, generation, position = (
        np.array(values) for values in ([2, 2, 2, 3, 2], [7, 7, 9, 7, 6], [1023, 1024, 5, 5, 5])
    )
    writer, writer_generation = restored.writers(state, generation, position)
    assert writer.tolist() == [3, 2, 2, 3, 2] and writer_generation.tolist() == [5, 7, 9, 7, 6]
