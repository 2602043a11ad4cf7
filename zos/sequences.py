"""SequenceEdits: the calls that admit, change and release sequences; each is checked on the host and stages one edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from host_fallback.ring import next_seqlen_q
from zos.arguments import whole_number
from zos.bounded_replay import plan_bounded_replay
from zos.bounds import ADMIT, RELEASE, RESET, SequenceBounds
from zos.edits import NO_TOKENS, Edit, StagedEdits
from zos.geometry import CompressionRing, RingGeometry
from zos.table import SequenceTable


class SequenceEdits:
    """What a service lets the host say about single sequences.

    Parameters
    ----------
    table : SequenceTable
        The records that the edits change.
    edits : StagedEdits
        Where they wait for the next flush.
    geometry : RingGeometry
        Tokens per step.
    max_prefill_tokens : int
        Tokens of a prefill step.
    compression : tuple of CompressionRing
        Compression rings: what a prefix hit must leave them.
    bounds : SequenceBounds
        What the host knows of each sequence's length.
    snapshot_every : int
        Chunks end where they would pass a multiple of it; 0: they do not.
    """

    def __init__(
        self,
        table: SequenceTable,
        edits: StagedEdits,
        geometry: RingGeometry,
        max_prefill_tokens: int,
        compression: tuple[CompressionRing, ...],
        bounds: SequenceBounds,
        snapshot_every: int,
    ) -> None:
        self.table = table
        self.geometry = geometry
        self.max_prefill_tokens = max_prefill_tokens
        self.snapshot_every = snapshot_every
        self.compression = compression
        self._edits = edits
        self._bounds = bounds
        self._stop_at: dict[int, int] = {}  # of every state in use: for checking later calls, never for a step
        # Times that each state was admitted, forked into, reset or released, staged calls included
        self._lives = [0] * table.capacity

    def admit(
        self,
        state_id: int,
        q_start: int = 0,
        seqlen_q: int | None = None,
        *,
        swa_valid_start: int = 0,
        stop_at: int = 0,
        prompt_end: int = 0,
        chunk_q: int = 0,
        decode_q: int = 0,
        kv_cached_end: int = 0,
        tokens: Sequence[int] | None = None,
        prefix_hit: int | None = None,
    ) -> None:
        """Put a sequence into a free state; it is LIVE from the next flush on.

        Parameters
        ----------
        state_id : int
            A state not in use.
        q_start : int
            Number of tokens whose KV is final: the position of the next query.
        seqlen_q : int, optional
            Tokens wanted in the next step, as they are. Default: the next chunk while q_start < prompt_end, ending where it would
            pass a multiple of snapshot_every; else decode_q.
        swa_valid_start : int
            Ring positions below it are missing; 0 … q_start.
        stop_at : int
            Length at which the sequence finishes, 0 for none.
        prompt_end, chunk_q : int
            The sequence prefills up to prompt_end in chunks of chunk_q (0: max_prefill_tokens).
        decode_q : int
            Tokens of its decode steps (0: tokens per step).
        kv_cached_end : int
            Compressed entries of tokens below it exist already and are not emitted again.
        tokens : sequence of int, optional
            Input ids of its next step, with carry_tokens; missing ones are 0.
        prefix_hit : int, optional
            Tokens whose compressed entries a prefix cache had, cut to prompt_end: the sequence starts by bounded replay
            (`zos.plan_bounded_replay`), and q_start, swa_valid_start and kv_cached_end are not given. Needs prompt_end, unless 0.

        Raises
        ------
        ValueError, IndexError
            The state is in use, or a value breaks a rule; nothing is staged.
        """
        state_id = self._state_id(state_id)
        if state_id in self._stop_at:
            raise ValueError(f"state_id={state_id} is in use: release it first")
        words, ids = self._admission(
            state_id, q_start, seqlen_q, swa_valid_start, stop_at, prompt_end, chunk_q, decode_q, kv_cached_end, tokens,
            prefix_hit,
        )  # fmt: skip
        self._stop_at[state_id] = stop_at = words[5]  # a whole number, whatever was given
        self._lives[state_id] += 1
        self._edits.stage(state_id, Edit.ADMIT, *words, tokens=ids)
        self._bounds.stage(ADMIT, state_id, words[1], stop_at)

    def check_admission(self, **columns: Any) -> None:
        """Raise ValueError where `admit` of a free state with these arguments would."""
        defaults = {"q_start": 0, "seqlen_q": None, "swa_valid_start": 0, "stop_at": 0, "prompt_end": 0, "chunk_q": 0}
        defaults |= {"decode_q": 0, "kv_cached_end": 0, "tokens": None, "prefix_hit": None}
        unknown = columns.keys() - defaults
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is no argument of admit")
        self._admission("to come", **{**defaults, **columns})

    def in_use(self, state_id: int) -> bool:
        """Whether a state was admitted and not released since, staged calls included."""
        return self._state_id(state_id) in self._stop_at

    def _admission(
        self,
        state_id: int | str,
        q_start: int,
        seqlen_q: int | None,
        swa_valid_start: int,
        stop_at: int,
        prompt_end: int,
        chunk_q: int,
        decode_q: int,
        kv_cached_end: int,
        tokens: Sequence[int] | None,
        prefix_hit: int | None,
    ) -> tuple[tuple[int, ...], list[int] | None]:
        """Words of an ADMIT edit, and its token ids; raises ValueError where a value breaks a rule."""
        step, limit = self.geometry.tokens_per_step, self.max_prefill_tokens
        if prefix_hit is not None:
            for name, value in (
                ("q_start", q_start),
                ("swa_valid_start", swa_valid_start),
                ("kv_cached_end", kv_cached_end),
            ):
                if value != 0:
                    raise ValueError(
                        f"{name}={value} given, but prefix_hit={prefix_hit} of state_id {state_id} sets it"
                    )
            prefix_hit = whole_number("prefix_hit", prefix_hit, 0)
            if prefix_hit > 0 and prompt_end == 0:
                raise ValueError(f"prefix_hit={prefix_hit} of state_id {state_id} given without prompt_end")
            plan = plan_bounded_replay(prefix_hit, prompt_end, self.geometry.window)
            q_start, swa_valid_start, kv_cached_end = plan
            if plan.kv_cached_end > 0:
                self._check_pooled(state_id)
        q_start = whole_number("q_start", q_start, 0)
        swa_valid_start = whole_number("swa_valid_start", swa_valid_start, 0)
        if swa_valid_start > q_start:
            raise ValueError(f"swa_valid_start={swa_valid_start} exceeds q_start={q_start} of state_id {state_id}")
        prompt_end = whole_number("prompt_end", prompt_end, 0)
        stop_at = whole_number("stop_at", stop_at, 0)
        _check_stop(state_id, stop_at, q_start, prompt_end)
        chunk_q = whole_number("chunk_q", chunk_q, 0, limit)
        decode_q = whole_number("decode_q", decode_q, 0, step)
        kv_cached_end = whole_number("kv_cached_end", kv_cached_end, 0)
        if seqlen_q is None:
            seqlen_q = int(next_seqlen_q(q_start, prompt_end, chunk_q, decode_q, step, limit, self.snapshot_every))
        seqlen_q = whole_number("seqlen_q", seqlen_q, 0, max(step, limit))
        whole_number("q_start + seqlen_q", q_start + seqlen_q, 0)
        if q_start < prompt_end < q_start + seqlen_q:
            raise ValueError(
                f"seqlen_q={seqlen_q} from q_start={q_start} reaches past prompt_end={prompt_end} of state_id {state_id}"
            )
        words = (seqlen_q, q_start, prompt_end, swa_valid_start, kv_cached_end, stop_at, chunk_q, decode_q, NO_TOKENS)
        return words, self._token_ids(tokens)

    def set_seqlen_q(self, state_id: int, seqlen_q: int) -> None:
        """Set the tokens wanted in the state's next step (0 … max_prefill_tokens or tokens per step); never revives it."""
        state_id = self._state_in_use(state_id)
        most = max(self.geometry.tokens_per_step, self.max_prefill_tokens)
        self._edits.stage(state_id, Edit.SET_SEQLEN_Q, whole_number("seqlen_q", seqlen_q, 0, most))

    def set_valid_start(self, state_id: int, swa_valid_start: int) -> None:
        """Declare ring positions below `swa_valid_start` missing; past q_start it becomes an error of the state at prepare."""
        state_id = self._state_in_use(state_id)
        self._edits.stage(state_id, Edit.SET_VALID_START, whole_number("swa_valid_start", swa_valid_start, 0))

    def pause(self, state_id: int) -> None:
        """LIVE -> PAUSED: no longer prepared; outstanding results still count and seqlen_q stays. Any other phase stays."""
        self._edits.stage(self._state_in_use(state_id), Edit.PAUSE)

    def resume(self, state_id: int) -> None:
        """PAUSED -> LIVE; any other phase stays."""
        self._edits.stage(self._state_in_use(state_id), Edit.RESUME)

    def reset(self, state_id: int, prompt_end: int = 0) -> None:
        """Start the sequence over: LIVE, PAUSED or ERROR -> LIVE at position 0; results still outstanding are dropped.

        A FINISHED sequence stays as it is: release and admit it again. `prompt_end` must not exceed the stop_at it was admitted
        with (ValueError).
        """
        state_id = self._state_in_use(state_id)
        prompt_end = whole_number("prompt_end", prompt_end, 0)
        _check_stop(state_id, self._stop_at[state_id], 0, prompt_end)
        self._lives[state_id] += 1
        self._edits.stage(state_id, Edit.RESET, prompt_end)
        self._bounds.stage(RESET, state_id)

    def release(self, state_id: int) -> None:
        """Give the state back: -> FREE; results still outstanding are dropped."""
        state_id = self._state_in_use(state_id)
        self._lives[state_id] += 1
        self._edits.stage(state_id, Edit.RELEASE)
        self._bounds.stage(RELEASE, state_id)
        del self._stop_at[state_id]

    def _check_pooled(self, state_id: int | str) -> None:
        """Raise ValueError if the first entry after a prefix hit would pool tokens below those that are computed again."""
        window = self.geometry.window
        for ring in self.compression:
            if ring.pooled_tokens > window + 1:
                raise ValueError(
                    f"prefix_hit given for state_id {state_id}, but an entry of compression ratio {ring.ratio} pools "
                    f"{ring.pooled_tokens} tokens, and only the window={window} tokens before the hit are computed again"
                )

    def _state_id(self, state_id: int, padding: bool = False) -> int:
        number = whole_number("state_id", state_id, -(2**63), 2**63 - 1)
        if not (0 <= number < self.table.capacity or (padding and number == -1)):
            raise IndexError(f"state_id={number} is outside 0 … {self.table.capacity - 1}")
        return number

    def _checked_ids(self, state_ids: Iterable[int]) -> list[int]:
        """Ids of a batch: in range or -1, no state twice."""
        if not isinstance(state_ids, Iterable):
            raise ValueError(f"state_ids={state_ids!r} is not a sequence of state ids")
        ids = [self._state_id(state_id, padding=True) for state_id in state_ids]
        named = [state_id for state_id in ids if state_id != -1]
        if len(set(named)) != len(named):
            twice = next(state_id for place, state_id in enumerate(named) if state_id in named[:place])
            raise ValueError(f"state_ids names state_id {twice} twice")
        return ids

    def _state_in_use(self, state_id: int) -> int:
        number = self._state_id(state_id)
        if number not in self._stop_at:
            raise ValueError(f"state_id={number} is not in use: admit it first")
        return number

    def _token_ids(self, tokens: Sequence[int] | None) -> list[int] | None:
        if tokens is None:
            return None
        if self.table.token_ids is None:
            raise ValueError("tokens given, but the table carries no tokens (carry_tokens=False)")
        ids = [whole_number("tokens", token, -(2**63), 2**63 - 1) for token in tokens]
        if len(ids) > self.geometry.tokens_per_step:
            raise ValueError(f"tokens has {len(ids)} ids, more than tokens per step {self.geometry.tokens_per_step}")
        return ids


def _check_stop(state_id: int | str, stop_at: int, q_start: int, prompt_end: int) -> None:
    if 0 < stop_at <= q_start:
        raise ValueError(f"stop_at={stop_at} must exceed q_start={q_start} of state_id {state_id}")
    if 0 < stop_at < prompt_end:
        raise ValueError(f"stop_at={stop_at} must not be below prompt_end={prompt_end} of state_id {state_id}")
