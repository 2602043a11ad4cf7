"""Test that SwaCache's views address exactly their layer's bytes, at any offset, pitch and beyond 4 GiB."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import zos

FORMATS = [zos.EntryFormat.mxfp8(), zos.EntryFormat.v4()]
POISON = 0xA5
WRITTEN = 0x3C
STATES = 4


def small_layout(entry: zos.EntryFormat) -> zos.StateSlotLayout:
    """Every kind of layer, sizes that need padding."""
    geometry = zos.RingGeometry(7, 5)
    compression = [(zos.CompressionRing(2), 5, 1), (zos.CompressionRing(4, overlap=True), 9, 2)]
    return zos.StateSlotLayout(geometry, 2, 1, 1, entry, compression)


def poisoned(entry: zos.EntryFormat, device: str, offset: int = 0, gap: int = 0) -> tuple[zos.SwaCache, torch.Tensor]:
    """A cache in the caller's memory, `offset` bytes in, `gap` bytes between slots; and that memory, all POISON."""
    layout = small_layout(entry)
    pitch = layout.slot_bytes + gap
    memory = torch.full((offset + STATES * pitch + 100,), POISON, dtype=torch.uint8, device=device)
    return zos.SwaCache(layout, STATES, device, slab=memory[offset:], slot_pitch=pitch), memory


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
def test_shape_and_strides(device: str, entry: zos.EntryFormat) -> None:
    """FlashMLA takes [states, ring, 1, bytes] with one page a state: the row stride is the whole slot."""
    cache = zos.SwaCache(zos.StateSlotLayout.v41_flash(entry=entry), 3, device)
    for ring in (0, 19, 20, 39):
        view = cache.layer(ring)
        assert (view.dtype, view.shape) == (torch.uint8, (3, 134, 1, entry.entry_bytes))
        assert view.stride() == (cache.layout.slot_bytes, entry.entry_bytes, entry.entry_bytes, 1)
        assert view.data_ptr() == cache.slab.data_ptr() + ring * entry.page_bytes(134)
    assert not cache.slab.any()  # an entry never written reads as 0


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (1, 576), (4, 576), (8, 1152), (4096, 0)])
def test_a_view_writes_only_its_layer(device: str, entry: zos.EntryFormat, offset: int, gap: int) -> None:
    """Other layers, other states, padding, gaps between slots and the memory around the slab stay."""
    count = len(small_layout(entry).rings)
    for ring in range(count):
        for state in range(STATES):
            cache, memory = poisoned(entry, device, offset, gap)
            region = cache.layout.rings[ring]
            cache.layer(ring)[state] = WRITTEN
            begin = offset + state * cache.slot_pitch + region.offset
            expected = np.full(memory.numel(), POISON, np.uint8)
            expected[begin : begin + region.bytes] = WRITTEN
            assert np.array_equal(memory.cpu().numpy(), expected), f"ring {ring} of state {state}"


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
def test_data_and_scales_share_out_a_layer(device: str, entry: zos.EntryFormat) -> None:
    """A slot's bytes are where EntryFormat says, in either format."""
    cache, memory = poisoned(entry, device, offset=32, gap=576)
    ring, state, slot = 3, 2, 5
    slots = cache.layout.geometry.ring
    cache.data(ring)[state, slot] = WRITTEN
    cache.scales(ring)[state, slot] = WRITTEN + 1
    begin = 32 + state * cache.slot_pitch + cache.layout.rings[ring].offset
    expected = np.full(memory.numel(), POISON, np.uint8)
    data, scales = begin + entry.data_offset(slot, slots), begin + entry.scale_offset(slot, slots)
    expected[data : data + entry.data_bytes] = WRITTEN
    expected[scales : scales + entry.scale_bytes] = WRITTEN + 1
    assert np.array_equal(memory.cpu().numpy(), expected)


def test_an_interleaved_entry_is_a_row(device: str) -> None:
    """layer(i)[state, slot, 0] is data, then scales: what kv_swa_index addresses."""
    cache, _ = poisoned(zos.EntryFormat.mxfp8(), device)
    row = cache.layer(1)[2, 6, 0]
    assert row.data_ptr() == cache.data(1)[2, 6].data_ptr()
    assert row.data_ptr() + cache.layout.entry.data_bytes == cache.scales(1)[2, 6].data_ptr()


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
def test_stored_part(device: str, entry: zos.EntryFormat) -> None:
    """One contiguous view: all stored rings of one state, and nothing else."""
    cache, memory = poisoned(entry, device, offset=4, gap=576)
    for ring in range(cache.layout.stored_layers):
        cache.layer(ring)[1] = WRITTEN
    part = cache.stored(1)
    assert part.is_contiguous() and part.shape == (cache.layout.stored_bytes,)
    assert int((part == WRITTEN).sum()) == int((memory == WRITTEN).sum())
    assert not (cache.stored(0) == WRITTEN).any() and not (cache.stored(2) == WRITTEN).any()


def test_compression_state(device: str) -> None:
    """Its layers are counted through the groups, each with its group's size."""
    cache, memory = poisoned(zos.EntryFormat.mxfp8(), device, gap=32)
    assert [tuple(cache.compression(layer).shape) for layer in range(3)] == [(4, 7, 5), (4, 13, 9), (4, 13, 9)]
    cache.compression(2)[3] = WRITTEN
    begin = 3 * cache.slot_pitch + cache.layout.layer_offset("compression", 2)
    assert (memory[begin : begin + 13 * 9] == WRITTEN).all() and int((memory == WRITTEN).sum()) == 13 * 9


@pytest.mark.parametrize("gibibytes", [2, 4])
def test_beyond_32_bits(gibibytes: int) -> None:
    """The last byte of a slab past 2 and 4 GiB: a 32-bit offset would wrap onto another state."""
    layout = zos.StateSlotLayout.v41_flash()
    states = gibibytes * 2**30 // layout.slot_bytes + 2
    slab = torch.empty(states * layout.slot_bytes, dtype=torch.uint8)  # untouched: virtual memory only
    cache = zos.SwaCache(layout, states, "cpu", slab=slab)
    last, state = len(layout.rings) - 1, states - 1
    region = layout.rings[last]
    byte = state * layout.slot_bytes + region.offset + region.bytes - 1
    assert byte > gibibytes * 2**30
    wrapped = [byte - 2**31, byte % 2**31, byte % 2**32]
    for where in wrapped:
        if where != byte:
            slab[where] = POISON
    view = cache.layer(last)
    view[state, -1, 0, -1] = WRITTEN
    assert view[state, -1, 0, -1].data_ptr() == slab.data_ptr() + byte
    assert slab[byte] == WRITTEN == cache.scales(last)[state, -1, -1]
    assert all(slab[where] == POISON for where in wrapped if where != byte)
    cache.stored(state)[-1] = WRITTEN
    assert slab[state * layout.slot_bytes + layout.stored_bytes - 1] == WRITTEN


def test_states_do_not_overlap() -> None:
    """Stored parts of neighbours stand a pitch apart."""
    cache, _ = poisoned(zos.EntryFormat.mxfp8(), "cpu", gap=64)
    starts = [cache.stored(state).data_ptr() for state in range(STATES)]
    assert {after - before for before, after in pairwise(starts)} == {cache.slot_pitch}


def test_a_slab_may_end_with_its_last_slot() -> None:
    """The gap behind the last slot is not needed; one byte less is refused."""
    layout = small_layout(zos.EntryFormat.mxfp8())
    pitch = layout.slot_bytes + 64
    least = pitch + layout.slot_bytes
    slab = torch.zeros(least, dtype=torch.uint8)
    assert zos.SwaCache(layout, 2, "cpu", slab=slab, slot_pitch=pitch).slab is slab
    with pytest.raises(ValueError, match=f"slab has {least - 1} bytes; the state slots need {least}"):
        zos.SwaCache(layout, 2, "cpu", slab=slab[1:], slot_pitch=pitch)


@pytest.mark.parametrize("bad", [-1, 0.0, None, True, STATES])
def test_numbers_out_of_range_are_named(bad: object) -> None:
    """A negative number would silently be another state or layer."""
    cache, _ = poisoned(zos.EntryFormat.mxfp8(), "cpu")
    for view, name in (
        (cache.layer, "ring"),
        (cache.data, "ring"),
        (cache.scales, "ring"),
        (cache.stored, "state_id"),
        (cache.compression, "layer"),
        (lambda ring: cache.layers(ring, 1), "ring"),
    ):
        with pytest.raises(ValueError, match=f"^{name}={bad}"):
            view(bad)  # type: ignore[operator]


def test_bad_arguments_are_named() -> None:
    """Before anything is allocated or written."""
    layout = small_layout(zos.EntryFormat.mxfp8())
    slab = torch.zeros(STATES * layout.slot_bytes, dtype=torch.uint8)

    def refused(message: str, states: int = STATES, device: str = "cpu", **options: object) -> None:
        with pytest.raises(ValueError, match=message):
            zos.SwaCache(layout, states, device, **options)  # type: ignore[arg-type]

    refused("num_state_slots=0", states=0)
    refused(r"num_state_slots \* ring=", states=2**31 // layout.geometry.ring + 1)
    refused(f"slot_pitch={layout.slot_bytes - 32}", slot_pitch=layout.slot_bytes - 32)
    refused(f"slot_pitch={layout.slot_bytes + 16} is not a multiple of 32", slot_pitch=layout.slot_bytes + 16)
    refused("bytes of all slots=", slot_pitch=2**62)
    refused("slab has dtype torch.int8", slab=slab.view(torch.int8))
    refused("one contiguous run of bytes", slab=slab.view(STATES, -1))
    refused("one contiguous run of bytes", slab=torch.zeros(2 * slab.numel(), dtype=torch.uint8)[::2])
    refused("slab is on meta", slab=slab.to("meta"))
    refused("device=meta", device="meta")


def test_v4_pitch_keeps_the_page_stride() -> None:
    """FlashMLA reads V4 pages at multiples of 576 bytes: a pitch of 32's alone is refused."""
    layout = small_layout(zos.EntryFormat.v4())
    with pytest.raises(ValueError, match="is not a multiple of 576"):
        zos.SwaCache(layout, 2, "cpu", slot_pitch=layout.slot_bytes + 32)
