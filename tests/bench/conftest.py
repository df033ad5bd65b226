import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other cost a busy machine more than they give such sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
