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


@pytest.fixture
def fresh_choices():
    """What a test makes backends say is not remembered after it."""
    choose.cache_clear()
    yield
    choose.cache_clear()
