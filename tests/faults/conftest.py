"""The axes of the fault tests: backend with algorithm, and dtype."""

from pathlib import Path

import pytest
import torch

from tilewise.backends.triton import interpreted
from tilewise.testing import poisoned_memory

from .tools import BACKENDS, DTYPES

HERE = Path(__file__).parent
INTERPRETED = {"triton-fa2": {"backend": "triton", "algorithm": "fa2"}} if interpreted() else {}
# Triton's interpreter is slow and has neither float64 nor bfloat16 products: of the tests that take
# a dtype it runs those in float16, and of the others all that are not named here.
NOT_INTERPRETED = {}


def pytest_collection_modifyitems(config, items):
    dropped = []
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is None or HERE not in item.path.parents:
            continue
        backend = parameters.params.get("backend")
        if not isinstance(backend, dict) or backend["backend"] != "triton":
            continue
        item.add_marker(pytest.mark.interpret)
        name = getattr(item, "originalname", item.name)
        if parameters.params.get("dtype", torch.float16) != torch.float16:
            dropped.append(item)
        elif name in NOT_INTERPRETED:
            item.add_marker(pytest.mark.skip(reason=NOT_INTERPRETED[name]))
    config.hook.pytest_deselected(items=dropped)
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture(params=[*BACKENDS.values(), *INTERPRETED.values()], ids=[*BACKENDS, *INTERPRETED])
def backend(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN, so that an unwritten result shows."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The inputs are small, and beside other processes more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
