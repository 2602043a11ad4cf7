"""`zos layout`: prints the byte map of a state slot, and how many sequences fit into a given memory."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from zos.arguments import INT64_LARGEST
from zos.cli import InputError
from zos.cli.options import check_output, whole
from zos.entry import EntryFormat
from zos.geometry import CompressionRing, RingGeometry
from zos.layout import CompressionState, Region, StateSlotLayout

PRESETS: dict[str, Callable[[RingGeometry], StateSlotLayout]] = {
    "v4.1-flash": StateSlotLayout.v41_flash,
    "v4.1-flash-hopper": lambda geometry: StateSlotLayout.v41_flash(geometry, entry=EntryFormat.v4()),
}
ENTRY_FORMATS = {"mxfp8": EntryFormat.mxfp8, "v4": EntryFormat.v4}
UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
OVERLAP = "overlap"
NAMES = 2  # the column of the map that is text


class Ratio(NamedTuple):
    """One --ratio: RATIO[:overlap][:LAYERS]."""

    ratio: int
    overlap: bool
    layers: int | None  # None: as many as store


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `zos layout`."""
    parser = subparsers.add_parser(
        "layout",
        help="print the byte map of a state slot",
        description="Print the byte map of a sequence's state slot (consecutive equal layers on one line) "
        "and how many sequences fit into a given memory. Options replace the preset's values.",
    )
    parser.add_argument("--preset", choices=PRESETS, default="v4.1-flash", help="model (v4.1-flash)")
    parser.add_argument("--window", type=whole(0), default=128, metavar="N", help="tokens that a query sees (128)")
    parser.add_argument("--drafts", type=whole(0), default=5, metavar="N", help="draft tokens per step (5)")
    parser.add_argument("--ring", type=whole(0), metavar="N", help="slots of a ring (window + drafts + 1)")
    parser.add_argument("--stored", type=whole(0), metavar="N", help="producer layers, whose rings are stored")
    parser.add_argument("--dropped", type=whole(0), metavar="N", help="YOCO consumer layers")
    parser.add_argument("--draft-layers", type=whole(0), metavar="N", help="layers of the draft model")
    parser.add_argument("--entry-format", choices=ENTRY_FORMATS, help="of a ring's entries")
    parser.add_argument(
        "--ratio",
        type=_ratio,
        nargs="*",
        metavar="R[:overlap][:LAYERS]",
        help="compression state of so many layers (default: as many as store); without a value: none",
    )
    parser.add_argument(
        "--compression-bytes", type=whole(0), metavar="N", help="of one token's compression state in a layer"
    )
    parser.add_argument("--memory", type=_memory, default="40GiB", metavar="SIZE", help="for state slots (40GiB)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the map there, each layer for itself")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the map and its totals, write the file, return 0."""
    check_output(arguments.json)
    try:
        layout = _layout(arguments)
    except ValueError as error:
        raise InputError(str(error)) from None
    print(_report(layout, arguments.preset, arguments.memory))
    if arguments.json:
        arguments.json.write_text(json.dumps(_summary(layout, arguments.memory), indent=1) + "\n")
    return 0


def _layout(arguments: argparse.Namespace) -> StateSlotLayout:
    geometry = RingGeometry(arguments.window, arguments.drafts, arguments.ring)
    preset = PRESETS[arguments.preset](geometry)
    stored = _given(arguments.stored, preset.stored_layers)
    wanted = [Ratio(group.ring.ratio, group.ring.overlap, None) for group in preset.compression]
    entry_bytes = _given(arguments.compression_bytes, preset.compression[0].entry_bytes)
    compression = [
        CompressionState(CompressionRing(ratio, geometry.tokens_per_step, overlap), entry_bytes, _given(layers, stored))
        for ratio, overlap, layers in _given(arguments.ratio, wanted)
        if stored or layers is not None
    ]
    return StateSlotLayout(
        geometry,
        stored,
        _given(arguments.dropped, preset.dropped_layers),
        _given(arguments.draft_layers, preset.draft_layers),
        ENTRY_FORMATS[arguments.entry_format]() if arguments.entry_format else preset.entry,
        compression,
    )


def _report(layout: StateSlotLayout, preset: str, memory: int) -> str:
    """Say the sizes, then the map, then the totals."""
    geometry, entry = layout.geometry, layout.entry
    order = "interleaved" if entry.interleaved else "data rows, then scale rows"
    rows = [("offset", "size", "layers", "bytes a layer", "share")]
    for same in _folded(layout):
        size = sum(region.padded_bytes for region in same)
        label, first = same[0].name.rsplit(" ", 1)
        layers = f"{label} {first}" + (f" … {same[-1].layer}" if len(same) > 1 else "")
        share = f"{100 * size / layout.slot_bytes:.2f} %"
        rows.append((f"{same[0].offset:,}", f"{size:,}", layers, f"{same[0].bytes:,}", share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{preset}: window {geometry.window}, drafts {geometry.draft_tokens}, ring {geometry.ring} slots",
        f"entry {entry.name}: {entry.entry_bytes} B = {entry.data_bytes} data + {entry.scale_bytes} scales, {order}",
        "",
    ]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[NAMES] = row[NAMES].ljust(widths[NAMES])
        lines.append("  ".join(cells))
    fitting = layout.slots_in(memory)
    totals = {
        "stored part": f"{layout.stored_bytes:,} B, one range from offset 0",
        "state slot": f"{layout.slot_bytes:,} B, {_padding(layout):,} B of them padding",
        "sequences": f"{fitting:,} in {memory:,} B ({memory - fitting * layout.slot_bytes:,} B left over)",
        "fingerprint": layout.fingerprint,
    }
    return "\n".join([*lines, "", *(f"{name:12} {text}" for name, text in totals.items())])


def _folded(layout: StateSlotLayout) -> list[list[Region]]:
    """Consecutive layers of one name and size together."""
    return [
        list(same) for _, same in groupby(layout.regions, lambda region: (region.name.rsplit(" ", 1)[0], region.bytes))
    ]


def _padding(layout: StateSlotLayout) -> int:
    return sum(region.padded_bytes - region.bytes for region in layout.regions)


def _summary(layout: StateSlotLayout, memory: int) -> dict[str, Any]:
    entry = layout.entry
    return {
        "geometry": asdict(layout.geometry),
        "entry": {**asdict(entry), "data_bytes": entry.data_bytes, "scale_bytes": entry.scale_bytes},
        "regions": [region._asdict() for region in layout.regions],
        "ring_bytes": layout.ring_bytes,
        "stored_bytes": layout.stored_bytes,
        "slot_bytes": layout.slot_bytes,
        "padding_bytes": _padding(layout),
        "fingerprint": layout.fingerprint,
        "memory_bytes": memory,
        "sequences": layout.slots_in(memory),
    }


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _ratio(text: str) -> Ratio:
    ratio, *rest = text.split(":")
    overlap = rest[:1] == [OVERLAP]
    layers = rest[overlap:]
    if not ratio.isdecimal() or len(layers) > 1 or not all(count.isdecimal() for count in layers):
        raise argparse.ArgumentTypeError(f"{text!r} is not RATIO[:{OVERLAP}][:LAYERS]")
    return Ratio(int(ratio), overlap, int(layers[0]) if layers else None)


def _memory(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text)
    size = int(Fraction(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else -1
    if not 0 <= size <= INT64_LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 40GiB, 512MB or 1000")
    return size
