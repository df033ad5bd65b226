"""How many programs of FlashAttention 1 run on a multiprocessor at once."""

from types import SimpleNamespace

import pytest

from tilewise.backends.triton import fa1, launch
from tilewise.core.config import TileConfig

CONFIG = TileConfig(64, 128, 4, 1)


@pytest.fixture
def q(monkeypatch):
    """A tensor on a GPU of 132 multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(fa1.torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(launch, "arch", lambda q: "sm_90")
    return SimpleNamespace(is_cuda=True, device=None)


@pytest.mark.parametrize(
    ("programs", "three"), [(132, False), (264, False), (265, True), (396, True), (397, False)]
)
def test_three_where_two_would_come_in_two_turns(programs, three, q):
    registers = fa1._in_one_turn(CONFIG, programs, q).maxnreg
    assert registers == (fa1.REGISTERS_OF_THREE if three else 0)


def test_not_where_a_program_has_eight_warps(q):
    wide = TileConfig(128, 128, 8, 1)
    assert fa1._in_one_turn(wide, 384, q) is wide
