"""RingGeometry and CompressionRing: how many slots a sequence's rings need, as pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from zos.arguments import flag, whole_number


@dataclass(frozen=True)
class RingGeometry:
    """Sizes of a sequence's sliding-window ring.

    A decode step writes its tokens_per_step new vectors first and attends then, so the ring holds the first query's window and
    the whole step at once: window + tokens_per_step - 1 slots (docs/design.md, "Ring"); a non-causal draft block, whose
    queries all see `window` tokens of context, needs one more.

    Parameters
    ----------
    window : int
        Tokens that a query sees, itself included (1 or more).
    draft_tokens : int
        Draft tokens per decode step (0 or more).
    ring : int, optional
        Slots of the ring. Default: window + tokens_per_step, which serves both kinds.
    causal : bool
        False for a ring that a non-causal draft block reads.

    Raises
    ------
    ValueError
        The ring is too short: positions of one step would share a slot with positions still to be read.

    Examples
    --------
    >>> RingGeometry(window=128, draft_tokens=5).ring
    134
    """

    window: int = 128
    draft_tokens: int = 5
    ring: int = 0
    causal: bool = True

    def __init__(self, window: int = 128, draft_tokens: int = 5, ring: int | None = None, causal: bool = True) -> None:
        window = whole_number("window", window, 1)
        draft_tokens = whole_number("draft_tokens", draft_tokens, 0)
        tokens_per_step = draft_tokens + 1
        least = window + tokens_per_step - (1 if flag("causal", causal) else 0)
        ring = window + tokens_per_step if ring is None else whole_number("ring", ring, 0)
        if ring < least:
            kind = "causal decode" if causal else "a non-causal draft block"
            raise ValueError(
                f"ring={ring} is too short: {kind} with window={window} and draft_tokens={draft_tokens} needs {least} slots"
            )
        whole_number("window + tokens_per_step", window + tokens_per_step, 1)
        for name, value in (("window", window), ("draft_tokens", draft_tokens), ("ring", ring), ("causal", causal)):
            object.__setattr__(self, name, value)

    @property
    def tokens_per_step(self) -> int:
        """Query tokens of a decode step: the drafts and the token before them."""
        return self.draft_tokens + 1


@dataclass(frozen=True)
class CompressionRing:
    """Sizes of a sequence's ring of not yet pooled tokens, of which every `ratio` make one compressed entry.

    Parameters
    ----------
    ratio : int
        Tokens per compressed entry (1 or more).
    tokens_per_step : int
        Query tokens of a decode step.
    overlap : bool
        True where an entry pools the `ratio` tokens before its own as well.
    entries : int, optional
        Entries of the ring. Default, and the least that is accepted: ratio + tokens_per_step - 1, with overlap
        2 * ratio + tokens_per_step - 1 (docs/design.md, "Ring").

    Raises
    ------
    ValueError
        The ring is too short: a step would overwrite tokens that an entry still has to pool.

    Examples
    --------
    >>> CompressionRing(2).entries, CompressionRing(4, overlap=True).entries
    (7, 13)
    """

    ratio: int
    tokens_per_step: int = 6
    overlap: bool = False
    entries: int = 0

    def __init__(self, ratio: int, tokens_per_step: int = 6, overlap: bool = False, entries: int | None = None) -> None:
        ratio = whole_number("ratio", ratio, 1)
        tokens_per_step = whole_number("tokens_per_step", tokens_per_step, 1)
        pooled = (2 if flag("overlap", overlap) else 1) * ratio
        least = whole_number("compression entries", pooled + tokens_per_step - 1, 1)
        entries = least if entries is None else whole_number("entries", entries, 0)
        if entries < least:
            raise ValueError(
                f"entries={entries} is too short: ratio={ratio} with tokens_per_step={tokens_per_step} needs {least}"
            )
        for name, value in (
            ("ratio", ratio),
            ("tokens_per_step", tokens_per_step),
            ("overlap", overlap),
            ("entries", entries),
        ):
            object.__setattr__(self, name, value)

    @property
    def pooled_tokens(self) -> int:
        """Tokens that one compressed entry pools."""
        return 2 * self.ratio if self.overlap else self.ratio
