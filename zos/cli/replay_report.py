"""The replay's report: what a run did and what was measured, as a table, as JSON and as a plot."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zos.cli import InputError
from zos.cli.replay_check import StepChecker
from zos.cli.replay_measure import Meter
from zos.cli.replay_schedule import Scheduler
from zos.cli.replay_store import ReplayStore

NOT_MEASURED = "not measured"
LABEL_WIDTH = 26


class Curves(NamedTuple):
    """What the plot of a run shows."""

    title: str
    batch_sizes: list[int]  # by step
    step_tokens: list[int]  # by step
    at: Sequence[int]  # step that each of times_us belongs to
    times_us: list[float]
    times_label: str


@dataclass
class Report:
    """A finished replay."""

    device: str  # name of what it ran on
    on_gpu: bool
    judges: str  # what checked steps were held against
    ring_entries: int | None  # compared with the dense ring; None without a ring
    store: ReplayStore | None
    store_place: str | None  # what --store named
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
            "store": self._store_figures(),
            "metadata_us": {
                "what": self.meter.what,
                "steps": len(times),
                "median": round(statistics.median(times), 2) if times else None,
                "p99": round(float(np.percentile(times, 99)), 2) if times else None,
            },
            "launches_per_step": rounded(self.meter.launches_per_step),
            "other_launches_per_step": rounded(self.meter.other_launches_per_step),
            "waits_per_step": rounded(self.meter.waits_per_step),
            "waits_per_step_without_edits": rounded(self.meter.waits_per_plain_step),
            "allocations_after_capture": self.allocations_after_capture,
        }

    def _store_figures(self) -> dict[str, int] | None:
        """What came of the external store; None without one."""
        if self.store is None or self.scheduler.figures is None:
            return None
        figures = self.store.figures
        return {
            **figures.summary(),
            "hits_replayed": self.scheduler.figures.prefix_hits - figures.hits_restored,
        }

    def table(self) -> str:
        """Return the figures as aligned text."""
        s = self.summary()
        times = s["metadata_us"]
        metadata = f"{times['median']}, {times['p99']}   ({times['what']}; {times['steps']} steps)"
        waits = shown(s["waits_per_step"])
        if s["waits_per_step_without_edits"] is not None:
            waits += f"   (in steps without edits: {s['waits_per_step_without_edits']})"
        elif self.checker.steps:
            waits += "   (checks wait)"
        rows = {
            "device": s["device"],
            "requests": f"{s['requests']}" + (f"   ({self.skipped} without output skipped)" if self.skipped else ""),
            "generated tokens": s["generated_tokens"],
            "steps": f"{s['steps']}   ({s['simulated_s']} s simulated in {s['wall_s']} s)",
            "tokens per step": shown(s["tokens_per_step"]),
            "mean batch": f"{shown(s['mean_batch'])}   (largest {s['largest_batch']})",
            "steps checked / mismatches": f"{s['steps_checked']} / {s['mismatches']}   ({self.judges})",
            **_prefill_rows(s["prefill"]),
            **_store_rows(s["store"], self.store_place),
            "metadata µs, median, p99": metadata if times["steps"] else NOT_MEASURED,
            "launches per step": shown(s["launches_per_step"]),
        }
        if self.ring_entries is not None:
            rows["ring entries compared"] = self.ring_entries
        if self.on_gpu:
            rows["other launches per step"] = shown(s["other_launches_per_step"])
            rows["waits per step"] = waits
        if self.allocations_after_capture is not None:
            rows["allocations after capture"] = self.allocations_after_capture
        return aligned(rows)

    def curves(self) -> Curves:
        """Return what the plot shows."""
        meter, scheduler = self.meter, self.scheduler
        return Curves(
            title=f"zos replay: {self.requests} requests on {self.device}",
            batch_sizes=scheduler.batch_sizes,
            step_tokens=scheduler.step_tokens,
            at=range(meter.first, meter.first + len(meter.metadata_us)),
            times_us=meter.metadata_us,
            times_label="metadata µs per step",
        )


def aligned(rows: dict[str, Any]) -> str:
    """Rows of a table as text."""
    return "\n".join(f"{label:<{LABEL_WIDTH}}  {value}" for label, value in rows.items())


def check_plot(path: Path) -> None:
    """Raise InputError, before a long run, where `write_plot` could not do its work after it."""
    if path.suffix != ".png":
        raise InputError(f"--plot {path}: the name must end in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: install zos[bench]")


def write_plot(curves: Curves, path: Path) -> None:
    """Draw batch size, tokens per step and times over the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    upper.plot(curves.batch_sizes, linewidth=0.7)
    upper.set_ylabel("batch size")
    middle.plot(curves.step_tokens, linewidth=0.7)
    middle.set_ylabel("tokens per step")
    lower.plot(curves.at, curves.times_us, ".", markersize=1.5)
    lower.set_ylabel(curves.times_label)
    if curves.times_us:
        lower.set_ylim(0, 1.5 * float(np.percentile(curves.times_us, 99)))
    lower.set_xlabel("step")
    upper.set_title(curves.title)
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


def _store_rows(figures: dict[str, int] | None, place: str | None) -> dict[str, str]:
    """Rows of the table on the external store, if there was one."""
    if figures is None:
        return {}
    puts, gets = figures["puts_failed"], figures["gets_failed"]
    failed = f"   (failed: puts {puts}, gets {gets})" if puts or gets else ""
    return {
        "store": f"{place}   (states stored: {figures['states_stored']})",
        "hits restored / replayed": f"{figures['hits_restored']} / {figures['hits_replayed']}{failed}",
    }


def rounded(value: float | None) -> float | None:
    """Round a figure, if there is one."""
    return None if value is None else round(value, 3)


def shown(value: float | None) -> str:
    """Text of a figure that may not have been measured."""
    return NOT_MEASURED if value is None else str(value)
