"""Test that `zos parity` finds a wrong element of a tail and of a block view, and that its rounds have every kind of either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import zos
from zos.block_view import OUTPUTS
from zos.cli import parity_batches, parity_round
from zos.cli.oracle_table import FINISHED, PAUSED
from zos.cli.oracle_views import expected_block_view, expected_tail
from zos.cli.setups import SETUPS
from zos.service import MetadataService

ROUNDS = 60  # some 30,000 cases of the setup below
MOST_TURNS = 8
SETUP = replace(SETUPS[0], snapshot_every=0)  # boundaries would leave few long chunks
TAIL_OUTPUTS = tuple(field.name for field in fields(zos.PrefillTail))
Wrong = Callable[..., Any]


def rounds(seed: int) -> None:
    """Run random rounds of a setup of the model family's sizes."""
    rig = parity_round.Rig.make(SETUP, ("cpu",))
    for number in range(ROUNDS):
        parity_round.Round(rig, np.random.default_rng([seed, number]), judged=True).run()


def first_mismatch(seed: int, monkeypatch: pytest.MonkeyPatch, method: str, wrong: Wrong) -> str:
    """What the first round to fail says, with a method of the service replaced; as it is, none fails."""
    monkeypatch.setattr(MetadataService, method, wrong)
    with pytest.raises(parity_round.Mismatch) as found:
        rounds(seed)
    return str(found.value)


def spoil_last(tensor: torch.Tensor) -> None:
    """Raise the last element by one, where there is any."""
    if tensor.numel() > 0:
        tensor.view(-1)[-1] += 1


@pytest.mark.parametrize("name", TAIL_OUTPUTS)
def test_a_wrong_tail_is_a_mismatch(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """An output of the tail that is not compared could be anything on the device."""
    prepare = MetadataService.prepare_prefill

    def wrong(*arguments: Any) -> zos.PrefillMetadata:
        metadata = prepare(*arguments)
        if metadata.tail is not None:
            spoil_last(getattr(metadata.tail, name))
        return metadata

    found = first_mismatch(seed, monkeypatch, "prepare_prefill", wrong)
    assert found.startswith(f"prepare_prefill: cpu: tail.{name}: 1 of ")


@pytest.mark.parametrize("name", TAIL_OUTPUTS)
def test_a_tail_nobody_asked_for(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A prefill without tail=True that writes one all the same costs its step a launch, and may be in a capture's way."""
    prepare = MetadataService.prepare_prefill

    def wrong(service: MetadataService, slot: int, full_index: bool, tail: bool) -> zos.PrefillMetadata:
        metadata = prepare(service, slot, full_index, tail)
        stored = service.slot_prefill_metadata(slot, service.max_batch, True, True).tail
        if not tail and stored is not None:
            getattr(stored, name).zero_()
        return metadata

    found = first_mismatch(seed, monkeypatch, "prepare_prefill", wrong)
    assert found.startswith(f"prepare_prefill: cpu wrote tail.{name} beyond its 0 elements")


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_wrong_block_view_is_a_mismatch(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """An output of the view that is not compared could be anything on the device."""
    view_block = MetadataService.view_block

    def wrong(*arguments: Any) -> zos.BlockView:
        view = view_block(*arguments)
        spoil_last(getattr(view, name))
        return view

    assert first_mismatch(seed, monkeypatch, "view_block", wrong).startswith(f"view_block: cpu: {name}: 1 of ")


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_view_that_writes_beyond_its_batch(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """An element behind the batch's rows may be another batch's, of a graph that is still to run."""
    view_block = MetadataService.view_block

    def wrong(service: MetadataService, metadata: Any, *arguments: Any) -> zos.BlockView:
        view = view_block(service, metadata, *arguments)
        prefill = isinstance(metadata, zos.PrefillMetadata)
        storage = parity_batches.PrefillBatch.storage if prefill else parity_batches.DecodeBatch.storage
        whole = storage(service, metadata.slot).block_view
        assert whole is not None
        getattr(whole, name)[len(view.positions) :] = 0
        return view

    assert first_mismatch(seed, monkeypatch, "view_block", wrong).startswith(
        f"view_block: cpu wrote {name} beyond its "
    )


def test_rounds_reach_every_kind(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Agreement says nothing of rows that no round has: each kind of tail, and each reason for a block or for none."""
    met: Counter[str] = Counter()
    window, step, ring = SETUP.geometry.window, SETUP.geometry.tokens_per_step, SETUP.geometry.ring

    def tail(oracle: Any, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = expected_tail(oracle, out)
        for row, (state_id, _, q_start, q) in enumerate(out["tickets"].tolist()):
            if q <= 0:
                continue
            prompt_end, places = oracle.records[state_id]["prompt_end"], np.diff(found["cu_seqlens_q"])[row]
            prefilling, valid_start = q_start < prompt_end, oracle.records[state_id]["swa_valid_start"]
            met["no tail"] += places == 0
            met["skips"] += prefilling and 0 < places < q
            met["begins within the tail"] += prefilling and q_start > prompt_end - window
            met["history cut at the prompt's last window"] += valid_start < found["swa_valid_start"][row] < q_start
            met["decode row"] += not prefilling and q <= step
            met["chunk without a prompt"] += not prefilling and step < q <= window
            met["that skips"] += not prefilling and q > window
        met["padding"] += found["num_tokens"][0] < len(found["positions"])
        return found

    def block(oracle: Any, tickets: list[list[int]], num_kept: list[int] | None) -> dict[str, np.ndarray]:
        found = expected_block_view(oracle, tickets, num_kept)
        for row, (state_id, generation, q_start, q) in enumerate(tickets):
            if q <= 0:
                continue
            record, length = oracle.records[state_id], found["swa_len"][row * step]
            mine, prefilling = record["generation"] == generation, q_start < record["prompt_end"]
            met["block"] += length > 0
            met["block of a full window"] += length == window + step
            met["block around the ring's end"] += (
                length > 0 and found["swa_write_slot"][row * step] % ring > ring - step
            )
            met["block behind a chunk"] += length > 0 and prefilling and num_kept is not None
            met["paused"] += mine and length > 0 and record["phase"] == PAUSED
            met["finished"] += mine and record["phase"] == FINISHED
            met["replaced"] += not mine
            met["too many kept"] += mine and not prefilling and num_kept is not None and num_kept[row] > q
            met["negative"] += mine and not prefilling and num_kept is not None and num_kept[row] < 0
        return found

    monkeypatch.setattr(parity_batches, "expected_tail", tail)
    monkeypatch.setattr(parity_round, "expected_block_view", block)
    for more in range(MOST_TURNS):  # the rare ones take their time
        rounds(seed + more)
        if all(met.values()):
            break
    assert all(met.values()), met
