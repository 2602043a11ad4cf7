"""Fixtures of all tests: the device to run on, and a fresh random seed that is printed when a test fails."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from tests.mooncake import MooncakeCluster, require_mooncake

SEED_VARIABLE = "ZOS_TEST_SEED"
_SEED = int(os.environ.get(SEED_VARIABLE, random.SystemRandom().randrange(2**32)))


def pytest_report_header() -> str:
    """Say which seed this run uses."""
    return f"{SEED_VARIABLE}={_SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each path: Numba on the CPU, the kernels on a GPU."""
    return request.param


@pytest.fixture
def seed() -> Iterator[int]:
    """Seed of this run; set ZOS_TEST_SEED to repeat one."""
    print(f"{SEED_VARIABLE}={_SEED}")
    yield _SEED


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    """A Mooncake Store on loopback, shared by all tests that do not break it."""
    require_mooncake()
    cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.kill()
