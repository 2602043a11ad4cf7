"""Test that bounds of forked states hold where one mistake would show; random histories with forks are in test_bounds.py."""

from __future__ import annotations

import pytest
import torch

import zos
import zos.origins
from tests.test_bounds import check, drain, replay_own_graph, result, service, service_of, step


def fork(svc: zos.MetadataService, src: int, dst: int) -> None:
    svc.fork(src, dst)
    svc.flush()


def asked(svc: zos.MetadataService, state_id: int) -> list[int]:
    lower, upper = svc.bounds([state_id])
    return [int(lower[0]), int(upper[0])]


def test_one_that_is_staged_is_asked_for_alone() -> None:
    """What its source may have moved by counts, also where nobody asks for the source, which is a fork itself."""
    svc = service_of(3)
    step(svc, kept=4)
    svc.fork(3, 4)
    svc.fork(4, 5)
    assert asked(svc, 5) == [10, 16]
    svc.flush()
    assert asked(svc, 5) == [10, 16]
    drain(svc)
    assert asked(svc, 5) == [14, 14]
    assert not svc._bounds._origins, "kept for nothing"


def test_steps_that_nobody_will_tell_of() -> None:
    """They moved the source by nobody knows how much, and so the fork."""
    svc = service()
    svc.admit(3, 10)
    svc.set_batch([3], batch=1)
    step(svc, kept=4)
    svc.attach_mailbox()
    fork(svc, 3, 4)
    assert asked(svc, 4) == [10, 16]


def test_a_former_sequence_of_the_state_ended() -> None:
    """Its record, read after the fork, is none of the copy's, whose source was reset meanwhile."""
    svc = service_of(3, 4)
    metadata = svc.prepare()
    svc.commit(metadata, torch.tensor([2, 2], dtype=torch.int32), torch.tensor([False, True]))
    svc.reset(3)
    svc.release(4)
    fork(svc, 3, 4)
    check(svc)
    drain(svc)
    check(svc, exact=True)


def test_a_former_sequence_of_the_source_ended() -> None:
    """The same of the source's state."""
    svc = service_of(3)
    step(svc, kept=2, ends=True)
    svc.release(3)
    svc.admit(3, 5)
    step(svc, kept=1)
    svc.reset(3)
    fork(svc, 3, 4)
    check(svc)
    drain(svc)
    check(svc, exact=True)


def test_another_sequence_in_place_of_the_copy() -> None:
    """What the source did before the fork tells nothing of a sequence admitted after the copy was released."""
    svc = service_of(3)
    step(svc, kept=4)
    fork(svc, 3, 4)
    svc.release(4)
    svc.admit(4)
    svc.flush()
    drain(svc)
    check(svc, exact=True)


def test_the_copy_starts_over() -> None:
    """After a reset only its own steps count, beside the life before, which may have ended."""
    svc = service_of(3)
    step(svc, kept=4)
    fork(svc, 3, 4)
    svc.reset(4)
    svc.set_batch([4], batch=1)
    for _ in range(2):
        step(svc, kept=1)
    assert asked(svc, 4) == [0, 16]
    drain(svc)
    assert asked(svc, 4) == [2, 2]


def test_more_forks_than_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one's steps count on as a number."""
    monkeypatch.setattr(zos.origins, "ORIGINS_KEPT", 1)
    svc = service_of(3)
    step(svc, kept=5)
    fork(svc, 3, 4)
    svc.set_batch([4], batch=1)
    step(svc, kept=5)
    fork(svc, 4, 5)
    assert asked(svc, 5) == [10, 22]


def test_fewer_steps_than_were_counted() -> None:
    """A run on the device ends early: steps of the source after that come after the fork."""
    svc = service_of(3)
    svc.flush()
    replay_own_graph(svc, 0, 1, [result(4, False, 1)])
    svc.launched(3)
    fork(svc, 3, 4)
    svc.settle_launched(1)
    step(svc, kept=6)
    check(svc)
    drain(svc)
    check(svc, exact=True)
