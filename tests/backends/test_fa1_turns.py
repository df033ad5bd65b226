"""How many programs of FlashAttention 1 run on a multiprocessor at once."""

from types import SimpleNamespace

import pytest
import torch

from tilewise.arguments import Options, dense_call
from tilewise.backends.triton import fa1, launch
from tilewise.core.config import TileConfig
from tilewise.ops.schema import describe

CONFIG = TileConfig(64, 128, 4, 1)


@pytest.fixture
def registers(monkeypatch):
    """The cap for so many heads on a GPU of 132 multiprocessors; 0 is none."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(launch, "arch", lambda q: "sm_90")
    on_gpu = SimpleNamespace(is_cuda=True, device=None)

    def of(heads, d=64, dtype=torch.bfloat16, **options):
        q = torch.empty(1, 1, heads, d, dtype=dtype)
        problem = describe(*dense_call(q, q, q, Options(**options)), needs_grad=False)
        return fa1._in_one_turn(problem, CONFIG, on_gpu).maxnreg

    return of


@pytest.mark.parametrize(
    ("heads", "three"), [(132, False), (264, False), (265, True), (396, True), (397, False)]
)
def test_three_where_two_would_come_in_two_turns(heads, three, registers):
    assert registers(heads, dropout_p=0.1, seed=1) == (fa1.REGISTERS_OF_THREE if three else 0)


def test_not_where_it_was_not_measured_to_help(registers):
    assert registers(384) == 0
    assert registers(384, d=128, dropout_p=0.1, seed=1) == 0
    assert registers(384, dtype=torch.float32, dropout_p=0.1, seed=1) == 0
