"""Programs of many tiles whose warp groups are not equally fast."""

import pytest

from tilewise.backends.gluon import counters

from . import emulator
from .test_fwd_sm90 import packed, qkv

BOUNDS = [0, 130, 130, 131, 330, 400]
CALLS = {
    "full": lambda d: qkv(140, 290, h=2, hk=2, d=d),
    "causal": lambda d: qkv(200, 260, h=2, hk=1, d=d) | {"causal": True},
    "packed": lambda d: packed(BOUNDS, BOUNDS, h=2, hk=1, d=d) | {"causal": True},
}


@pytest.fixture(
    params=[{-1}, {0}, {1}, {0, 1, 2}], ids=["producer", "first", "second", "consumers"]
)
def slow(request, monkeypatch):
    """Who dawdles."""
    monkeypatch.setattr(emulator, "slow", frozenset(request.param))


@pytest.fixture
def alone(monkeypatch):
    """Has one program take all tiles, whatever another fixture says."""
    return lambda: monkeypatch.setattr(counters, "_multiprocessors", lambda index: 1)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("call", CALLS)
def test_the_forward(call, d, slow, alone, assert_forward_agrees):
    alone()
    assert_forward_agrees(CALLS[call](d))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("call", CALLS)
def test_the_one_pass_backward(call, d, slow, alone, assert_gradients_agree):
    alone()
    assert_gradients_agree(CALLS[call](d))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("call", CALLS)
def test_the_two_pass_backward(call, d, slow, assert_gradients_agree):
    assert_gradients_agree(CALLS[call](d) | {"deterministic": True})
