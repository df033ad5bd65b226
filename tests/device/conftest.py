"""Every test here needs a GPU: all get the marker, and are skipped by name without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# cuBLAS gives equal bits run to run only with this, and torch refuses it without under poisoning
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without = pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(without)


@pytest.fixture(autouse=True)
def _memory_given_back() -> object:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
