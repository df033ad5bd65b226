"""Every test here is run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewise.backends.triton import interpreted

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiled = pytest.mark.skip(reason="a GPU is there: tests/device runs the kernels on it")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interpret)
            # numpy warns of log2(0), which is -inf, and of what masked lanes hold
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            if not interpreted():
                item.add_marker(compiled)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of boundaries reach the kernels as a device's do: not looked at before."""
    monkeypatch.setattr("tilewise.backends.triton.packed_sequences", lambda *_: [])
