"""SwaCache: the slab of all state slots, and the strided views of its layers."""

from __future__ import annotations

import torch

from zos.arguments import INT64_LARGEST, whole_number
from zos.devices import resolve_device
from zos.geometry import RingGeometry
from zos.layout import COMPRESSION, StateSlotLayout


class SwaCache:
    """One uint8 slab that holds the state slots one `slot_pitch` after the other; every view addresses the slab itself.

    Parameters
    ----------
    layout : StateSlotLayout
        Byte map of a slot.
    num_state_slots : int
        Number of state slots; num_state_slots * ring slots must stay below 2^31, as ring indices are int32.
    device : str or torch.device
        Where the slab lives; with `slab`, where it must live.
    slab : torch.Tensor, optional
        The caller's memory: uint8 [at least (num_state_slots - 1) * slot_pitch + slot_bytes], contiguous, at any storage offset
        (the operators are right at any address, and fastest where it is a multiple of 16; FlashMLA's kernels need that). Its bytes
        are left as they are. Default: new memory, all zeros, so that an entry never written reads as 0, not as NaN.
    slot_pitch : int, optional
        Bytes from one slot to the next: slot_bytes or more, a multiple of `layout.slot_multiple` (32; 576 for V4 records, as a
        slot's pitch is FlashMLA's page stride). Default: slot_bytes. The bytes between slots are never written.

    Attributes
    ----------
    slab : torch.Tensor
        uint8 [bytes]; its `data_ptr()` never changes, so views and captured graphs stay valid.
    layout, num_state_slots, slot_pitch, device
        As given.

    Raises
    ------
    ValueError
        A size, pitch or the slab breaks a rule above; the message names argument, rule and value.

    Examples
    --------
    >>> cache = SwaCache(StateSlotLayout(stored_layers=20), num_state_slots=4, device="cpu")
    >>> cache.layer(0).shape, cache.layer(0).stride(0), cache.stored(3).numel()
    (torch.Size([4, 134, 1, 528]), 1415040, 1415040)
    """

    def __init__(
        self,
        layout: StateSlotLayout,
        num_state_slots: int,
        device: str | torch.device = "cuda",
        slab: torch.Tensor | None = None,
        slot_pitch: int | None = None,
    ) -> None:
        self.layout = layout
        self.num_state_slots = whole_number("num_state_slots", num_state_slots, 1)
        whole_number("num_state_slots * ring", self.num_state_slots * layout.geometry.ring, 1)
        pitch = layout.slot_bytes if slot_pitch is None else slot_pitch
        self.slot_pitch = whole_number("slot_pitch", pitch, layout.slot_bytes, INT64_LARGEST)
        if self.slot_pitch % layout.slot_multiple:
            raise ValueError(f"slot_pitch={self.slot_pitch} is not a multiple of {layout.slot_multiple}")
        last_slot = (self.num_state_slots - 1) * self.slot_pitch
        least = whole_number("bytes of all slots", last_slot + layout.slot_bytes, 1, INT64_LARGEST)
        self.device = resolve_device(device)
        if slab is None:
            slab = torch.zeros(least, dtype=torch.uint8, device=self.device)
        else:
            _check_slab(slab, least, self.device)
        self.slab = slab

    def layer(self, ring: int) -> torch.Tensor:
        """View a layer's rings, one page a state.

        Parameters
        ----------
        ring : int
            Number of the ring in the order of the slot: stored layers first, then dropped, then draft layers.

        Returns
        -------
        torch.Tensor
            uint8 [num_state_slots, ring slots, 1, entry bytes], row stride `slot_pitch`: what FlashMLA takes, with one page a state
            (index = state_id * ring slots + slot). With an interleaved format element [s, k] is the entry in ring slot k. V4 pages
            keep all data rows before all scale rows: the view then is the page as FlashMLA takes it, [s, k] is no single entry,
            and `data` and `scales` find a slot's bytes.

        Raises
        ------
        ValueError
            There is no such ring.
        """
        entry_bytes = self.layout.entry.entry_bytes
        slots = self.layout.geometry.ring
        return self._view(self._ring_offset(ring), (slots, 1, entry_bytes), (entry_bytes, entry_bytes, 1))

    def layers(self, first_ring: int, count: int) -> torch.Tensor:
        """View several layers' rings at once, for one store or load of all of them.

        Parameters
        ----------
        first_ring, count : int
            Rings first_ring … first_ring + count - 1 in the order of the slot.

        Returns
        -------
        torch.Tensor
            uint8 [count, num_state_slots, ring slots, 1, entry bytes]; element [i] is `layer(first_ring + i)`.

        Raises
        ------
        ValueError
            There are no such rings.
        """
        first, count = self.layer(first_ring), whole_number("count", count, 1)
        self._ring_offset(first_ring + count - 1)
        rings = self.layout.rings[first_ring : first_ring + count]
        stride = rings[-1].offset - rings[0].offset
        return first.as_strided((count, *first.shape), (stride // max(1, count - 1), *first.stride()))

    def data(self, ring: int) -> torch.Tensor:
        """View the data of a layer's entries, in either format: uint8 [num_state_slots, ring slots, data bytes]."""
        entry, slots = self.layout.entry, self.layout.geometry.ring
        stride = entry.entry_bytes if entry.interleaved else entry.data_bytes
        offset = self._ring_offset(ring) + entry.data_offset(0, slots)
        return self._view(offset, (slots, entry.data_bytes), (stride, 1))

    def scales(self, ring: int) -> torch.Tensor:
        """View the scales of a layer's entries, in either format: uint8 [num_state_slots, ring slots, scale bytes]."""
        entry, slots = self.layout.entry, self.layout.geometry.ring
        stride = entry.entry_bytes if entry.interleaved else entry.scale_bytes
        offset = self._ring_offset(ring) + entry.scale_offset(0, slots)
        return self._view(offset, (slots, entry.scale_bytes), (stride, 1))

    def compression(self, layer: int) -> torch.Tensor:
        """View a layer's compression state, counted through all groups: uint8 [num_state_slots, entries, entry bytes]."""
        offset = self.layout.layer_offset(COMPRESSION, layer)
        group = [group for group in self.layout.compression for _ in range(group.layers)][layer]
        return self._view(offset, (group.ring.entries, group.entry_bytes), (group.entry_bytes, 1))

    def all_stored(self) -> torch.Tensor:
        """View the part of every state that an external store keeps: uint8 [num_state_slots, layout.stored_bytes], strided."""
        return self._view(0, (self.layout.stored_bytes,), (1,))

    def slot(self, state_id: int) -> torch.Tensor:
        """View all of a state: uint8 [layout.slot_bytes], contiguous; ValueError outside 0 … num_state_slots - 1."""
        begin = whole_number("state_id", state_id, 0, self.num_state_slots - 1) * self.slot_pitch
        return self.slab[begin : begin + self.layout.slot_bytes]

    def stored(self, state_id: int) -> torch.Tensor:
        """View the part of a state that an external store keeps.

        Returns
        -------
        torch.Tensor
            uint8 [layout.stored_bytes], contiguous.

        Raises
        ------
        ValueError
            state_id is outside 0 … num_state_slots - 1.
        """
        return self.slot(state_id)[: self.layout.stored_bytes]

    def _ring_offset(self, ring: int) -> int:
        rings = self.layout.rings
        return rings[whole_number("ring", ring, 0, len(rings) - 1)].offset

    def _view(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """View [num_state_slots, *shape] from a byte offset in the slot on; torch's strides are 64-bit."""
        begin = self.slab.storage_offset() + offset  # as_strided counts from the storage, not from the slab
        return self.slab.as_strided((self.num_state_slots, *shape), (self.slot_pitch, *stride), begin)


def check_holds(cache: SwaCache, device: torch.device, geometry: RingGeometry, capacity: int) -> None:
    """Raise ValueError unless a cache can hold the states of a service of this device, geometry and capacity."""
    if cache.device != device:
        raise ValueError(f"cache is on {cache.device}, but the service on {device}")
    if cache.layout.geometry != geometry:
        raise ValueError(f"cache has rings for {cache.layout.geometry}, but the service {geometry}")
    if cache.num_state_slots < capacity:
        raise ValueError(f"cache has num_state_slots={cache.num_state_slots}, fewer than capacity={capacity}")


def _check_slab(slab: torch.Tensor, least: int, device: torch.device) -> None:
    """Raise ValueError unless a caller's tensor can be the slab."""
    if not isinstance(slab, torch.Tensor):
        raise ValueError(f"slab is a {type(slab).__name__}, not a tensor")
    if slab.dtype != torch.uint8:
        raise ValueError(f"slab has dtype {slab.dtype}, not torch.uint8")
    if slab.dim() != 1 or not slab.is_contiguous():
        raise ValueError(
            f"slab must be one contiguous run of bytes, not of shape {tuple(slab.shape)}, stride {slab.stride()}"
        )
    if slab.device != device:
        raise ValueError(f"slab is on {slab.device}, not on device={device}")
    if slab.numel() < least:
        raise ValueError(f"slab has {slab.numel()} bytes; the state slots need {least}")
