"""What tests share: hypothesis profile, one thread a worker, engines, the tolerance rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

from tilewise import testing

hypothesis.settings.register_profile("tilewise", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("tilewise")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

CPU_ENGINES = (("cpu", "fa2"), ("cpu", "fa1"))
ENGINES = (*CPU_ENGINES, ("reference", "standard"))


def _engine(pair: tuple[str, str]) -> dict[str, str]:
    return {"backend": pair[0], "algorithm": pair[1]}


@pytest.fixture(params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> dict[str, str]:
    """The arguments that name a backend and its algorithm, each in turn."""
    return _engine(request.param)


@pytest.fixture(params=CPU_ENGINES, ids="-".join)
def cpu_engine(request: pytest.FixtureRequest) -> dict[str, str]:
    """As ``engine``, of the CPU backend alone."""
    return _engine(request.param)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def assert_agrees() -> Callable[..., testing.Results]:
    """Runs a call on poisoned memory, and holds every result against the oracle and plain torch."""

    def check(
        inputs: dict[str, Any], engine: dict[str, str], *, backward: bool = True
    ) -> testing.Results:
        with testing.poisoned_memory():
            got = testing.run(**inputs, **engine, backward=backward)
        testing.assert_within(
            got, testing.oracle(**inputs), testing.plain(**inputs), inputs["q"].dtype
        )
        return got

    return check
