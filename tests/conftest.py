"""What tests share: hypothesis profile, one thread a worker, engines, the tolerance rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # read when triton is imported: without a GPU its kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tilewise import testing
from tilewise.backends.triton import interpreted
from tilewise.core.config import TileConfig
from tilewise.tuning import lookup

try:
    import hypothesis
except ImportError:  # tests/device does without it
    pass
else:
    hypothesis.settings.register_profile("tilewise", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("tilewise")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")


CPU_ENGINES = (("cpu", "fa2"), ("cpu", "fa1"))
ENGINES = (*CPU_ENGINES, ("reference", "standard"))
TRITON_ENGINES = (("triton", "fa2"), ("triton", "fa1"))


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


@pytest.fixture(params=TRITON_ENGINES, ids="-".join)
def triton_engine(request: pytest.FixtureRequest) -> dict[str, str]:
    """As ``engine``, of the Triton backend alone: on a GPU, or on a CPU by the interpreter."""
    return _engine(request.param)


@pytest.fixture
def interpreter() -> None:
    """For tests of the Triton backend on CPU tensors."""
    if not interpreted():
        pytest.skip("this machine has a GPU: tests/device runs the kernels there")


@pytest.fixture(params=["pointers", "tma"])
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How every kernel that can do both loads its rows, whatever the tuning tables say."""
    found = lookup.config

    def config(*arguments: Any) -> Any:
        return replace(found(*arguments), use_tma=request.param == "tma")

    monkeypatch.setattr(lookup, "config", config)
    monkeypatch.setattr(lookup, "epoch", object())
    return request.param


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that compile in a moment: for what does not depend on the tile."""
    monkeypatch.setattr(lookup, "config", lambda *_: TileConfig(32, 32, 4, 1))
    monkeypatch.setattr(lookup, "epoch", object())


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
