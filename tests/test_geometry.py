"""Test that ring sizes follow from window and drafts, and that a ring which a step would outgrow is refused."""

from __future__ import annotations

import pytest

import zos


def test_defaults_are_the_seed_s() -> None:
    """The model family's ring: 128 + 6 = 134 slots."""
    geometry = zos.RingGeometry(window=128, draft_tokens=5)
    assert (geometry.ring, geometry.tokens_per_step, geometry.window, geometry.draft_tokens) == (134, 6, 128, 5)


@pytest.mark.parametrize("drafts", range(17))
@pytest.mark.parametrize("window", [1, 7, 128, 4096])
def test_least_ring(window: int, drafts: int) -> None:
    """One slot less than W + Q - 1 (causal) or W + Q (a draft block) would overwrite what the first query reads."""
    least = window + drafts
    assert zos.RingGeometry(window, drafts, ring=least).ring == least
    assert zos.RingGeometry(window, drafts, ring=least + 1, causal=False).ring == least + 1
    with pytest.raises(ValueError, match=f"needs {least} slots"):
        zos.RingGeometry(window, drafts, ring=least - 1)
    with pytest.raises(ValueError, match=f"needs {least + 1} slots"):
        zos.RingGeometry(window, drafts, ring=least, causal=False)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "128", True, None, 2**31])
def test_window_must_be_a_whole_number(bad: object) -> None:
    """A float window would become a wrong kernel argument."""
    with pytest.raises(ValueError, match="window"):
        zos.RingGeometry(window=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "overlap", "entries"), [(1, False, 6), (2, False, 7), (128, False, 133), (4, True, 13)]
)
def test_compression_ring_entries(ratio: int, overlap: bool, entries: int) -> None:
    """R + Q - 1 entries, 2r + Q - 1 with overlap; one less is refused."""
    assert zos.CompressionRing(ratio, overlap=overlap).entries == entries
    with pytest.raises(ValueError, match=f"needs {entries}"):
        zos.CompressionRing(ratio, overlap=overlap, entries=entries - 1)
