"""Test that `zos parity` compares what it says, repeats from its seed, and fails when a path is wrong."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from zos.cli import oracle_table, parity_round
from zos.cli.cases import forge_tickets, random_edits, random_result, random_table
from zos.cli.compare import POISON, poison
from zos.cli.main import main
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.parity_batches import Batch, DecodeBatch, PrefillBatch
from zos.cli.setups import SETUPS, Setup
from zos.metadata import PrefillMetadata, StepMetadata
from zos.service import MetadataService
from zos.table import Phase

ROUNDS = 40  # some 20,000 cases of the first setup
PREFILL_OUTPUTS = ("swa_load_plan", "last_token_index", "kv_swa_full_index")  # that a decode batch has not
COLUMN = {name: place for place, name in enumerate(oracle_table.COLUMNS)}


def test_all_paths_agree(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """No random case tells the paths of this machine and the oracle apart."""
    code = main(["parity", "--cases", "20000", "--seed", str(seed)])
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
            metadata.swa_len[-1] = POISON
        elif spoiled == "beyond" and metadata.tokens < largest:
            service.slot_metadata(slot, service.max_batch, largest).swa_len[metadata.tokens] = 0
        return metadata

    monkeypatch.setattr(MetadataService, "prepare", wrong)
    assert main(["parity", "--cases", "500", "--seed", "2", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    expected = "prepare: cpu: swa_len: 1 of " if spoiled == "unwritten" else "prepare: cpu wrote swa_len beyond its "
    assert expected in printed


def spoil_prefill(metadata: PrefillMetadata, fault: str) -> None:
    """Plant a fault into what a prefill prepared, where it has a place for it."""
    if fault == "swa_load_plan":
        segments = metadata.swa_load_plan.view(-1, 4)
        segments[segments[:, 0] >= 0, 1] += 1
    elif fault == "last_token_index":
        metadata.last_token_index[metadata.last_token_index >= 0] -= 1
    elif fault == "kv_swa_full_index" and metadata.kv_swa_full_index is not None:
        full, length = metadata.kv_swa_full_index, metadata.swa_len
        short = torch.nonzero((length > 0) & (length < full.shape[1])).flatten()
        full[short, length[short].long()] = metadata.cu_seqlens_q[-1]  # one key more than the token sees


def first_mismatch(seed: int) -> str:
    """What the first round to fail says, of some thousand cases of the model family's sizes."""
    rig = parity_round.Rig.make(SETUPS[0], ("cpu",))
    with pytest.raises(parity_round.Mismatch) as found:
        for number in range(ROUNDS):
            parity_round.Round(rig, np.random.default_rng([seed, number]), judged=True).run()
    return str(found.value)


@pytest.mark.parametrize("fault", PREFILL_OUTPUTS)
def test_a_wrong_prefill_is_a_mismatch(fault: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A history read from the wrong ring slot, logits of the wrong token, an index beyond the row: each is found."""
    prepare = MetadataService.prepare_prefill

    def wrong(*arguments: Any) -> PrefillMetadata:
        metadata = prepare(*arguments)
        spoil_prefill(metadata, fault)
        return metadata

    monkeypatch.setattr(MetadataService, "prepare_prefill", wrong)
    assert first_mismatch(seed).startswith(f"prepare_prefill: cpu: {fault}: ")


@pytest.mark.parametrize("name", PREFILL_OUTPUTS)
def test_a_prefill_that_writes_beyond_its_batch(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """An element behind the batch's rows, or of an output that was not asked for, is found whatever it held before."""
    prepare = MetadataService.prepare_prefill

    def wrong(service: MetadataService, slot: int, full_index: bool, tail: bool) -> PrefillMetadata:
        metadata = prepare(service, slot, full_index, tail)
        stored, asked = service.slot_prefill_metadata(slot, service.max_batch, True), getattr(metadata, name)
        getattr(stored, name)[0 if asked is None else len(asked) :] = 0
        return metadata

    monkeypatch.setattr(MetadataService, "prepare_prefill", wrong)
    assert first_mismatch(seed).startswith(f"prepare_prefill: cpu wrote {name} beyond its ")


@pytest.mark.parametrize("kind", [DecodeBatch, PrefillBatch])
def test_poison_covers_every_output(kind: type[Batch], seed: int) -> None:
    """An output left out of the poison, and of the comparison with it, could stay unwritten and look right."""
    setup = SETUPS[1]  # with token ids and several compression rings
    service = setup.service("cpu")
    kind.draw(np.random.default_rng(seed), setup).set_on(service, slot=0)
    stored = kind.storage(service, 0)
    poison(stored)
    for field in fields(stored):
        value = getattr(stored, field.name)
        for tensor in value.values() if field.name.startswith("compression_") else [value]:
            if isinstance(tensor, torch.Tensor) and field.name != "state_ids":  # which prepare only reads
                assert (tensor == POISON).all(), field.name


def test_a_chunk_that_counts_twice_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A result of a chunk that moves its sequence twice is found in the table."""
    commit = MetadataService.commit

    def wrong(service: MetadataService, metadata: StepMetadata, *arguments: Any) -> None:
        q_start, tickets = service.table.q_start.clone(), metadata.tickets.clone()
        commit(service, metadata, *arguments)
        marks = metadata.marks.clone()
        states = tickets[:, 0].clamp(min=0).long()
        moved = (service.table.q_start != q_start)[states] & (service.table.phase[states] == Phase.LIVE)
        chunks = moved & (tickets[:, 3] > service.geometry.tokens_per_step)
        metadata.tickets[:, 2] = service.table.q_start[states]
        metadata.tickets[~chunks, 0] = -1
        commit(service, metadata, tickets[:, 3].contiguous())
        metadata.tickets.copy_(tickets)
        metadata.marks.copy_(marks)

    monkeypatch.setattr(MetadataService, "commit", wrong)
    assert re.match("(commit|repeat): cpu: records: .* first at", first_mismatch(seed))


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
    for kind in (DecodeBatch, PrefillBatch) * 40:
        records, _ = random_table(rng, SETUPS[0])
        phases |= set(records[:, COLUMN["phase"]].tolist())
        records[:, COLUMN["error"]] = 0
        oracle.load_records(records)
        batch = kind.draw(rng, SETUPS[0])
        tickets = batch.expected(oracle, batch.device_ids.tolist())["tickets"]
        if rng.random() < 0.5:
            tickets = forge_tickets(rng, SETUPS[0], tickets, oracle.records_array())
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


def test_rounds_reach_every_rule_of_a_prefill(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Chunks past the ring, at every limit, deferred, in error, and moved on by the device before they come again."""
    met: Counter[str] = Counter()
    chunk_ends: dict[int, int] = {}  # state -> q_start to which a chunk's commit moved it, in this round
    prepare, commit, load = PrefillOracle.prepare_prefill, PrefillOracle._commit_row, PrefillOracle.load_records

    def preparing(oracle: PrefillOracle, state_ids: Any, full_index: bool) -> dict[str, np.ndarray]:
        before = oracle.counters["deferred"]
        out = prepare(oracle, state_ids, full_index)
        lengths, live = out["seqlens_q"], out["token_row"] >= 0
        met["longer than the ring"] += bool((lengths > oracle.ring).any() and (out["swa_write_slot"][live] == -1).any())
        met["as long as may be"] += bool((lengths == oracle.max_prefill_tokens).any())
        met["to the last position"] += bool((out["seqlens_k"] == 2**31 - 1).any())
        met["three segments"] += bool((out["swa_load_plan"][:, 2, 3] > 0).any())
        met["deferred"] += oracle.counters["deferred"] > before
        met["a chunk after a chunk"] += any(
            chunk_ends.get(s) == q_start for s, _, q_start, _ in out["tickets"].tolist()
        )
        met["without the full index"] += not full_index
        return out

    def committing(oracle: PrefillOracle, state_id: int, q: int, *arguments: Any) -> None:
        record = oracle.records[state_id]
        q_start, prefilling = record["q_start"], record["q_start"] < record["prompt_end"]
        commit(oracle, state_id, q, *arguments)
        moved = q > oracle.tokens_per_step and record["q_start"] > q_start
        if moved:
            chunk_ends[state_id] = record["q_start"]
        met["chunk of a prompt"] += moved and prefilling
        met["chunk without a prompt"] += moved and not prefilling
        met["chunk not kept whole"] += record["error"] == oracle_table.CHUNK_NOT_KEPT_WHOLE

    def loading(oracle: PrefillOracle, records: np.ndarray) -> None:
        chunk_ends.clear()
        load(oracle, records)

    monkeypatch.setattr(PrefillOracle, "prepare_prefill", preparing)
    monkeypatch.setattr(PrefillOracle, "_commit_row", committing)
    monkeypatch.setattr(PrefillOracle, "load_records", loading)
    setup = replace(SETUPS[0], snapshot_every=0)  # boundaries would leave few chunks as long as may be
    rig = parity_round.Rig.make(setup, ("cpu",))
    for number in range(ROUNDS):
        parity_round.Round(rig, np.random.default_rng([seed, number]), judged=True).run()
    assert all(met.values()), met


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.geometry.window}-{setup.token_layout}")
def test_edits_are_legal(setup: Setup, seed: int) -> None:
    """The service accepts every generated edit: a refusal in a round would end a run for no fault."""
    rng = np.random.default_rng(seed)
    service = setup.service("cpu")
    for _ in range(20):
        for method, arguments, keywords in random_edits(rng, setup):
            getattr(service, method)(*arguments, **keywords)
        service.flush()
