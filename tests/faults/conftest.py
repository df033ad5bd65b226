"""The axes of the fault tests: backend with algorithm, and dtype."""

import pytest
import torch

from tilewise.testing import poisoned_memory

from .tools import BACKENDS, DTYPES


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
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
