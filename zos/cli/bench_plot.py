"""`zos bench --plot`: medians by rows beside their references, both axes logarithmic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zos.cli import InputError

if TYPE_CHECKING:
    from zos.cli.bench import Row

REFERENCE_STYLE = {"linestyle": "--", "color": "0.6", "linewidth": 1.0}


def curves(rows: Sequence[Row], bench: str) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Medians of a bench by variant and by reference, each by size; those of one size alone make no curve."""
    variants: dict[str, dict[int, float]] = defaultdict(dict)
    references: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.bench == bench:
            variants[row.variant][row.size] = row.median_us
            references[row.reference][row.size] = row.reference_us
    return tuple({name: of for name, of in group.items() if len(of) > 1} for group in (variants, references))  # type: ignore[return-value]


def draw(rows: Sequence[Row], path: Path, hardware: str) -> None:
    """Draw one panel for each bench that was measured at several sizes; InputError without any, or without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib: install zos[bench]") from None
    panels = {bench: curves(rows, bench) for bench in dict.fromkeys(row.bench for row in rows)}
    panels = {bench: both for bench, both in panels.items() if both[0]}
    if not panels:
        raise InputError("--plot: nothing was measured at more than one size")
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    for axis, (bench, (variants, references)) in zip(axes[0], panels.items(), strict=True):
        for name, of in references.items():
            sizes = sorted(of)
            axis.plot(sizes, [of[size] for size in sizes], **REFERENCE_STYLE)
            axis.annotate(name, (sizes[0], of[sizes[0]]), fontsize="x-small", color="0.4", va="top")
        for name, of in variants.items():
            sizes = sorted(of)
            axis.plot(sizes, [of[size] for size in sizes], marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("rows")
        axis.set_ylabel("µs")
        axis.set_title(bench, fontsize="medium")
        axis.legend(fontsize="x-small")
    figure.suptitle(hardware, fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
