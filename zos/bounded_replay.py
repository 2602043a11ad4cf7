"""Bounded replay: how a sequence starts after a prefix hit that brought compressed entries but no sliding-window state."""

from __future__ import annotations

from typing import NamedTuple

from zos.arguments import whole_number


class ReplayPlan(NamedTuple):
    """Where a sequence starts."""

    q_start: int  # first position that is computed
    swa_valid_start: int  # ring positions below it are missing and never read
    kv_cached_end: int  # compressed entries of tokens below it exist and are not emitted again


def plan_bounded_replay(hit_length: int, prompt_end: int | None = None, window: int = 128) -> ReplayPlan:
    """Plan the start of a sequence whose first `hit_length` tokens were found in a prefix cache.

    With H = min(hit_length, prompt_end) the last `window` tokens before H are computed again and read nothing below themselves;
    their window entries are new, their compressed entries are not emitted again. This is not bit-identical to a run without the
    hit: the recomputed tokens see a shorter window. After `window` further tokens no query sees a missing position. A hit no longer
    than the window saves nothing and is not adopted.

    Parameters
    ----------
    hit_length : int
        Tokens found, 0 or more.
    prompt_end : int, optional
        Length of the prompt. Default: the hit is not cut.
    window : int
        Tokens that a query sees.

    Raises
    ------
    ValueError
        A value is out of range.

    Examples
    --------
    >>> plan_bounded_replay(1000, prompt_end=1500)
    ReplayPlan(q_start=872, swa_valid_start=872, kv_cached_end=1000)
    >>> plan_bounded_replay(128)
    ReplayPlan(q_start=0, swa_valid_start=0, kv_cached_end=0)
    """
    window = whole_number("window", window, 1)
    hit = whole_number("hit_length", hit_length, 0)
    if prompt_end is not None:
        hit = min(hit, whole_number("prompt_end", prompt_end, 0))
    if hit <= window:
        return ReplayPlan(0, 0, 0)
    return ReplayPlan(hit - window, hit - window, hit)
