"""SequenceForks: a live sequence copied into a free state: its record, its next tokens and its state slot."""

from __future__ import annotations

from collections.abc import Iterable

from zos.bounds import FORK
from zos.cache import SwaCache, check_holds
from zos.edits import Edit, StagedEdit
from zos.sequences import SequenceEdits


class SequenceForks(SequenceEdits):
    """The call that copies a sequence; parameters are those of SequenceEdits."""

    _cache: SwaCache | None = None

    def attach_cache(self, cache: SwaCache) -> None:
        """Say where the states lie, so that `fork` copies them.

        Raises
        ------
        ValueError
            The cache is on another device, for another geometry, or has fewer state slots than the service has states.
        """
        check_holds(cache, self.table.records.device, self.geometry, self.table.capacity)
        self._cache = cache

    def fork(self, src: int, dst: int) -> None:
        """Copy a sequence into a free state, from where both go on by themselves.

        Staged, as every edit: `dst` becomes what `src` is after all steps launched before the flush and before all launched later.
        Record and ids of the next step are copied on the device, which knows them, also a phase that the host has not heard of yet:
        a paused, finished or failed sequence gives another one, of the same phase and with the same error, which `check` then names
        twice. Only the generation is dst's own, so a result that is on its way to `src` moves `src` alone. With a cache attached
        the whole state slot is copied in stream order as well: rings, draft rings and compression state.

        Fork between steps: of a chunk longer than ring - window that is stored but not committed yet, the copy would have neither
        the history that it overwrote nor its tokens.

        Parameters
        ----------
        src : int
            A state in use.
        dst : int
            A state not in use.

        Raises
        ------
        ValueError, IndexError
            `src` is not in use, `dst` is, or an id is out of range; nothing is staged.

        Examples
        --------
        >>> svc = MetadataService(capacity=16, max_batch=4, device="cpu")
        >>> svc.admit(state_id=3, q_start=1000)
        >>> svc.fork(src=3, dst=4)
        >>> svc.set_batch([3, 4], batch=2)
        >>> svc.prepare().seqlens_k.tolist()
        [1006, 1006]
        """
        source, state_id = self._state_id(src), self._state_id(dst)
        if source not in self._stop_at:
            raise ValueError(f"src={source} is not in use: admit it first")
        if state_id in self._stop_at:
            raise ValueError(f"dst={state_id} is in use: release it first")
        self._stop_at[state_id] = self._stop_at[source]
        self._lives[state_id] += 1
        self._edits.stage(state_id, Edit.FORK, source)
        self._bounds.stage(FORK, state_id, source=source)

    def _copy_states(self, forks: Iterable[StagedEdit]) -> None:
        """Copy the state slots of forks whose launch is on the current stream, behind it."""
        if self._cache is None:
            return
        for fork in forks:
            self._cache.slot(fork.state_id).copy_(self._cache.slot(fork.source), non_blocking=True)
