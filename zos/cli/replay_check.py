"""The replay's checks: every output and record of a step against the oracle, the other path and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from zos.cli.acceptance import AcceptanceModel
from zos.cli.compare import first_mismatch, metadata_arrays, poison
from zos.cli.oracle_prefill import PrefillOracle
from zos.cli.replay_prediction import Prediction
from zos.cli.replay_prefill import PrefillSteps
from zos.cli.replay_ring_check import RingChecker
from zos.cli.replay_schedule import PrefillFigures
from zos.loop import DecodeLoop
from zos.metadata import DecodeMetadata, PrefillMetadata, StepMetadata
from zos.service import MetadataService
from zos.table import COLUMNS

EXAMPLES_KEPT = 10


class Schedule(Protocol):
    """What a checker must know of the steps; `Scheduler` says what each is."""

    batch: list[int]
    prefill_batch: list[int]
    batch_sizes: list[int]
    trail: int
    prediction: Prediction
    figures: PrefillFigures | None


class StepChecker:
    """Holds steps of a loop against everything that can tell what they should have done.

    Parameters
    ----------
    service : MetadataService
        Under test.
    loop : DecodeLoop
        Its loop.
    scheduler : Schedule
        Whose prediction must come true.
    acceptance : AcceptanceModel
        Tells num_kept.
    twin : MetadataService, optional
        The same service on the other path.
    prefill : PrefillSteps, optional
        What runs the prefill batch.
    ring : RingChecker, optional
        Judges the ring's contents.

    Attributes
    ----------
    steps : int
        Steps checked.
    mismatches : int
        Arrays that differed.
    examples : list of str
        The first of them: step, array, first place that differs.
    """

    def __init__(
        self,
        service: MetadataService,
        loop: DecodeLoop,
        scheduler: Schedule,
        acceptance: AcceptanceModel,
        twin: MetadataService | None = None,
        prefill: PrefillSteps | None = None,
        ring: RingChecker | None = None,
    ) -> None:
        self._service = service
        self._loop = loop
        self._scheduler = scheduler
        self._acceptance = acceptance
        self._twin = twin
        self._prefill = prefill
        self._ring = ring
        self._before = np.empty(0, np.int32)  # the records before the step
        geometry = service.geometry
        self._oracle = PrefillOracle(
            service.capacity,
            window=geometry.window,
            ring=geometry.ring,
            tokens_per_step=geometry.tokens_per_step,
            compression=tuple((ring.ratio, ring.entries) for ring in service.compression),
            max_prefill_tokens=service.max_prefill_tokens,
        )
        self.steps = 0
        self.mismatches = 0
        self.examples: list[str] = []

    def before_step(self) -> None:
        """Apply what is staged, remember the records, poison the outputs, so that one left unwritten shows."""
        self._service.flush()
        self._before = _records(self._service)
        if self._scheduler.batch:
            poison(self._loop.metadata)
        if self._scheduler.prefill_batch and self._prefill is not None:
            poison(self._prefill.metadata)
            if self._ring is not None:
                self._ring.before_prefill(self._prefill.metadata)

    def after_step(self) -> None:
        """Compare the step with the oracle, the twin, and (after the scheduler's `end_step`) the prediction."""
        self._oracle.load_records(self._before)
        if self._twin is not None:
            self._twin.table.records.copy_(torch.from_numpy(self._before))
        predicted = self._scheduler.prediction.arrays()
        if self._scheduler.prefill_batch and self._prefill is not None:
            self._check_prefill(self._prefill.metadata, predicted)
        if self._scheduler.batch:
            self._check_decode(self._loop.metadata, predicted)
        records = _records(self._service)
        self.compare("oracle", {"records": records}, {"records": self._oracle.records_array()})
        if self._twin is not None:
            self.compare(f"{self._twin.device.type} path", {"records": records}, {"records": _records(self._twin)})
        if self._ring is not None:
            self.compare("dense model", *self._ring.windows(predicted))
        self._compare_prediction(records)
        self.steps += 1

    def _check_prefill(self, metadata: PrefillMetadata, predicted: Mapping[str, np.ndarray]) -> None:
        rows = _padded(self._scheduler.prefill_batch, metadata)
        actual = metadata_arrays(metadata)
        expected = self._oracle.prepare_prefill(rows, full_index=True)
        self._oracle.commit(expected["tickets"].tolist(), expected["seqlens_q"].tolist())
        self.compare("oracle", actual, expected)
        if self._twin is not None:
            self._twin.set_prefill_batch(rows, batch=metadata.batch)
            self._check_twin(
                self._twin, actual, lambda twin: twin.prepare_prefill(full_index=True), expected["seqlens_q"]
            )
        if self._ring is not None:
            self.compare("dense model", *self._ring.prefill(expected, predicted))

    def _check_decode(self, metadata: DecodeMetadata, predicted: Mapping[str, np.ndarray]) -> None:
        rows = _padded(self._scheduler.batch, metadata)
        actual = metadata_arrays(metadata)
        expected = self._oracle.prepare(rows, self._service.token_layout)
        num_kept = self._acceptance.num_kept(expected["tickets"])
        self._oracle.commit(expected["tickets"].tolist(), num_kept.tolist())
        self.compare("oracle", actual, expected)
        if self._twin is not None:
            self._twin.set_batch(rows, batch=metadata.batch)
            self._check_twin(self._twin, actual, MetadataService.prepare, num_kept)
        if self._ring is not None:
            self.compare("dense model", *self._ring.decode(actual["kv_swa_index"], expected, num_kept, predicted))

    def _check_twin(
        self,
        twin: MetadataService,
        actual: Mapping[str, np.ndarray],
        prepare: Callable[[MetadataService], StepMetadata],
        num_kept: np.ndarray,
    ) -> None:
        """Let the other path prepare its batch into poisoned buffers, compare, commit."""
        poison(prepare(twin))
        metadata = prepare(twin)
        self.compare(f"{twin.device.type} path", actual, metadata_arrays(metadata))
        twin.commit(metadata, torch.from_numpy(num_kept).to(twin.device))

    def finish(self, trail: int) -> None:
        """Compare, at the end, what the whole run left behind: the table, the counters, and the step's trail."""
        self._service.flush()
        self._compare_prediction(_records(self._service))
        figures = self._scheduler.figures
        # Nothing of a replay comes late or twice, or is wrong; only chunks wait for their turn.
        counters = {"deferred": figures.deferred_rows if figures else 0}
        for name, actual, expected in (
            ("trail, summed up by the device", trail, self._scheduler.trail),
            *((f"counter {name}", value, counters.get(name, 0)) for name, value in self._service.counters().items()),
        ):
            self.compare("end of the run", {name: np.array(actual)}, {name: np.array(expected)})

    def _compare_prediction(self, records: np.ndarray) -> None:
        predicted = self._scheduler.prediction.arrays()
        self.compare("prediction", {name: records[:, COLUMNS[name]] for name in predicted}, predicted)

    def compare(self, judge: str, actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        """Count and remember every array that differs, or that only one side has."""
        for name in {**expected, **actual}:
            if name in actual and name in expected:
                difference = first_mismatch(actual[name], expected[name])
            else:
                difference = "is only there" if name in expected else "is not there"
            if difference is not None:
                self.mismatches += 1
                if len(self.examples) < EXAMPLES_KEPT:
                    step = len(self._scheduler.batch_sizes)
                    self.examples.append(f"step {step}: {name} against the {judge}: {difference}")


def _padded(state_ids: list[int], metadata: StepMetadata) -> list[int]:
    """Rows of a step's batch."""
    return state_ids + [-1] * (metadata.batch - len(state_ids))


def _records(service: MetadataService) -> np.ndarray:
    return service.table.records.cpu().numpy().copy()
