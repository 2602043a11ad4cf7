"""Test that any bytes at all are either the state that was stored or refused by name."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zos
from zos.store_format import (
    DIGEST_OFFSET,
    FIELDS,
    HEADER_BYTES,
    MAGIC,
    PREFIX,
    VERSION,
    StoredState,
    read_state,
    write_state,
)

LAYOUT = zos.StateSlotLayout(zos.RingGeometry(4, 1), stored_layers=1)
KEY = b"key"
NUMBERS = st.one_of(st.integers(0, 12), st.integers(0, 2**32 - 1))


def whole(payload: bytes = b"") -> bytearray:
    state = StoredState(ring=6, boundary=100, head=101, swa_valid_start=0)
    blob = bytearray(HEADER_BYTES + LAYOUT.stored_bytes_of(state.ring))
    blob[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    assert write_state(memoryview(blob), KEY, state, LAYOUT) == len(blob)
    return blob


def signed(blob: bytearray) -> bytes:
    """The same with a header that has its checksum."""
    blob[DIGEST_OFFSET:HEADER_BYTES] = hashlib.sha256(blob[:DIGEST_OFFSET]).digest()
    return bytes(blob)


def test_what_was_written(seed: int) -> None:
    """A header says what the writer said; its place for each field is fixed, as other versions must find at least the first two."""
    blob = bytes(whole())
    assert read_state(blob, KEY, LAYOUT) == StoredState(ring=6, boundary=100, head=101, swa_valid_start=0)
    assert blob[:12] == b"zosstate" + struct.pack("<I", 1)
    assert (HEADER_BYTES, PREFIX.size, FIELDS.size, DIGEST_OFFSET) == (4096, 12, 96, 4064)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2 * HEADER_BYTES), st.booleans())
def test_any_bytes(noise: bytes, begun: bool) -> None:
    """Noise, also behind a right beginning, is refused by a name that the caller can catch."""
    with pytest.raises(zos.StoreError):
        read_state(PREFIX.pack(MAGIC, VERSION) + noise if begun else noise, KEY, LAYOUT)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_edit(data: st.DataObject) -> None:
    """Bytes exchanged anywhere, cut off or appended: refused, or nothing was changed."""
    blob = original = bytes(whole(payload=bytes(range(256))))
    begin = data.draw(st.integers(0, len(blob)))
    edit = data.draw(st.binary(max_size=16))
    blob = blob[:begin] + edit + blob[begin + data.draw(st.integers(0, 20)) :]
    if blob == original:
        assert read_state(blob, KEY, LAYOUT)
        return
    with pytest.raises((zos.CorruptStateError, zos.OtherVersionError)):
        read_state(blob, KEY, LAYOUT)


@settings(max_examples=500, deadline=None)
@given(st.lists(NUMBERS, min_size=6, max_size=6), st.integers(0, 2**64 - 1) | st.just(LAYOUT.stored_bytes))
def test_any_signed_header(numbers: list[int], payload: int) -> None:
    """A header with a right checksum that says nonsense is taken for nonsense: never a crash, never a state that breaks a rule."""
    blob = whole()
    fingerprint = bytes.fromhex(LAYOUT.stored_fingerprint)
    digest = hashlib.sha256(blob[HEADER_BYTES:]).digest()
    FIELDS.pack_into(blob, PREFIX.size, fingerprint, *numbers, payload, digest)
    try:
        state = read_state(signed(blob), KEY, LAYOUT)
    except zos.StoreError:
        return
    assert state.ring == 6 and 1 <= state.boundary <= state.head <= state.boundary + 2
    assert 0 <= state.swa_valid_start <= state.boundary and numbers[5] == len(KEY) and numbers[0] == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 5},
        *({"ring": ring, "payload": LAYOUT.stored_bytes_of(ring)} for ring in (3, 13)),
        {"ring": 0, "payload": 0},
        {"ring": 7},
        *({"boundary": boundary} for boundary in (0, 98, 102)),
        {"boundary": 2**31, "head": 2**31},
        {"swa_valid_start": 101},
        *({"key": length} for length in (2, 2**32 - 1)),
        {"payload": 0},
    ],
)
def test_each_number(changes: dict[str, int]) -> None:
    """Each number of a header that has its checksum is checked."""
    numbers = {"window": 4, "ring": 6, "boundary": 100, "head": 101, "swa_valid_start": 0, "key": 3}
    numbers |= {"payload": LAYOUT.stored_bytes, **changes}
    blob = whole()
    blob[HEADER_BYTES:] = bytes(numbers["payload"])
    FIELDS.pack_into(
        blob,
        PREFIX.size,
        bytes.fromhex(LAYOUT.stored_fingerprint),
        *numbers.values(),
        hashlib.sha256(blob[HEADER_BYTES:]).digest(),
    )
    with pytest.raises((zos.CorruptStateError, zos.OtherKeyError)):
        read_state(signed(blob), KEY, LAYOUT)
