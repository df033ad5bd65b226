import pytest
import torch

from tilewise.dispatch import choose


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other cost a busy machine more than they give such sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def kernels_are_not_interpreted(monkeypatch):
    """Users' machines do not interpret kernels on a CPU, which takes minutes for ``check``."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.fixture
def fresh_choices():
    """What a test makes backends say is not remembered after it."""
    choose.cache_clear()
    yield
    choose.cache_clear()
