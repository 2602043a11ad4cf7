"""StateSlotLayout: the byte map of a state slot, as pure arithmetic; the entries in it are EntryFormat's."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

from zos.arguments import INT32_LARGEST, INT64_LARGEST, whole_number
from zos.entry import EntryFormat, round_up
from zos.geometry import CompressionRing, RingGeometry

LAYER_ALIGNMENT = 32  # bytes that every layer of a slot is padded to
LARGEST_LAYERS = 65_535  # of a kind; keeps a mistyped count from building a map that fills the memory
FP32_BYTES = 4
RING_KINDS = ("stored", "dropped", "draft")  # in the order of the slot
COMPRESSION = "compression"


class CompressionState(NamedTuple):
    """The not yet pooled tokens of `layers` layers that compress alike."""

    ring: CompressionRing
    entry_bytes: int  # of one token in one layer; the model's compressor decides
    layers: int


class Region(NamedTuple):
    """One layer's bytes in a state slot: [offset, offset + bytes), and up to offset + padded_bytes nobody's."""

    name: str
    kind: str  # stored, dropped, draft or compression
    layer: int  # counted within its kind
    offset: int
    bytes: int
    padded_bytes: int


@dataclass(frozen=True)
class StateSlotLayout:
    """The byte map of one state slot: stored rings, dropped rings, draft rings, compression state, every layer padded to 32 bytes.

    Parameters
    ----------
    geometry : RingGeometry, optional
        Sizes of every ring. Default: the model family's.
    stored_layers : int
        Rings of the producer layers, first in the slot: one contiguous range, all that an external store needs.
    dropped_layers : int
        Rings of the YOCO consumer layers, recomputed and never stored.
    draft_layers : int
        Rings of the draft model.
    entry : EntryFormat, optional
        Of all rings, whatever the format of the main cache. Default: MXFP8.
    compression : iterable of CompressionState or (CompressionRing, entry bytes, layers)
        Compression state, group after group.

    Attributes
    ----------
    regions : tuple of Region
        Every layer in the order of the slot; their padded bytes tile it without gap or overlap.

    Raises
    ------
    ValueError
        A size is out of range, a slot would be empty, or a compression ring is one that a decode step would outgrow.

    Examples
    --------
    >>> layout = StateSlotLayout(stored_layers=20, dropped_layers=20)
    >>> layout.ring_bytes, layout.stored_bytes, layout.layer_offset("dropped", 0)
    (70752, 1415040, 1415040)
    """

    geometry: RingGeometry
    stored_layers: int
    dropped_layers: int
    draft_layers: int
    entry: EntryFormat
    compression: tuple[CompressionState, ...]

    def __init__(
        self,
        geometry: RingGeometry | None = None,
        stored_layers: int = 1,
        dropped_layers: int = 0,
        draft_layers: int = 0,
        entry: EntryFormat | None = None,
        compression: Iterable[CompressionState | tuple[CompressionRing, int, int]] = (),
    ) -> None:
        geometry = geometry or RingGeometry()
        layers = {
            f"{kind}_layers": whole_number(f"{kind}_layers", count, 0, LARGEST_LAYERS)
            for kind, count in zip(RING_KINDS, (stored_layers, dropped_layers, draft_layers), strict=True)
        }
        if not any(layers.values()):
            raise ValueError("stored_layers, dropped_layers and draft_layers are all 0: the slot would hold no ring")
        groups = tuple(_checked(number, CompressionState(*g), geometry) for number, g in enumerate(compression))
        values = {"geometry": geometry, **layers, "entry": entry or EntryFormat.mxfp8(), "compression": groups}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def v41_flash(
        cls,
        geometry: RingGeometry | None = None,
        draft_layers: int = 0,
        entry: EntryFormat | None = None,
        compression_entry_bytes: int | None = None,
    ) -> StateSlotLayout:
        """Return the V4.1-Flash-like layout: 20 producer and 20 consumer layers; the producers compress with ratio 2.

        The seed gives no size of a compression entry. The default is an assumption: a latent and a gate for each of its values, in
        fp32, on the producer layers alone, as consumers reuse the producers' compressed cache.
        """
        geometry, entry = geometry or RingGeometry(), entry or EntryFormat.mxfp8()
        if compression_entry_bytes is None:
            compression_entry_bytes = 2 * entry.values * FP32_BYTES
        producers = 20
        state = CompressionState(CompressionRing(2, geometry.tokens_per_step), compression_entry_bytes, producers)
        return cls(geometry, producers, 20, draft_layers, entry, (state,))

    @cached_property
    def rings(self) -> tuple[Region, ...]:
        """Every ring in the order of the slot: stored, dropped and draft layers."""
        return tuple(region for region in self.regions if region.kind != COMPRESSION)

    @property
    def ring_bytes(self) -> int:
        """Bytes of one layer's ring, the page's padding included, that to 32 bytes not."""
        return self.entry.page_bytes(self.geometry.ring)

    @property
    def slot_multiple(self) -> int:
        """Bytes that the slot and the pitch between slots are a multiple of: a slot's pitch is its layers' page stride."""
        return math.lcm(LAYER_ALIGNMENT, self.entry.page_multiple)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Every layer in the order of the slot."""
        ring = self.geometry.ring * self.entry.entry_bytes
        sizes = [
            (kind, kind, layer, ring, self.ring_bytes)
            for kind in RING_KINDS
            for layer in range(getattr(self, f"{kind}_layers"))
        ]
        pooling = [group for group in self.compression for _ in range(group.layers)]
        for layer, group in enumerate(pooling):
            state = group.ring.entries * group.entry_bytes
            sizes.append((f"{COMPRESSION} r={group.ring.ratio}", COMPRESSION, layer, state, state))
        regions, offset = [], 0
        for label, kind, layer, used, page in sizes:
            regions.append(Region(f"{label} {layer}", kind, layer, offset, used, round_up(page, LAYER_ALIGNMENT)))
            offset += regions[-1].padded_bytes
        last = regions.pop()  # takes what the slot's own multiple adds
        return (*regions, last._replace(padded_bytes=round_up(offset, self.slot_multiple) - last.offset))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the part for an external store: the slot's first, [0, stored_bytes)."""
        return self.stored_bytes_of(self.geometry.ring)

    def stored_bytes_of(self, ring: int) -> int:
        """Bytes of that part where rings have `ring` slots."""
        return self.stored_layers * round_up(self.entry.page_bytes(ring), LAYER_ALIGNMENT)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a state slot, a multiple of `slot_multiple` and so of 32."""
        return self.regions[-1].offset + self.regions[-1].padded_bytes

    def layer_offset(self, kind: str, layer: int) -> int:
        """Byte offset in the slot of a layer, counted within its kind; raises ValueError where there is none."""
        of_kind = [region for region in self.regions if region.kind == kind]
        if not of_kind:
            raise ValueError(
                f"kind={kind!r}: the slot has none; it has {', '.join(dict.fromkeys(r.kind for r in self.regions))}"
            )
        return of_kind[whole_number("layer", layer, 0, len(of_kind) - 1)].offset

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of sizes, formats and byte map: the same in every process, another for every other layout."""
        facts = {**asdict(self), "regions": [(r.kind, r.offset, r.bytes, r.padded_bytes) for r in self.regions]}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def stored_fingerprint(self) -> str:
        """Hexadecimal SHA-256 of what a stored state means: all but what follows from the ring's length, which a reader re-maps.

        Rings and compression that are not stored count too: they tell whose state it is.
        """
        facts = {
            "window": self.geometry.window,
            "layers": [getattr(self, f"{kind}_layers") for kind in RING_KINDS],
            "entry": asdict(self.entry),
            "compression": [(g.ring.ratio, g.ring.overlap, g.entry_bytes, g.layers) for g in self.compression],
            "layer_alignment": LAYER_ALIGNMENT,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def slots_in(self, memory_bytes: int) -> int:
        """State slots that fit into `memory_bytes` and whose ring slots int32 can number."""
        fitting = whole_number("memory_bytes", memory_bytes, 0, INT64_LARGEST) // self.slot_bytes
        return min(fitting, INT32_LARGEST // self.geometry.ring)


def _checked(number: int, group: CompressionState, geometry: RingGeometry) -> CompressionState:
    """Return a compression group with whole numbers, its ring long enough for the geometry's decode step."""
    name, ring = f"compression[{number}]", group.ring
    if not isinstance(ring, CompressionRing):
        raise ValueError(f"{name}.ring={ring!r} is not a CompressionRing")
    try:
        CompressionRing(ring.ratio, geometry.tokens_per_step, ring.overlap, ring.entries)
    except ValueError as error:
        raise ValueError(f"{name}.ring: {error}") from None
    entry_bytes = whole_number(f"{name}.entry_bytes", group.entry_bytes, 1)
    return CompressionState(ring, entry_bytes, whole_number(f"{name}.layers", group.layers, 1, LARGEST_LAYERS))
