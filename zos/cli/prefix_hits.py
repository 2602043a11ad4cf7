"""Prefix hits of a trace: how many leading tokens of a prompt were in a prompt admitted before, told by its block hashes."""

from __future__ import annotations

from zos.cli.traces import Request

BLOCK_TOKENS = 512  # that an id of `hash_ids` stands for; a prompt's last block may be shorter


class PrefixHits:
    """A prefix cache that holds every block ever admitted.

    Examples
    --------
    >>> hits = PrefixHits()
    >>> hits.admit(Request(0.0, 1000, 1, hash_ids=(7, 8)))
    0
    >>> hits.admit(Request(0.0, 1100, 1, hash_ids=(7, 9, 8)))
    512
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def admit(self, request: Request) -> int:
        """Tokens of the longest leading run of blocks seen before, cut to the prompt; then all its blocks count as seen."""
        blocks = 0
        for block in request.hash_ids:
            if block not in self._seen:
                break
            blocks += 1
        self._seen.update(request.hash_ids)
        return min(blocks * BLOCK_TOKENS, request.prompt_tokens)
