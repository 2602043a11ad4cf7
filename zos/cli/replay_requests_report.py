"""The report of a replay by requests: what the loop, the churn and the checks came to, as a table and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from zos.cli.replay_check import StepChecker
from zos.cli.replay_report import NOT_MEASURED, Curves, aligned, rounded, shown


@dataclass
class ChurnFigures:
    """How often requests were disturbed."""

    cancelled: int = 0
    preempted: int = 0
    resumed: int = 0
    reset: int = 0


@dataclass
class RequestsReport:
    """A finished replay by requests."""

    device: str  # name of what it ran on
    judges: str  # what the steps were held against
    checker: StepChecker
    requests: int  # that ran to their end
    skipped: int  # requests without output
    churn: ChurnFigures
    steps_per_replay: int | None  # None: as many as the device wanted
    simulated_s: float
    wall_s: float  # checks included
    host_us: list[float]  # time of run and poll, by replay
    first_steps: list[int]  # of each replay
    batch_sizes: list[int]  # rows that a sequence was served in, by step
    step_tokens: list[int]  # tokens kept, by step
    refilled: int  # rows that the device gave to a waiting sequence
    refused: int  # set_batch edits that it refused

    def summary(self) -> dict[str, Any]:
        """Every figure by name; None for what was not measured."""
        batches, tokens, steps = self.batch_sizes, sum(self.step_tokens), len(self.batch_sizes)
        host_us = self.host_us
        return {
            "device": self.device,
            "requests": self.requests,
            "skipped_requests": self.skipped,
            "generated_tokens": tokens,
            "steps": steps,
            "simulated_s": round(self.simulated_s, 3),
            "wall_s": round(self.wall_s, 3),
            "tokens_per_step": rounded(tokens / steps if steps else None),
            "mean_batch": rounded(sum(batches) / steps if steps else None),
            "largest_batch": max(batches, default=0),
            "steps_checked": steps,
            "outputs_checked": self.checker.steps,
            "checked_against": self.judges,
            "mismatches": self.checker.mismatches,
            "mismatch_examples": self.checker.examples,
            "steps_per_replay": self.steps_per_replay,
            "replays": len(host_us),
            "rows_refilled_on_device": self.refilled,
            "set_batch_refused": self.refused,
            "cancelled": self.churn.cancelled,
            "preempted": self.churn.preempted,
            "resumed": self.churn.resumed,
            "reset": self.churn.reset,
            "steps_per_s": round(steps / self.wall_s, 1) if steps else None,
            "host_us_per_replay": {
                "median": round(statistics.median(host_us), 2) if host_us else None,
                "p99": round(float(np.percentile(host_us, 99)), 2) if host_us else None,
            },
        }

    def table(self) -> str:
        """Return the figures as aligned text."""
        s = self.summary()
        host = s["host_us_per_replay"]
        checks = "; checks included" if self.checker.steps else ""
        return aligned(
            {
                "device": s["device"],
                "requests": f"{s['requests']}"
                + (f"   ({self.skipped} without output skipped)" if self.skipped else ""),
                "generated tokens": s["generated_tokens"],
                "steps": f"{s['steps']}   ({s['simulated_s']} s simulated in {s['wall_s']} s)",
                "steps per replay": s["steps_per_replay"] or "as many as the device wants",
                "replays": s["replays"],
                "tokens per step": shown(s["tokens_per_step"]),
                "mean batch": f"{shown(s['mean_batch'])}   (largest {s['largest_batch']})",
                "rows refilled on device": s["rows_refilled_on_device"],
                "set_batch refused": s["set_batch_refused"],
                "cancelled / preempted": f"{s['cancelled']} / {s['preempted']}",
                "resumed / reset": f"{s['resumed']} / {s['reset']}",
                "steps checked / mismatches": f"{s['steps_checked']} / {s['mismatches']}   ({self.judges})",
                "steps per s": shown(s["steps_per_s"]),
                "host µs per replay": f"{host['median']}, {host['p99']}   (median, p99 of run and poll{checks})"
                if self.host_us
                else NOT_MEASURED,
            }
        )

    def curves(self) -> Curves:
        """Return what the plot shows."""
        return Curves(
            title=f"zos replay: {self.requests} requests on {self.device}",
            batch_sizes=self.batch_sizes,
            step_tokens=self.step_tokens,
            at=[first - 1 for first in self.first_steps],
            times_us=self.host_us,
            times_label="host µs per replay",
        )
