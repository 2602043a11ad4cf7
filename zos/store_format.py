"""The bytes of a stored state: header, checksums, and the re-mapping of rings of another length."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np

from zos.arguments import INT32_LARGEST
from zos.errors import BoundaryError, CorruptStateError, OtherKeyError, OtherLayoutError, OtherVersionError
from zos.layout import StateSlotLayout

VERSION = 1
MAGIC = b"zosstate"
HEADER_BYTES = 4096  # so that the payload begins on a page
DIGEST_BYTES = hashlib.sha256().digest_size
# magic, version; then: fingerprint, window, ring, boundary, head, swa_valid_start, key bytes, payload bytes, payload digest
PREFIX = struct.Struct("<8sI")
FIELDS = struct.Struct(f"<{DIGEST_BYTES}s6IQ{DIGEST_BYTES}s")
KEY_OFFSET = PREFIX.size + FIELDS.size
DIGEST_OFFSET = (
    HEADER_BYTES - DIGEST_BYTES
)  # of the header's own digest, its last bytes; between key and digest are zeros
LONGEST_KEY = DIGEST_OFFSET - KEY_OFFSET
RING_FACTOR = 2  # a state is read whose rings are up to so many times as long as the reader's


class StoredState(NamedTuple):
    """What a header says of a state, its payload aside."""

    ring: int  # slots of each of the writer's rings
    boundary: int  # tokens whose KV the state stands for
    head: int  # highest position ever written, plus 1
    swa_valid_start: int  # ring positions below it are missing


def key_bytes(key: str | bytes) -> bytes:
    """Return a key as the bytes that are stored; raises ValueError unless it is a str or bytes of at most LONGEST_KEY bytes."""
    if not isinstance(key, str | bytes):
        raise ValueError(f"key={key!r} is neither str nor bytes")
    encoded = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    if len(encoded) > LONGEST_KEY:
        raise ValueError(f"key has {len(encoded)} bytes, more than {LONGEST_KEY}: hash it")
    return encoded


def check_boundary(boundary: int, head: int, swa_valid_start: int, ring: int, window: int) -> None:
    """Raise BoundaryError unless a ring written up to `head` still holds the window before `boundary`."""
    if not 1 <= boundary <= head:
        raise BoundaryError(f"boundary={boundary} is outside 1 … head={head}")
    if head - boundary > ring - window:
        raise BoundaryError(
            f"boundary={boundary} is {head - boundary} behind head={head}, but a ring of {ring} slots keeps the window of "
            f"{window} for {ring - window} only"
        )
    if not 0 <= swa_valid_start <= boundary:
        raise BoundaryError(f"swa_valid_start={swa_valid_start} is outside 0 … boundary={boundary}")


def largest_bytes(layout: StateSlotLayout) -> int:
    """Bytes of the largest stored state that a reader with this layout takes."""
    return HEADER_BYTES + layout.stored_bytes_of(RING_FACTOR * layout.geometry.ring)


def write_state(blob: memoryview, key: bytes, state: StoredState, layout: StateSlotLayout) -> int:
    """Put the header before a payload that is in place.

    Parameters
    ----------
    blob : memoryview
        uint8 [HEADER_BYTES + payload bytes or more]; the payload stands from HEADER_BYTES on.
    key : bytes
        From `key_bytes`.
    state : StoredState
        What the payload is, with the layout's ring.
    layout : StateSlotLayout
        The writer's.

    Returns
    -------
    int
        Bytes of the whole.
    """
    payload = layout.stored_bytes_of(state.ring)
    whole = HEADER_BYTES + payload
    header = bytearray(DIGEST_OFFSET)
    PREFIX.pack_into(header, 0, MAGIC, VERSION)
    fingerprint, digest = bytes.fromhex(layout.stored_fingerprint), _digest(blob[HEADER_BYTES:whole])
    numbers = (layout.geometry.window, *state, len(key), payload)
    FIELDS.pack_into(header, PREFIX.size, fingerprint, *numbers, digest)
    header[KEY_OFFSET : KEY_OFFSET + len(key)] = key
    blob[:HEADER_BYTES] = bytes(header) + hashlib.sha256(header).digest()
    return whole


def read_state(blob: bytes | memoryview, key: bytes, layout: StateSlotLayout) -> StoredState:
    """Check every byte of what was found under a key.

    Parameters
    ----------
    blob : bytes or memoryview
        uint8 [bytes found]: anything.
    key : bytes
        What it should have been stored under.
    layout : StateSlotLayout
        The reader's; its ring may have another length than the writer's.

    Returns
    -------
    StoredState
        What the payload, blob[HEADER_BYTES:], is.

    Raises
    ------
    CorruptStateError, OtherVersionError, OtherLayoutError, OtherKeyError
        The first thing that is wrong.
    """
    if len(blob) < PREFIX.size:
        raise CorruptStateError(f"the {len(blob)} bytes found are no stored state: too short")
    magic, version = PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise CorruptStateError(f"the bytes found are no stored state: they begin with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise OtherVersionError(f"the state has format version {version}; this reader knows {VERSION}")
    header = bytes(blob[:HEADER_BYTES])
    if len(header) < HEADER_BYTES:
        raise CorruptStateError(f"the state is truncated: {len(header)} bytes of a header of {HEADER_BYTES}")
    if hashlib.sha256(header[:DIGEST_OFFSET]).digest() != header[DIGEST_OFFSET:]:
        raise CorruptStateError("the state's header does not have its checksum")
    fingerprint, window, *numbers, key_length, payload, digest = FIELDS.unpack_from(header, PREFIX.size)
    if fingerprint.hex() != layout.stored_fingerprint:
        raise OtherLayoutError(
            f"the state's layout is {fingerprint.hex()}, not {layout.stored_fingerprint} (more than the ring differs)"
        )
    found_key = header[KEY_OFFSET:DIGEST_OFFSET][:key_length]
    if found_key != key:
        raise OtherKeyError(f"the state was stored under {_shown(found_key)}, not {_shown(key)}")
    state = StoredState(*numbers)
    _check_numbers(state, window, payload, layout)
    if len(blob) != HEADER_BYTES + payload:
        raise CorruptStateError(
            f"the state has {len(blob) - HEADER_BYTES} bytes behind its header instead of {payload}"
        )
    if _digest(blob[HEADER_BYTES:]) != digest:
        raise CorruptStateError("the state's bytes do not have their checksum")
    return state


def remapped(payload: memoryview, state: StoredState, layout: StateSlotLayout) -> np.ndarray:
    """Rings of the writer's length as rings of the reader's, by position.

    Parameters
    ----------
    payload : memoryview
        uint8 [layout.stored_bytes_of(state.ring)].
    state : StoredState
        What it is.
    layout : StateSlotLayout
        The reader's.

    Returns
    -------
    numpy.ndarray
        uint8 [layout.stored_bytes]: positions boundary - W … head - 1, as far as R slots hold them, each in slot p % R; zeros
        elsewhere. The payload itself where the rings are as long.
    """
    ring, found = layout.geometry.ring, np.frombuffer(payload, np.uint8)
    if state.ring == ring:
        return found
    first = max(0, state.boundary - layout.geometry.window)
    positions = np.arange(first, min(state.head, first + ring))
    target = np.zeros(layout.stored_bytes, np.uint8)
    for into, out_of in zip(_pages(target, ring, layout), _pages(found, state.ring, layout), strict=True):
        into[:, positions % ring] = out_of[:, positions % state.ring]
    return target


def _pages(rings: np.ndarray, ring: int, layout: StateSlotLayout) -> list[np.ndarray]:
    """What a slot's entry is made of, as views of stored rings: uint8 [stored layers, ring, bytes] each."""
    entry = layout.entry
    layers = rings.reshape(layout.stored_layers, -1)
    if entry.interleaved:
        return [layers[:, : ring * entry.entry_bytes].reshape(len(layers), ring, entry.entry_bytes)]
    scales = layers[:, entry.scale_offset(0, ring) :][:, : ring * entry.scale_bytes]
    data = layers[:, : ring * entry.data_bytes]
    return [data.reshape(len(layers), ring, entry.data_bytes), scales.reshape(len(layers), ring, entry.scale_bytes)]


def _check_numbers(state: StoredState, window: int, payload: int, layout: StateSlotLayout) -> None:
    """Raise CorruptStateError where a header that has its checksum says what no writer writes."""
    if window != layout.geometry.window:
        raise CorruptStateError(f"the state's header says window={window}, its layout {layout.geometry.window}")
    longest = RING_FACTOR * layout.geometry.ring
    if not 1 <= state.ring <= longest:
        raise CorruptStateError(f"the state's rings have {state.ring} slots; 1 … {longest} are read")
    if payload != layout.stored_bytes_of(state.ring):
        raise CorruptStateError(f"the state's header says {payload} bytes, but its rings have another length")
    if state.head > INT32_LARGEST:
        raise CorruptStateError(f"the state's head={state.head} exceeds {INT32_LARGEST}")
    try:
        check_boundary(state.boundary, state.head, state.swa_valid_start, state.ring, window)
    except BoundaryError as error:
        raise CorruptStateError(f"the state's header contradicts itself: {error}") from None


def _digest(payload: bytes | memoryview) -> bytes:
    return hashlib.sha256(payload).digest()


def _shown(key: bytes) -> str:
    """Key as an error names it."""
    return repr(key if len(key) <= 64 else key[:61] + b"...")
