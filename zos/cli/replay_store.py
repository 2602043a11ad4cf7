"""The replay's prefix cache: states stored at the ends of blocks, and what was restored from them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from zos.cache import SwaCache
from zos.cli import InputError
from zos.cli.dense_ring import RestoredPrefixes
from zos.cli.prefix_hits import BLOCK_TOKENS
from zos.cli.traces import Request
from zos.errors import MissingStateError, StoreError
from zos.mooncake_store import MASTER_PORT, METADATA_PORT
from zos.service import MetadataService
from zos.store import LocalStateStore, MooncakeStateStore, StateStore

SEGMENT_BYTES = 512 * 2**20  # lent to a Mooncake Store, which may have no other memory
LARGEST_PORT = 65_535


@dataclass
class StoreFigures:
    """What came of puts and gets."""

    states_stored: int = 0
    puts_failed: int = 0
    hits_restored: int = 0
    hits_without_state: int = 0  # adopted by bounded replay: none was stored at the hit's last block
    gets_failed: int = 0  # adopted by bounded replay: refused, or the store was not there

    def summary(self) -> dict[str, int]:
        """Every figure by name."""
        return asdict(self)


class Stored(NamedTuple):
    """Whose state a key holds, so that it can be told what must come back."""

    state_id: int
    generation: int
    swa_valid_start: int


class Restored(NamedTuple):
    """Where a sequence starts after its prefix was restored."""

    q_start: int
    swa_valid_start: int


class ReplayStore:
    """Puts states into a store where a chunk ends with a block, and starts prefix hits from them.

    Parameters
    ----------
    store : StateStore
        Over the replay's service and rings.
    restored : RestoredPrefixes, optional
        Told what each restored state holds.

    Attributes
    ----------
    figures : StoreFigures
    """

    def __init__(self, store: StateStore, restored: RestoredPrefixes | None = None) -> None:
        self._store = store
        self._restored = restored
        self._stored: dict[bytes, Stored] = {}  # what this run put
        self._blocks: dict[int, tuple[int, ...]] = {}  # of each state's prompt
        self.figures = StoreFigures()

    def admit(
        self, state_id: int, generation: int, request: Request, hit: int, columns: Mapping[str, Any]
    ) -> Restored | None:
        """Restore the state at the last multiple of chunk_q that a prefix hit covers and that leaves a token, and admit it.

        Parameters
        ----------
        state_id, generation : int
            A free state, and the generation that it will have.
        request : Request
            Whose prompt it is.
        hit : int
            Tokens of the prompt that the prefix cache has.
        columns : mapping of str to int
            Further arguments of the admission; chunk_q is a multiple of a block.

        Returns
        -------
        Restored or None
            None where nothing could be restored: the sequence is still to be admitted.
        """
        self._blocks[state_id] = request.hash_ids
        chunk_q = columns["chunk_q"]
        boundary = min(hit, request.prompt_tokens - 1) // chunk_q * chunk_q
        if boundary == 0:
            return None
        key = _key(request.hash_ids, boundary)
        stored = self._stored.get(key)
        if stored is None:  # what an earlier run may have left there could not be checked
            self.figures.hits_without_state += 1
            return None
        try:
            self._store.get(key, state_id, kv_cached_end=hit, **columns)
        except MissingStateError:
            self.figures.hits_without_state += 1
            return None
        except StoreError as error:
            self.figures.gets_failed += 1
            self._failed(f"get of {boundary} tokens", error)
            return None
        self.figures.hits_restored += 1
        if self._restored is not None:
            self._restored.add(state_id, generation, boundary, stored.state_id, stored.generation)
        return Restored(boundary, stored.swa_valid_start)

    def put(self, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Put those of the prefilled states int64 [N] that stand at a multiple of chunk_q, unless their prefix is stored.

        `columns` are the table's, as they should be.
        """
        for state_id in rows.tolist():
            boundary, blocks = int(columns["q_start"][state_id]), self._blocks[state_id]
            if boundary % columns["chunk_q"][state_id] or boundary > len(blocks) * BLOCK_TOKENS:
                continue
            key = _key(blocks, boundary)
            if key in self._stored:
                continue
            try:
                self._store.put(key, state_id, boundary)
            except StoreError as error:
                self.figures.puts_failed += 1
                self._failed(f"put of {boundary} tokens", error)
                continue
            self.figures.states_stored += 1
            self._stored[key] = Stored(
                state_id, int(columns["generation"][state_id]), int(columns["swa_valid_start"][state_id])
            )

    def close(self) -> None:
        """Give back what the store holds."""
        self._store.close()

    def _failed(self, call: str, error: StoreError) -> None:
        if self.figures.puts_failed + self.figures.gets_failed == 1:
            print(f"store: first failure: {call}: {type(error).__name__}: {error}", file=sys.stderr)


def check_place(place: str) -> None:
    """Raise InputError unless `open_store` can make something of a place."""
    kind, _, rest = place.partition(":")
    if kind == "local" and rest:
        return
    host, *ports = rest.split(":")
    if kind == "mooncake" and host and len(ports) <= 2 and all(_is_port(port) for port in ports):
        return
    raise InputError(f"--store {place}: neither local:DIRECTORY nor mooncake:HOST[:PORT[:METADATA_PORT]]")


def open_store(place: str, service: MetadataService, cache: SwaCache) -> StateStore:
    """Open what --store names; raises InputError where it cannot be used."""
    kind, _, rest = place.partition(":")
    try:
        if kind == "local":
            return LocalStateStore(service, cache, rest)
        host, *ports = rest.split(":")
        port, metadata_port = (*map(int, ports), *(MASTER_PORT, METADATA_PORT)[len(ports) :])
        return MooncakeStateStore(
            service, cache, host, port=port, metadata_port=metadata_port, segment_bytes=SEGMENT_BYTES
        )
    except StoreError as error:
        raise InputError(f"--store {place}: {error}") from None


def _key(blocks: tuple[int, ...], boundary: int) -> bytes:
    """Key of a prefix of whole blocks; a digest, as a header has no room for every id of a long prompt."""
    return hashlib.sha256(np.array(blocks[: boundary // BLOCK_TOKENS], np.int64).tobytes()).digest()


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) <= LARGEST_PORT
