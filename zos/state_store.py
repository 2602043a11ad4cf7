"""StateStore: the stored part of a state, put under a key and got back into a free state; a subclass is a back end."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from typing import Any

import torch

from zos.allocator import StateSlotAllocator
from zos.arguments import whole_number
from zos.cache import SwaCache
from zos.errors import (
    BoundaryError,
    CorruptStateError,
    MissingStateError,
    NoFreeStateError,
    StateInUseError,
    StateNotLiveError,
)
from zos.service import MetadataService
from zos.store_format import (
    HEADER_BYTES,
    StoredState,
    check_boundary,
    key_bytes,
    read_state,
    remapped,
    write_state,
)
from zos.table import COLUMNS, Phase

STORABLE = (Phase.LIVE, Phase.PAUSED, Phase.FINISHED)
SET_BY_GET = ("q_start", "swa_valid_start", "prefix_hit")


class StateStore(ABC):
    """Puts the stored part of states (`SwaCache.stored`) into an external store, and gets it back; a subclass is a back end.

    Both calls wait: for the device, and for the store. Nothing else is changed before every byte has been read and checked in host
    memory, so a refused `get` leaves table, cache and allocator as they were. Calls of several threads follow one another.

    Parameters
    ----------
    service : MetadataService
        Whose states are meant.
    cache : SwaCache
        Holds their rings.
    allocator : StateSlotAllocator or None
        Where `get` takes a state slot that the caller does not name.
    buffer : torch.Tensor
        uint8 [largest_bytes(layout)] in host memory: header and payload on their way.

    Raises
    ------
    ValueError
        Service and cache do not fit one another, or the layout stores nothing.

    Examples
    --------
    >>> import tempfile
    >>> svc = MetadataService(capacity=4, max_batch=1, device="cpu")
    >>> cache = SwaCache(StateSlotLayout(stored_layers=20), num_state_slots=4, device="cpu")
    >>> store = LocalStateStore(svc, cache, tempfile.mkdtemp(), StateSlotAllocator([2, 3]))
    >>> svc.admit(state_id=0, q_start=1000)
    >>> store.put("prefix", state_id=0, boundary=1000)
    >>> store.get("prefix", prompt_end=1500), svc.in_use(2)
    (2, True)
    """

    def __init__(
        self, service: MetadataService, cache: SwaCache, allocator: StateSlotAllocator | None, buffer: torch.Tensor
    ) -> None:
        layout, geometry = cache.layout, service.geometry
        if layout.stored_layers == 0:
            raise ValueError("stored_layers=0: the layout has nothing to store")
        for name in ("window", "ring"):
            ours, theirs = getattr(layout.geometry, name), getattr(geometry, name)
            if ours != theirs:
                raise ValueError(f"the cache's {name}={ours} is not the service's {name}={theirs}")
        if cache.num_state_slots < service.capacity:
            raise ValueError(f"the cache has {cache.num_state_slots} state slots, the service {service.capacity}")
        if cache.device != service.device:
            raise ValueError(f"the cache is on {cache.device}, the service on {service.device}")
        self.layout = layout
        self._service = service
        self._cache = cache
        self._allocator = allocator
        self._buffer = buffer
        self._blob = buffer.numpy().data
        self._payload = slice(HEADER_BYTES, HEADER_BYTES + layout.stored_bytes)
        self._lock = threading.RLock()

    # ---- the calls ------------------------------------------------------------------------------------------------------------

    def put(self, key: str | bytes, state_id: int, boundary: int) -> None:
        """Store a state as it was after its first `boundary` tokens, in place of what the key held.

        Waits for the device and reads the state's head there. No step of the state may run beside it on a stream that the service
        does not know of.

        Parameters
        ----------
        key : str or bytes
            Names the prefix (and the model); a str stands for its UTF-8 bytes.
        state_id : int
            A state that is live, paused or finished.
        boundary : int
            Tokens, 1 … q_start; head - boundary must not exceed ring - window.

        Raises
        ------
        BoundaryError
            The window before the boundary is not final or no longer in the ring.
        StateNotLiveError
            The state holds no sequence.
        StoreUnavailableError
            The back end failed.
        ValueError, IndexError
            Key, boundary or state_id is none.
        """
        name, boundary = key_bytes(key), whole_number("boundary", boundary, -(2**63), 2**63 - 1)
        with self._lock:
            if not self._service.in_use(state_id):
                raise StateNotLiveError(f"state_id={state_id} is not in use: there is nothing to store")
            self._service.flush()
            record = self._service.table.records[state_id].tolist()
            phase, q_start, head, valid_start = (
                record[COLUMNS[c]] for c in ("phase", "q_start", "head", "swa_valid_start")
            )
            if phase not in STORABLE:
                raise StateNotLiveError(f"state_id={state_id} is {Phase(phase).name}: there is nothing to store")
            if boundary > q_start:
                raise BoundaryError(f"boundary={boundary} exceeds q_start={q_start} of state_id {state_id}")
            self._put(name, boundary, head, self._cache.stored(state_id), valid_start)

    def put_bytes(
        self,
        key: str | bytes,
        boundary: int,
        head: int,
        payload: torch.Tensor,
        swa_valid_start: int = 0,
    ) -> None:
        """Store bytes that were copied from `SwaCache.stored` before: a snapshot. Asks no device.

        Parameters
        ----------
        key, boundary
            As for `put`.
        head, swa_valid_start : int
            The state's, when it was copied.
        payload : torch.Tensor
            uint8 [layout.stored_bytes], contiguous, on any device.

        Raises
        ------
        BoundaryError, StoreUnavailableError, ValueError
            As for `put`.
        """
        name = key_bytes(key)
        boundary = whole_number("boundary", boundary, -(2**63), 2**63 - 1)
        head, valid_start = whole_number("head", head, 0), whole_number("swa_valid_start", swa_valid_start, 0)
        if payload.dtype != torch.uint8 or payload.shape != (self.layout.stored_bytes,):
            raise ValueError(
                f"payload is {payload.dtype} {list(payload.shape)}, not torch.uint8 [{self.layout.stored_bytes}]"
            )
        with self._lock:
            self._put(name, boundary, head, payload, valid_start)

    def get(
        self, key: str | bytes, state_id: int | None = None, *, rebuild_dropped: bool = False, **admission: Any
    ) -> int:
        """Restore what a key holds into a free state, and admit it with q_start = boundary.

        Parameters
        ----------
        key : str or bytes
            What it was put under.
        state_id : int, optional
            A state not in use, which no step in flight may touch. Default: the allocator's next.
        rebuild_dropped : bool
            Start a window before the boundary instead, with swa_valid_start = q_start, so that the rings that are not stored can be
            rebuilt by bounded replay. Whoever computes it stores nothing below kv_cached_end into stored rings. Needs prompt_end.
        **admission
            Other arguments of `MetadataService.admit`: prompt_end (which must exceed the boundary, so that a token is left to
            produce logits), stop_at, chunk_q and so on. Default of kv_cached_end: the boundary.

        Returns
        -------
        int
            The state's id; its admission is staged.

        Raises
        ------
        MissingStateError, CorruptStateError, OtherVersionError, OtherLayoutError, OtherKeyError
            What is stored is not what was asked for.
        BoundaryError
            The stored boundary leaves no token of the prompt, or a compressed entry would pool tokens that nobody has.
        StateInUseError, NoFreeStateError
            There is no free state to restore into.
        StoreUnavailableError
            The back end failed.
        ValueError, IndexError
            An argument breaks a rule of `admit`.
        """
        name = key_bytes(key)
        for argument in SET_BY_GET:
            if argument in admission:
                raise ValueError(f"{argument} given, but the stored state sets it")
        with self._lock:
            if state_id is not None and self._service.in_use(state_id):
                raise StateInUseError(f"state_id={state_id} is in use: release it first")
            found = self._fetch(name)
            admission = {**self._start(found, rebuild_dropped, admission.get("prompt_end", 0)), **admission}
            self._service.check_admission(**admission)
            payload = remapped(self._blob[HEADER_BYTES:][: self.layout.stored_bytes_of(found.ring)], found, self.layout)
            slot = self._take() if state_id is None else state_id
            try:
                self._service.flush()  # the slot's last tenant is gone before its bytes are overwritten
                self._cache.stored(slot).copy_(torch.from_numpy(payload))
                self._service.admit(slot, **admission)
            except BaseException:
                if state_id is None and self._allocator is not None:
                    self._allocator.give_back(slot)
                raise
            return slot

    def contains(self, key: str | bytes) -> bool:
        """Whether anything is stored under a key; raises StoreUnavailableError where the back end fails."""
        name = stored_name(key_bytes(key))
        with self._lock:
            return self._exists(name)

    def delete(self, key: str | bytes) -> bool:
        """Remove what a key holds; returns whether it held anything. Raises StoreUnavailableError where the back end fails."""
        name = stored_name(key_bytes(key))
        with self._lock:
            return self._remove(name)

    def close(self) -> None:  # noqa: B027  (not every back end holds something)
        """Give back what the back end holds; nothing that was put is lost, and a later call takes it again."""

    # ---- what a back end is -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _write(self, name: str, size: int) -> None:
        """Store the buffer's first `size` bytes under a name, whole or not at all."""

    @abstractmethod
    def _read(self, name: str) -> int | None:
        """Read what a name holds into the buffer and return its size, which may exceed the buffer's; None if it holds nothing."""

    @abstractmethod
    def _exists(self, name: str) -> bool:
        """Whether a name holds anything."""

    @abstractmethod
    def _remove(self, name: str) -> bool:
        """Remove what a name holds; returns whether it held anything."""

    # ---- steps of the calls -----------------------------------------------------------------------------------------------------

    def _put(self, key: bytes, boundary: int, head: int, payload: torch.Tensor, valid_start: int) -> None:
        geometry = self.layout.geometry
        check_boundary(boundary, head, valid_start, geometry.ring, geometry.window)
        self._buffer[self._payload].copy_(payload)
        state = StoredState(geometry.ring, boundary, head, valid_start)
        self._write(stored_name(key), write_state(self._blob, key, state, self.layout))

    def _fetch(self, key: bytes) -> StoredState:
        """Read what a key holds into the buffer and check all of it."""
        size = self._read(stored_name(key))
        if size is None:
            raise MissingStateError(f"nothing is stored under {key!r}")
        if size > len(self._blob):
            raise CorruptStateError(f"{size} bytes are stored, more than any state of this layout: {len(self._blob)}")
        return read_state(self._blob[:size], key, self.layout)

    def _start(self, found: StoredState, rebuild_dropped: bool, prompt_end: int) -> dict[str, int]:
        """Arguments of the admission that a stored state decides."""
        boundary = found.boundary
        if 0 < prompt_end <= boundary:
            raise BoundaryError(f"boundary={boundary} leaves no token of prompt_end={prompt_end} to produce logits")
        if rebuild_dropped and not prompt_end:
            raise ValueError("rebuild_dropped given without prompt_end: tokens before the boundary are computed again")
        q_start, valid_start = boundary, found.swa_valid_start
        if rebuild_dropped:
            q_start = valid_start = max(found.swa_valid_start, boundary - self.layout.geometry.window)
        for group in self.layout.compression:
            first_end = (boundary // group.ring.ratio + 1) * group.ring.ratio  # of the first entry that is emitted
            if max(0, first_end - group.ring.pooled_tokens) < q_start:
                raise BoundaryError(
                    f"boundary={boundary}: an entry of compression ratio {group.ring.ratio} pools tokens below "
                    f"q_start={q_start}, and their compression state is not stored"
                )
        return {"q_start": q_start, "swa_valid_start": valid_start, "kv_cached_end": boundary}

    def _take(self) -> int:
        if self._allocator is None:
            raise ValueError("state_id is not given, and the store has no allocator")
        slot = self._allocator.take()
        if slot is None:
            raise NoFreeStateError("the allocator has no free state slot")
        if self._service.in_use(slot):
            self._allocator.give_back(slot)
            raise StateInUseError(f"state_id={slot} of the allocator is in use")
        return slot


def stored_name(key: bytes) -> str:
    """Safe name of a key, the same in every process."""
    return hashlib.sha256(key).hexdigest()
