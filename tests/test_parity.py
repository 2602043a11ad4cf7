"""Test that `zos parity` compares what it says, repeats from its seed, and fails when a path is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zos.cli import oracle_table, parity_round
from zos.cli.cases import forge_tickets, random_edits, random_result, random_table
from zos.cli.main import main
from zos.cli.parity_batches import DecodeBatch
from zos.cli.setups import SETUPS, Setup
from zos.service import MetadataService

COLUMN = {name: place for place, name in enumerate(oracle_table.COLUMNS)}


def test_all_paths_agree(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """No random case tells the paths of this machine and the oracle apart."""
    code = main(["parity", "--cases", "5000", "--seed", str(seed)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"\nseed {seed}; paths: oracle, cpu" in f"\n{printed}"
    assert printed.rstrip().endswith("against the oracle; 0 mismatches")


@pytest.mark.gpu
def test_gpu_agrees_where_the_oracle_is_not_asked(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """With --oracle-every the device is still held against Numba in every round."""
    arguments = [
        "parity",
        "--device",
        "cuda",
        "--cases",
        "50000",
        "--oracle-every",
        "10",
        "--seed",
        str(seed),
    ]
    assert main(arguments) == 0, capsys.readouterr().out
    assert "paths: oracle, cpu, cuda" in capsys.readouterr().out


def spoil_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every commit leave one record wrong."""
    commit = MetadataService.commit

    def wrong(service: MetadataService, *arguments: Any) -> None:
        commit(service, *arguments)
        service.table.head[3] += 1

    monkeypatch.setattr(MetadataService, "commit", wrong)


def test_a_wrong_path_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault exits 1 and prints the arguments that show it again, with place and both values."""
    spoil_commit(monkeypatch)
    assert main(["parity", "--cases", "2000", "--seed", "1", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = next(line for line in lines if line.startswith("mismatch (--seed 1 --round "))
    assert "records: 1 of " in found and "first at [3, 8]" in found
    number = found.split("--round ")[1].split(")")[0]
    assert main(["parity", "--seed", "1", "--round", number, "--device", "cpu"]) == 1
    assert found in capsys.readouterr().out


def test_paths_are_compared_without_the_oracle() -> None:
    """In a round that the oracle sits out, a second path is held against the first (both on the CPU here)."""
    setup = SETUPS[0]
    rig = parity_round.Rig(setup, {"cpu": setup.service("cpu"), "twin": setup.service("cpu")}, setup.oracle())
    parity_round.Round(rig, np.random.default_rng(4), judged=False).run()
    original = rig.services["twin"].commit

    def wrong(*arguments: Any) -> None:
        original(*arguments)
        rig.services["twin"].table.head[3] += 1

    rig.services["twin"].commit = wrong  # type: ignore[method-assign]
    with pytest.raises(parity_round.Mismatch, match=r"(commit|repeat): twin: records: 1 of .* first at \[3, 8\]"):
        for number in range(100):
            parity_round.Round(rig, np.random.default_rng(number), judged=False).run()


@pytest.mark.parametrize("spoiled", ["unwritten", "beyond"])
def test_poison_shows(spoiled: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An element left unwritten and one written past the view are both found, whatever they held before."""
    prepare = MetadataService.prepare

    def wrong(service: MetadataService, slot: int = 0) -> Any:
        metadata = prepare(service, slot)
        largest = service.max_batch * service.geometry.tokens_per_step
        if spoiled == "unwritten" and metadata.tokens > 0:
            metadata.swa_len[-1] = parity_round.POISON
        elif spoiled == "beyond" and metadata.tokens < largest:
            service.slot_metadata(slot, service.max_batch, largest).swa_len[metadata.tokens] = 0
        return metadata

    monkeypatch.setattr(MetadataService, "prepare", wrong)
    assert main(["parity", "--cases", "500", "--seed", "2", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    expected = "prepare: cpu: swa_len: 1 of " if spoiled == "unwritten" else "prepare: cpu wrote swa_len beyond its "
    assert expected in printed


def test_a_failure_names_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside a round, such as a failed launch, tells how to come back to it."""

    def fail(*arguments: Any) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(MetadataService, "commit", fail)
    with pytest.raises(RuntimeError, match="launch failed") as raised:
        main(["parity", "--cases", "5000", "--seed", "3", "--device", "cpu"])
    assert raised.value.__notes__[0].startswith("zos parity --seed 3 --round ")


def test_seconds_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """--seconds alone ends a run, and a run without --seed prints the one it chose."""
    assert main(["parity", "--seconds", "0.001", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.split(";")[0].removeprefix("seed ").isdecimal()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--cases", "0"], "'0' is no whole number of 1 or more"),
        (["--cases", "many"], "'many'"),
        (["--seed", "-1"], "--seed"),
        (["--seconds", "nan"], "'nan' is no number above 0"),
        (["--seconds", "-1"], "--seconds"),
        (["--oracle-every", "0"], "--oracle-every"),
        (["--oracle-every", "2", "--device", "cpu"], "--oracle-every needs a second path"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_bad_options(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option is one line that names it, and exit code 2."""
    try:
        code: object = main(["parity", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    complaint = capsys.readouterr().err
    assert named in complaint and complaint.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking for a GPU that is not there must not quietly compare less."""
    assert main(["parity", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_cases_reach_every_rule(seed: int) -> None:
    """The generator meets every phase, error and counter, so that agreement on it says something."""
    rng = np.random.default_rng(seed)
    oracle = SETUPS[0].oracle()
    errors: set[int] = set()
    phases: set[int] = set()
    for _ in range(40):
        records, _ = random_table(rng, SETUPS[0])
        phases |= set(records[:, COLUMN["phase"]].tolist())
        records[:, COLUMN["error"]] = 0
        oracle.load_records(records)
        batch = DecodeBatch.draw(rng, SETUPS[0])
        tickets = oracle.prepare(batch.device_ids, max_tokens=batch.max_tokens)["tickets"]
        if rng.random() < 0.5:
            tickets = forge_tickets(rng, SETUPS[0], batch.device_ids, tickets, oracle.records_array())
        result = random_result(rng, SETUPS[0], tickets)
        for _ in range(2):
            oracle.commit(tickets, result.num_kept, result.finished)
        for state_id in range(0, SETUPS[0].capacity, 2):
            oracle.reset(state_id)
        oracle.commit(tickets, result.num_kept)
        errors |= {record["error"] for record in oracle.records}
    assert phases >= {0, 1, 2, 3, 4}
    assert errors == set(range(9))
    assert all(count > 0 for count in oracle.counters.values()), oracle.counters


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.geometry.window}-{setup.token_layout}")
def test_edits_are_legal(setup: Setup, seed: int) -> None:
    """The service accepts every generated edit: a refusal in a round would end a run for no fault."""
    rng = np.random.default_rng(seed)
    service = setup.service("cpu")
    for _ in range(20):
        for method, arguments, keywords in random_edits(rng, setup):
            getattr(service, method)(*arguments, **keywords)
        service.flush()
