"""The log of a replay by requests: what its service was asked to change, in call order, for the model that checks the records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from zos.metadata import DecodeMetadata
from zos.requests import Request
from zos.service import MetadataService

Call = tuple[str, tuple[Any, ...]]  # what was asked, and its arguments


class LoggedService(MetadataService):
    """A service that logs what it is asked to change, in call order, and lets a checker look just before a launch.

    Attributes
    ----------
    log : list
        Calls since it was last emptied: they take effect with the next launch.
    submitted : deque of Request
        Those that wait for a state, in order of arrival: who an `admit` is for.
    before_launch : callable or None
        Called once, before the next step is launched.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.log: list[Call] = []
        self.submitted: deque[Request] = deque()
        self.before_launch: Callable[[], None] | None = None
        super().__init__(*arguments, **options)

    def admit(self, state_id: int, *arguments: Any, **columns: Any) -> None:
        """Logged, with the request that must be the next."""
        super().admit(state_id, *arguments, **columns)
        request = self.submitted.popleft() if self.submitted else None
        self.log.append(("admit", (state_id, request, columns["q_start"], columns["stop_at"])))

    def release(self, state_id: int) -> None:
        """Logged."""
        super().release(state_id)
        self.log.append(("release", (state_id,)))

    def pause(self, state_id: int) -> None:
        """Logged."""
        super().pause(state_id)
        self.log.append(("pause", (state_id,)))

    def resume(self, state_id: int) -> None:
        """Logged."""
        super().resume(state_id)
        self.log.append(("resume", (state_id,)))

    def reset(self, state_id: int, prompt_end: int = 0) -> None:
        """Logged."""
        super().reset(state_id, prompt_end)
        self.log.append(("reset", (state_id,)))

    def set_batch(
        self, state_ids: Iterable[int], batch: int | None = None, max_tokens: int | None = None, slot: int = 0
    ) -> None:
        """Logged, with the last step whose record the host had read by then."""
        ids = list(state_ids)
        super().set_batch(ids, batch, max_tokens, slot)
        self.log.append(("set_batch", (ids, self.steps_read)))

    def set_ready(self, state_ids: Iterable[int], slot: int = 0) -> None:
        """Logged."""
        ids = list(state_ids)
        super().set_ready(ids, slot)
        self.log.append(("set_ready", (ids,)))

    def prepare(self, slot: int = 0) -> DecodeMetadata:
        """Look, if that is wanted."""
        self._look()
        metadata: DecodeMetadata = super().prepare(slot)
        return metadata

    def replay(self, *arguments: Any) -> None:
        """Look, if that is wanted."""
        self._look()
        super().replay(*arguments)

    @property
    def steps_read(self) -> int:
        """Steps whose records the host has read."""
        mailbox = self.slot(0).mailbox
        return 0 if mailbox is None else mailbox.next_step - 1

    def _look(self) -> None:
        look, self.before_launch = self.before_launch, None
        if look is not None:
            look()
