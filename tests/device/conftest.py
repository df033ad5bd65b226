"""Every test here needs a GPU: all get the marker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# cuBLAS gives equal bits run to run only with this, and torch refuses it without under poisoning
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _memory_given_back() -> object:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
