"""The churn of a replay by requests: cancels, preempts, resumes and resets them at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from zos.cli.replay_log import LoggedService
from zos.cli.replay_requests_report import ChurnFigures
from zos.loop import DecodeLoop
from zos.requests import Request, RequestState

RESET_BELOW = 2048  # only requests that end below it are reset: they start over at 0
NOT_OVER = (RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)


class Churn:
    """Disturbs requests at random: cancels, preempts, resumes, resets.

    Parameters
    ----------
    chance : float
        Of one disturbance after each replay.
    seed : int
    loop, service
        Whose requests and states.

    Attributes
    ----------
    figures : ChurnFigures
        How often it did what.
    """

    def __init__(self, chance: float, seed: int, loop: DecodeLoop, service: LoggedService) -> None:
        self._chance = chance
        self._random = random.Random(seed)
        self._loop = loop
        self._service = service
        self._resting: list[Request] = []
        self._were_reset: set[int] = set()  # numbers; once each, so that every run ends
        self.figures = ChurnFigures()

    def after_replay(self, live: list[Request]) -> bool:
        """Disturb one of the requests that are not over, maybe; returns whether."""
        if self._random.random() >= self._chance:
            return False
        running = [request for request in live if request.state is RequestState.RUNNING]
        short = [request for request in running if self._may_reset(request)]
        resting = self.resting()
        kinds: tuple[tuple[list[Request], Callable[[Request], None]], ...] = (
            ([request for request in live if request.state is not RequestState.PREEMPTED], self._cancel),
            (running, self._preempt),
            (resting, self._resume),
            (short, self._reset),
        )
        possible = [(requests, act) for requests, act in kinds if requests]
        if not possible:
            return False
        requests, act = self._random.choice(possible)
        act(self._random.choice(requests))
        return True

    def resting(self) -> list[Request]:
        """Requests that are preempted."""
        self._resting = [request for request in self._resting if request.state is RequestState.PREEMPTED]
        return self._resting

    def resume_if_alone(self) -> None:
        """Let one go on where every request that is not over rests: nothing else would ever happen."""
        resting = self.resting()
        if resting and len(resting) == self._loop.pending:
            self._resume(resting[0])

    def _may_reset(self, request: Request) -> bool:
        return request.columns["stop_at"] < RESET_BELOW and request.number not in self._were_reset

    def _cancel(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self._service.submitted.remove(request)
        self._loop.cancel(request)
        self.figures.cancelled += 1

    def _preempt(self, request: Request) -> None:
        self._loop.preempt(request)
        self._resting.append(request)
        self.figures.preempted += 1

    def _resume(self, request: Request) -> None:
        self._loop.resume(request)
        self.figures.resumed += 1

    def _reset(self, request: Request) -> None:
        assert request.state_id is not None  # it is running
        self._service.reset(request.state_id)
        self._were_reset.add(request.number)
        self.figures.reset += 1
