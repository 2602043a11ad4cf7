"""Test that `zos parity` meets what mailboxes and ready queues can do, and finds a path that does it wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.twins import TAKEN
from zos.cli import parity_round
from zos.cli.oracle_queue import OracleSlot
from zos.cli.setups import SETUPS
from zos.edits import ANY_VERSION, StagedEdits
from zos.mailbox import IS_DEFERRED, IS_DUPLICATE, IS_ERROR, IS_FINISHED, IS_REFILLED, IS_STALE, StepRecord
from zos.service import MetadataService

ROUNDS = 60
SETUP = SETUPS[1]  # with token ids
FLAGS = (IS_FINISHED, IS_ERROR, IS_STALE, IS_DUPLICATE, IS_DEFERRED, IS_REFILLED)


def run_rounds(seed: int, judged: bool = True) -> None:
    rig = parity_round.Rig.make(SETUP, ("cpu",))
    for number in range(ROUNDS):
        parity_round.Round(rig, np.random.default_rng([seed, number]), judged).run()


def test_half_of_the_setups_have_mailboxes() -> None:
    """Those with and those without go different ways through commit."""
    assert abs(2 * sum(setup.records > 0 for setup in SETUPS) - len(SETUPS)) <= 1


def test_rounds_reach_every_rule_of_records(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every flag, both kinds of step, accepted and refused batches, entries passed over, mailboxes and queues that go round."""
    met: Counter[str] = Counter()
    commit, set_batch = OracleSlot.commit, OracleSlot.set_batch

    def committing(slot: OracleSlot, *arguments: Any) -> dict[str, np.ndarray]:
        taken = slot._taken
        record = commit(slot, *arguments)
        met.update({f"flag {flag}": int((record["flags"] & flag > 0).sum()) for flag in FLAGS})
        met["passed over"] += slot._taken - taken > (record["flags"] & IS_REFILLED > 0).sum()
        met["prefill" if record["prefill"] else "decode"] += 1
        met["kept tokens" if "kept_tokens" in record else "none"] += 1
        met["goes round"] += slot._steps > SETUP.records
        met["late"] += not record["prefill"] and slot.batch[: len(record["state_ids"])] != record["state_ids"].tolist()
        return record

    def setting(slot: OracleSlot, state_ids: Any) -> bool:
        accepted = set_batch(slot, state_ids)
        met["accepted" if accepted else "refused"] += 1
        return accepted

    monkeypatch.setattr(OracleSlot, "commit", committing)
    monkeypatch.setattr(OracleSlot, "set_batch", setting)
    for more in range(4):  # the rarest of them comes in one round of ten
        run_rounds(seed + more)
        if all(met.values()):
            break
    assert all(met.values()), met


def spoil_records(change: Callable[[StepRecord], dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Let records say something else where they have rows."""

    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        drain = MetadataService.drain

        def wrong(service: MetadataService, slot: int) -> list[StepRecord]:
            return [record._replace(**change(record)) for record in drain(service, slot)]

        monkeypatch.setattr(MetadataService, "drain", wrong)

    return spoil


def lose_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every commit take an entry more than it places."""
    commit = MetadataService.commit

    def wrong(service: MetadataService, metadata: Any, *arguments: Any) -> None:
        commit(service, metadata, *arguments)
        state = service._edits.batch_states[metadata.slot]
        state[TAKEN] += state[TAKEN] < state[TAKEN + 1]

    monkeypatch.setattr(MetadataService, "commit", wrong)


def set_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let set_batch overwrite refills that the host has not read."""
    stage = StagedEdits.stage_batch

    def wrong(edits: StagedEdits, batch_row: int, state_ids: np.ndarray, version: int = ANY_VERSION) -> None:
        stage(edits, batch_row, state_ids)

    monkeypatch.setattr(StagedEdits, "stage_batch", wrong)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (spoil_records(lambda r: {"kept": np.minimum(r.kept, 1)}), "record of slot . cpu: kept"),
        (spoil_records(lambda r: {"flags": r.flags & ~IS_REFILLED}), "record of slot . cpu: flags"),
        (spoil_records(lambda r: {"q_start": r.q_start - (r.kept > 0)}), "record of slot . cpu: q_start"),
        (spoil_records(lambda r: {"next_state_ids": r.state_ids}), "record of slot . cpu: next_state_ids"),
        (spoil_records(lambda r: {"duplicate": r.stale}), "record of slot . cpu: duplicate"),
        (spoil_records(lambda r: {"kept_tokens": None}), "record of slot . cpu has "),
        (lose_entry, ": cpu: ready"),
        (set_whatever_is_there, "cpu"),
    ],
    ids=lambda value: value.rpartition(" ")[2] if isinstance(value, str) else "",
)
def test_a_wrong_slot_is_a_mismatch(
    spoil: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each field of a record, what waits in the queue, and what stands in the batch are compared."""
    spoil(monkeypatch)
    with pytest.raises(parity_round.Mismatch, match=found.replace(" . ", r" \d: ")):
        run_rounds(seed)


def test_paths_are_compared_without_the_oracle(seed: int) -> None:
    """In a round that the oracle sits out, a second path's records are held against the first's (both on the CPU here)."""
    rig = parity_round.Rig(SETUP, {"cpu": SETUP.service("cpu"), "twin": SETUP.service("cpu")}, SETUP.oracle())
    for number in range(20):
        parity_round.Round(rig, np.random.default_rng([seed, number]), judged=number % 3 == 0).run()
    drain = rig.services["twin"].drain
    rig.services["twin"].drain = lambda slot: [  # type: ignore[method-assign]
        record._replace(kept=record.kept + 1) for record in drain(slot)
    ]
    with pytest.raises(parity_round.Mismatch, match=r"record of slot \d: twin: kept"):
        for number in range(100):
            parity_round.Round(rig, np.random.default_rng([seed, number]), judged=False).run()


def test_a_round_repeats_alone(seed: int) -> None:
    """Queues, batches and mailboxes of earlier rounds leave no trace in a later one: it draws and compares the same."""

    def records_of(rig: parity_round.Rig, number: int) -> list[str]:
        this = parity_round.Round(rig, np.random.default_rng([seed, number]), judged=True)
        seen: list[str] = []
        compare = this._compare

        def comparing(action: str, path: str, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
            seen.append(f"{action} {actual}")
            compare(action, path, actual, expected)

        this._compare = comparing  # type: ignore[method-assign]
        this.run()
        return seen

    used = parity_round.Rig.make(SETUP, ("cpu",))
    for number in range(12):
        in_order = records_of(used, number)
    assert records_of(parity_round.Rig.make(SETUP, ("cpu",)), 11) == in_order
