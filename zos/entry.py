"""EntryFormat: the bytes of one token's ring entry, and where a page of entries keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from zos.arguments import whole_number

BF16_BYTES = 2


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class EntryFormat:
    """The bytes of one token's ring entry, and how the entries of a ring make a page.

    A ring's format does not depend on that of the main (compressed) cache: an FP4 main cache leaves it as it is.

    Attributes
    ----------
    name : str
        `mxfp8` or `v4`.
    fp8_values, bf16_values : int
        Values kept as e4m3 (one byte, scaled) and, behind them, as bf16 (unscaled).
    scale_block : int
        e4m3 values that share one e8m0 scale byte.
    scale_pad : int
        Unused bytes behind the scales.
    interleaved : bool
        True: each token's scales follow its data. False: all data rows of a page, then all its scale rows.

    Examples
    --------
    >>> EntryFormat.mxfp8().entry_bytes, EntryFormat.v4().entry_bytes
    (528, 584)
    """

    name: str
    fp8_values: int
    bf16_values: int
    scale_block: int
    scale_pad: int
    interleaved: bool

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes are whole numbers and the scales cover the e4m3 values."""
        for name, least in (("fp8_values", 1), ("bf16_values", 0), ("scale_block", 1), ("scale_pad", 0)):
            whole_number(name, getattr(self, name), least)
        if self.fp8_values % self.scale_block:
            raise ValueError(f"fp8_values={self.fp8_values} is not a multiple of scale_block={self.scale_block}")

    @classmethod
    def mxfp8(cls) -> EntryFormat:
        """Return the MXFP8 entry: 512 e4m3 values, a scale for every 32, interleaved; pages are not padded."""
        return cls("mxfp8", fp8_values=512, bf16_values=0, scale_block=32, scale_pad=0, interleaved=True)

    @classmethod
    def v4(cls) -> EntryFormat:
        """Return the V4 record of Hopper's public FlashMLA: 448 e4m3 and 64 bf16 values, a scale for every 64, 1 pad byte."""
        return cls("v4", fp8_values=448, bf16_values=64, scale_block=64, scale_pad=1, interleaved=False)

    @property
    def values(self) -> int:
        """Values of a token's latent."""
        return self.fp8_values + self.bf16_values

    @property
    def data_bytes(self) -> int:
        """Bytes of a token's values."""
        return self.fp8_values + self.bf16_values * BF16_BYTES

    @property
    def scales(self) -> int:
        """Scale bytes of a token that mean something."""
        return self.fp8_values // self.scale_block

    @property
    def scale_bytes(self) -> int:
        """Scale bytes of a token, pad included."""
        return self.scales + self.scale_pad

    @property
    def entry_bytes(self) -> int:
        """Bytes of a token's entry."""
        return self.data_bytes + self.scale_bytes

    @property
    def page_multiple(self) -> int:
        """Bytes that a page and the stride between pages are a multiple of; FlashMLA reads a V4 page in units of a data row."""
        return 1 if self.interleaved else self.data_bytes

    def page_bytes(self, slots: int) -> int:
        """Bytes of a page of `slots` entries, its padding included."""
        return round_up(whole_number("slots", slots, 1) * self.entry_bytes, self.page_multiple)

    def data_offset(self, slot: int, slots: int) -> int:
        """Byte offset of a slot's data in a page of `slots` entries; raises ValueError unless 0 <= slot < slots."""
        whole_number("slot", slot, 0, whole_number("slots", slots, 1) - 1)
        return slot * (self.entry_bytes if self.interleaved else self.data_bytes)

    def scale_offset(self, slot: int, slots: int) -> int:
        """Byte offset of a slot's scales in a page of `slots` entries; raises ValueError unless 0 <= slot < slots."""
        data_offset = self.data_offset(slot, slots)
        if self.interleaved:
            return data_offset + self.data_bytes
        return slots * self.data_bytes + slot * self.scale_bytes
