"""The replay's report: what a run did and what was measured, as a table, as JSON and as a plot."""

from __future__ import annotations

import importlib.util
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zos.cli import InputError
from zos.cli.replay_check import StepChecker
from zos.cli.replay_measure import Meter
from zos.cli.replay_schedule import Scheduler

NOT_MEASURED = "not measured"
LABEL_WIDTH = 26


@dataclass
class Report:
    """A finished replay."""

    device: str  # name of what it ran on
    on_gpu: bool
    judges: str  # what checked steps were held against
    ring_entries: int | None  # compared with the dense ring; None without a ring
    requests: int
    skipped: int  # requests without output
    scheduler: Scheduler
    checker: StepChecker
    meter: Meter
    wall_s: float  # checks included
    allocations_after_capture: int | None  # by torch on the GPU; None where not counted

    def summary(self) -> dict[str, Any]:
        """Every figure by name; None for what was not measured."""
        batches, tokens = self.scheduler.batch_sizes, self.scheduler.step_tokens
        times, steps = self.meter.metadata_us, len(self.scheduler.batch_sizes)
        return {
            "device": self.device,
            "requests": self.requests,
            "skipped_requests": self.skipped,
            "generated_tokens": sum(tokens),
            "steps": steps,
            "simulated_s": round(self.scheduler.clock_ms / 1e3, 3),
            "wall_s": round(self.wall_s, 3),
            "tokens_per_step": round(sum(tokens) / steps, 3) if steps else None,
            "mean_batch": round(sum(batches) / steps, 3) if steps else None,
            "largest_batch": max(batches, default=0),
            "steps_checked": self.checker.steps,
            "checked_against": self.judges,
            "mismatches": self.checker.mismatches,
            "mismatch_examples": self.checker.examples,
            "ring_entries_compared": self.ring_entries,
            "prefill": self.scheduler.figures.summary() if self.scheduler.figures else None,
            "metadata_us": {
                "what": self.meter.what,
                "steps": len(times),
                "median": round(statistics.median(times), 2) if times else None,
                "p99": round(float(np.percentile(times, 99)), 2) if times else None,
            },
            "launches_per_step": _rounded(self.meter.launches_per_step),
            "other_launches_per_step": _rounded(self.meter.other_launches_per_step),
            "waits_per_step": _rounded(self.meter.waits_per_step),
            "waits_per_step_without_edits": _rounded(self.meter.waits_per_plain_step),
            "allocations_after_capture": self.allocations_after_capture,
        }

    def table(self) -> str:
        """Return the figures as aligned text."""
        s = self.summary()
        times = s["metadata_us"]
        metadata = f"{times['median']}, {times['p99']}   ({times['what']}; {times['steps']} steps)"
        waits = _shown(s["waits_per_step"])
        if s["waits_per_step_without_edits"] is not None:
            waits += f"   (in steps without edits: {s['waits_per_step_without_edits']})"
        elif self.checker.steps:
            waits += "   (checks wait)"
        rows = {
            "device": s["device"],
            "requests": f"{s['requests']}" + (f"   ({self.skipped} without output skipped)" if self.skipped else ""),
            "generated tokens": s["generated_tokens"],
            "steps": f"{s['steps']}   ({s['simulated_s']} s simulated in {s['wall_s']} s)",
            "tokens per step": _shown(s["tokens_per_step"]),
            "mean batch": f"{_shown(s['mean_batch'])}   (largest {s['largest_batch']})",
            "steps checked / mismatches": f"{s['steps_checked']} / {s['mismatches']}   ({self.judges})",
            **_prefill_rows(s["prefill"]),
            "metadata µs, median, p99": metadata if times["steps"] else NOT_MEASURED,
            "launches per step": _shown(s["launches_per_step"]),
        }
        if self.ring_entries is not None:
            rows["ring entries compared"] = self.ring_entries
        if self.on_gpu:
            rows["other launches per step"] = _shown(s["other_launches_per_step"])
            rows["waits per step"] = waits
        if self.allocations_after_capture is not None:
            rows["allocations after capture"] = self.allocations_after_capture
        return "\n".join(f"{label:<{LABEL_WIDTH}}  {value}" for label, value in rows.items())


def check_plot(path: Path) -> None:
    """Raise InputError, before a long run, where `write_plot` could not do its work after it."""
    if path.suffix != ".png":
        raise InputError(f"--plot {path}: the name must end in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: install zos[bench]")


def write_plot(report: Report, path: Path) -> None:
    """Draw batch size, tokens per step and metadata time over the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    meter, scheduler = report.meter, report.scheduler
    upper.plot(scheduler.batch_sizes, linewidth=0.7)
    upper.set_ylabel("batch size")
    middle.plot(scheduler.step_tokens, linewidth=0.7)
    middle.set_ylabel("tokens per step")
    steps = range(meter.first, meter.first + len(meter.metadata_us))
    lower.plot(steps, meter.metadata_us, ".", markersize=1.5)
    lower.set_ylabel("metadata µs per step")
    if meter.metadata_us:
        lower.set_ylim(0, 1.5 * float(np.percentile(meter.metadata_us, 99)))
    lower.set_xlabel("step")
    upper.set_title(f"zos replay: {report.requests} requests on {report.device}")
    figure.savefig(path, dpi=120)


def _prefill_rows(figures: dict[str, int] | None) -> dict[str, str]:
    """Rows of the table on prefill; none where prompts counted as prefilled."""
    if figures is None:
        return {}
    hits = f"{figures['prefix_hits']}"
    if figures["prefix_hits"]:
        hits += f"   (tokens saved: {figures['tokens_saved']}, replayed: {figures['tokens_replayed']})"
    prefilled, steps = figures["prompt_tokens_prefilled"], figures["prefill_steps"]
    return {
        "prompt tokens prefilled": f"{prefilled}   (in {steps} steps; rows deferred: {figures['deferred_rows']})",
        "prefix hits": hits,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _shown(value: float | None) -> str:
    return NOT_MEASURED if value is None else str(value)
