"""Test that entries and state slots map every byte once, in the seed's order, with the seed's sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zos
from tests.test_cli import failure
from zos.cli.main import main
from zos.layout import LARGEST_LAYERS

FORMATS = [zos.EntryFormat.mxfp8(), zos.EntryFormat.v4()]
V41 = zos.StateSlotLayout.v41_flash()
# Of V41: a store that was filled by an earlier process or version finds its entries by it.
V41_FINGERPRINT = "dc561744687d4db90083f0ed3d8ba8c20a72d171a6411a45aa95903990c162e2"


@st.composite
def layouts(draw: st.DrawFn) -> zos.StateSlotLayout:
    """Any small layout."""
    small = st.integers(0, 4)
    geometry = zos.RingGeometry(draw(st.integers(1, 140)), draw(st.integers(0, 8)))
    compression = [
        zos.CompressionState(
            zos.CompressionRing(draw(st.integers(1, 130)), geometry.tokens_per_step, draw(st.booleans())),
            draw(st.integers(1, 5000)),
            draw(st.integers(1, 3)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    stored = draw(st.integers(1, 4))
    return zos.StateSlotLayout(geometry, stored, draw(small), draw(small), draw(st.sampled_from(FORMATS)), compression)


def test_seed_figures() -> None:
    """Sizes follow: 134 * 528 = 70,752 of one ring, 20 of them 1,415,040 stored."""
    assert zos.EntryFormat.mxfp8().entry_bytes == 528
    assert zos.StateSlotLayout().ring_bytes == zos.StateSlotLayout().slot_bytes == 70_752
    assert V41.stored_bytes == V41.layer_offset("dropped", 0) == 1_415_040
    assert V41.layer_offset("compression", 0) == 2 * 1_415_040
    assert [group.ring.entries for group in V41.compression] == [7]


def test_v4_record() -> None:
    """What Hopper's FlashMLA reads: 584 bytes, all data rows before all scale rows, pages in units of 576."""
    v4 = zos.EntryFormat.v4()
    assert (v4.data_bytes, v4.scales, v4.scale_bytes, v4.entry_bytes, v4.values) == (576, 7, 8, 584, 512)
    assert v4.page_bytes(134) == 136 * 576
    assert v4.page_bytes(576) == 576 * 584
    assert (v4.data_offset(1, 134), v4.scale_offset(0, 134), v4.scale_offset(133, 134)) == (
        576,
        134 * 576,
        134 * 576 + 133 * 8,
    )


def test_mxfp8_is_interleaved() -> None:
    """A token's 16 scales stand right behind its 512 values."""
    entry = zos.EntryFormat.mxfp8()
    assert (entry.data_bytes, entry.scale_bytes, entry.values, entry.page_bytes(134)) == (512, 16, 512, 70_752)
    assert (entry.data_offset(2, 134), entry.scale_offset(2, 134)) == (2 * 528, 2 * 528 + 512)


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
@pytest.mark.parametrize("slots", [1, 7, 134])
def test_entries_tile_a_page(entry: zos.EntryFormat, slots: int) -> None:
    """No byte of a page belongs to two entries, and all but the padding belong to one."""
    owned = [
        range(offset(slot, slots), offset(slot, slots) + size)
        for offset, size in ((entry.data_offset, entry.data_bytes), (entry.scale_offset, entry.scale_bytes))
        for slot in range(slots)
    ]
    assert sorted(byte for run in owned for byte in run) == list(range(slots * entry.entry_bytes))
    assert 0 <= entry.page_bytes(slots) - slots * entry.entry_bytes < entry.page_multiple


@given(layouts())
def test_regions_tile_the_slot(layout: zos.StateSlotLayout) -> None:
    """In the seed's order, without gap or overlap, each at a multiple of 32 bytes."""
    end = 0
    for region in layout.regions:
        assert region.offset == end and region.offset % 32 == 0
        assert 0 < region.bytes <= region.padded_bytes
        end += region.padded_bytes
    assert end == layout.slot_bytes and end % 32 == 0
    assert end % layout.entry.page_multiple == 0  # the slot's pitch is the stride between pages
    kinds = [region.kind for region in layout.regions]
    assert kinds == sorted(kinds, key=["stored", "dropped", "draft", "compression"].index)
    assert len({region.name for region in layout.regions}) == len(layout.regions)


@given(layouts())
def test_stored_part_is_one_range(layout: zos.StateSlotLayout) -> None:
    """[0, stored_bytes) holds the stored rings and nothing else."""
    for region in layout.regions:
        if region.kind == "stored":
            assert region.offset + region.bytes <= layout.stored_bytes
        else:
            assert region.offset >= layout.stored_bytes
    assert layout.stored_bytes == layout.stored_layers * (layout.ring_bytes + -layout.ring_bytes % 32)


@given(layouts())
def test_layer_offset_finds_every_region(layout: zos.StateSlotLayout) -> None:
    """By kind and number within it."""
    for region in layout.regions:
        assert layout.layer_offset(region.kind, region.layer) == region.offset


@given(layouts(), st.integers(0, 2**63 - 1))
def test_slots_in(layout: zos.StateSlotLayout, memory: int) -> None:
    """As many as fit, never more than int32 can number."""
    slots, ring = layout.slots_in(memory), layout.geometry.ring
    assert slots * layout.slot_bytes <= memory and slots * ring < 2**31
    assert (slots + 1) * layout.slot_bytes > memory or (slots + 1) * ring >= 2**31


@pytest.mark.parametrize("entry_bytes", [1, 144, 288, 4096])
def test_main_cache_never_changes_the_rings(entry_bytes: int) -> None:
    """Whatever a compressed entry takes (FP4 or wider), the rings' entries, offsets and stored part stay."""
    layout = zos.StateSlotLayout.v41_flash(compression_entry_bytes=entry_bytes)
    assert (layout.rings, layout.entry, layout.stored_bytes) == (V41.rings, V41.entry, V41.stored_bytes)


def test_fingerprint_is_stable() -> None:
    """Equal layouts, equal names, also in another process with another hash seed."""
    program = "import zos; print(zos.StateSlotLayout.v41_flash().fingerprint)"
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == V41.fingerprint == zos.StateSlotLayout.v41_flash().fingerprint == V41_FINGERPRINT


def test_fingerprint_tells_layouts_apart() -> None:
    """One changed number is another layout: entries of one are never read as those of the other."""
    ring = zos.CompressionRing(2)
    longer = zos.StateSlotLayout(zos.RingGeometry(ring=135))
    others = [
        zos.StateSlotLayout(stored_layers=2),
        zos.StateSlotLayout(dropped_layers=1),
        zos.StateSlotLayout(draft_layers=1),
        zos.StateSlotLayout(zos.RingGeometry(127, 6)),  # the same ring, another window
        longer,
        zos.StateSlotLayout(entry=zos.EntryFormat.v4()),
        zos.StateSlotLayout(entry=replace(zos.EntryFormat.mxfp8(), scale_block=64, scale_pad=8)),
        zos.StateSlotLayout(compression=[(ring, 64, 1)]),
        zos.StateSlotLayout(compression=[(ring, 32, 2)]),
        zos.StateSlotLayout(compression=[(zos.CompressionRing(3), 64, 1)]),
        zos.StateSlotLayout(compression=[(zos.CompressionRing(2, overlap=True), 64, 1)]),
        zos.StateSlotLayout(),
    ]
    assert len({layout.fingerprint for layout in others}) == len(others)
    assert (
        len({layout.stored_fingerprint for layout in others}) == len(others) - 1
    )  # where rings are longer only, they are re-mapped
    assert longer.stored_fingerprint == zos.StateSlotLayout().stored_fingerprint
    more_drafts = zos.StateSlotLayout(
        zos.RingGeometry(draft_tokens=7), compression=[(zos.CompressionRing(2, 8), 64, 1)]
    )
    assert more_drafts.stored_fingerprint == zos.StateSlotLayout(compression=[(ring, 64, 1)]).stored_fingerprint
    assert others[-1] == zos.StateSlotLayout() and hash(others[-1]) == hash(zos.StateSlotLayout())


@pytest.mark.parametrize("name", ["stored_layers", "dropped_layers", "draft_layers"])
@pytest.mark.parametrize("bad", [-1, 1.0, True, None, LARGEST_LAYERS + 1])
def test_bad_layer_count_is_named(name: str, bad: object) -> None:
    """Not a wrong map."""
    with pytest.raises(ValueError, match=f"{name}={bad}"):
        zos.StateSlotLayout(**{name: bad})  # type: ignore[arg-type]


def test_bad_arguments_are_named() -> None:
    """The message says which argument breaks which rule."""
    with pytest.raises(ValueError, match="are all 0"):
        zos.StateSlotLayout(stored_layers=0)
    ring = zos.CompressionRing(2, tokens_per_step=2)
    with pytest.raises(ValueError, match=r"compression\[0\].ring: entries=3 is too short: .* needs 7"):
        zos.StateSlotLayout(compression=[(ring, 64, 1)])
    with pytest.raises(ValueError, match=r"compression\[0\].ring=2 is not"):
        zos.StateSlotLayout(compression=[(2, 64, 1)])  # type: ignore[list-item]
    for group, name in (
        ((zos.CompressionRing(2), 0, 1), "entry_bytes=0"),
        ((zos.CompressionRing(2), 1, 0), "layers=0"),
    ):
        with pytest.raises(ValueError, match=rf"compression\[0\].{name}"):
            zos.StateSlotLayout(compression=[group])
    for kind, layer, message in (("main", 0, "kind='main'"), ("draft", 0, "kind='draft'"), ("stored", 20, "layer=20")):
        with pytest.raises(ValueError, match=message):
            V41.layer_offset(kind, layer)
    for slot in (-1, 134):
        with pytest.raises(ValueError, match=f"slot={slot}"):
            V41.entry.scale_offset(slot, 134)
    with pytest.raises(ValueError, match="memory_bytes=-1"):
        V41.slots_in(-1)
    with pytest.raises(ValueError, match="fp8_values=448 is not a multiple of scale_block=60"):
        replace(zos.EntryFormat.v4(), scale_block=60)


def test_command_prints_the_seed_s_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for the 20 equal layers of a kind."""
    assert main(["layout"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:7] for line in out.splitlines()]
    assert ["0", "1,415,040", "stored", "0", "…", "19", "70,752"] in rows
    assert out.count("70,752") == 2 and f"{V41.slots_in(40 * 2**30):,} in 42,949,672,960 B" in out


def test_command_writes_every_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file has the map unfolded; options replace the preset's values."""
    path = tmp_path / "map.json"
    layers = ["--stored=3", "--dropped=1", "--draft-layers=2", "--ratio", "2", "4:overlap:1"]
    assert main(["layout", *layers, "--entry-format=v4", "--memory=1.5MB", f"--json={path}"]) == 0
    capsys.readouterr()
    written = json.loads(path.read_text())
    kinds = [region["kind"] for region in written["regions"]]
    assert kinds == ["stored"] * 3 + ["dropped"] + ["draft"] * 2 + ["compression"] * 4
    assert sum(region["padded_bytes"] for region in written["regions"]) == written["slot_bytes"]
    assert written["regions"][-1]["bytes"] == 13 * 4096  # 2r + Q - 1 entries
    assert (written["sequences"], written["memory_bytes"]) == (1_500_000 // written["slot_bytes"], 1_500_000)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--stored", value) for value in ("-1", "x", "1.5", "65536")),
        *(("--window", value) for value in ("0", "1_0")),
        *(("--ratio", value) for value in ("0", "2:x", "2:1:1", "2:0", "2:1:overlap")),
        *(("--memory", value) for value in ("-1", "1e9", "40XB", "99999999TiB", "")),
        *(("--ring", value) for value in ("132", "x")),
        ("--entry-format", "fp4"),
        ("--preset", "v5"),
        ("--compression-bytes", "0"),
    ],
)
def test_command_refuses(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    """One line that names the option or its argument, and exit code 2."""
    message = failure(capsys, "layout", f"{option}={value}")
    assert message.startswith("zos layout: error: ") and value.split(":")[-1] in message


def test_command_refuses_a_missing_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before it prints."""
    assert "its folder does not exist" in failure(capsys, "layout", "--json", tmp_path / "none" / "map.json")
