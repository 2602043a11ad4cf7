"""The replay's checks: every output and record of a step against the oracle, the other path and the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from zos.cli.acceptance import AcceptanceModel
from zos.cli.compare import first_mismatch, metadata_arrays, poison
from zos.cli.oracle import Oracle
from zos.cli.replay_schedule import Scheduler
from zos.loop import DecodeLoop
from zos.service import MetadataService
from zos.table import COLUMNS

EXAMPLES_KEPT = 10


class StepChecker:
    """Holds steps of a loop against everything that can tell what they should have done.

    Parameters
    ----------
    service : MetadataService
        Under test.
    loop : DecodeLoop
        Its loop.
    scheduler : Scheduler
        Whose prediction must come true.
    acceptance : AcceptanceModel
        Tells num_kept.
    twin : MetadataService, optional
        The same service on the other path.

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
        scheduler: Scheduler,
        acceptance: AcceptanceModel,
        twin: MetadataService | None = None,
    ) -> None:
        self._service = service
        self._loop = loop
        self._scheduler = scheduler
        self._acceptance = acceptance
        self._twin = twin
        self._before = np.empty(0, np.int32)  # the records before the step
        geometry = service.geometry
        self._oracle = Oracle(
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
        poison(self._loop.metadata)

    def after_step(self) -> None:
        """Compare the step with the oracle, the twin, and (after the scheduler's `end_step`) the prediction."""
        metadata = self._loop.metadata
        actual, records = metadata_arrays(metadata), _records(self._service)
        rows = self._scheduler.batch + [-1] * (metadata.batch - len(self._scheduler.batch))

        self._oracle.load_records(self._before)
        expected = self._oracle.prepare(rows, self._service.token_layout)
        num_kept = self._acceptance.num_kept(expected["tickets"])
        self._oracle.commit(expected["tickets"].tolist(), num_kept.tolist())
        self._compare("oracle", {**actual, "records": records}, {**expected, "records": self._oracle.records_array()})

        twin = self._twin
        if twin is not None:
            twin.table.records.copy_(torch.from_numpy(self._before))
            twin.set_batch(rows, batch=metadata.batch)
            poison(twin.slot_metadata(0, metadata.batch, metadata.tokens))
            prepared = twin.prepare()
            expected = metadata_arrays(prepared)
            twin.commit(prepared, torch.from_numpy(num_kept).to(twin.device))
            expected["records"] = _records(twin)
            self._compare(f"{twin.device.type} path", {**actual, "records": records}, expected)

        self._compare_prediction(records)
        self.steps += 1

    def finish(self, trail: int) -> None:
        """Compare, at the end, what the whole run left behind: the table, the counters, and the step's trail."""
        self._service.flush()
        self._compare_prediction(_records(self._service))
        counters = self._service.counters()  # nothing of a replay comes late, twice, does not fit or is wrong
        for name, actual, expected in (
            ("trail, summed up by the device", trail, self._scheduler.trail),
            *((f"counter {name}", value, 0) for name, value in counters.items()),
        ):
            self._compare("end of the run", {name: np.array(actual)}, {name: np.array(expected)})

    def _compare_prediction(self, records: np.ndarray) -> None:
        predicted = self._scheduler.predicted()
        self._compare("prediction", {name: records[:, COLUMNS[name]] for name in predicted}, predicted)

    def _compare(self, judge: str, actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
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


def _records(service: MetadataService) -> np.ndarray:
    return service.table.records.cpu().numpy().copy()
