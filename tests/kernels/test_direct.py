"""Launches past Triton's Python: what reaches the C function, by a stand-in for it."""

from types import SimpleNamespace

import pytest
import torch

from tilewise.backends.triton import launch
from tilewise.backends.triton.launch import Launch, Of, Plan
from tilewise.kernels import direct

NAMES = ("q", "k", "out")


def compiled(received, descriptors=1):
    run = SimpleNamespace(
        launch=lambda *arguments: received.append(arguments),
        launch_cooperative_grid=False,
        launch_pdl=False,
    )
    metadata = SimpleNamespace(tensordesc_meta=[f"meta {n}" for n in range(descriptors)])
    return SimpleNamespace(
        run=run, metadata=metadata, function="function", packed_metadata="packed"
    )


@pytest.fixture
def encoded(monkeypatch):
    """The addresses that were encoded, in turn."""
    found = []

    def encode(template, meta, address):
        found.append(address)
        return f"map of {address} by {meta}"

    monkeypatch.setattr(direct, "_encoded", encode)
    return found


def test_what_the_c_function_receives(encoded):
    received = []
    template = SimpleNamespace(shape=[2, 3], strides=[3, 1])
    one = direct.Direct(
        compiled(received), 7, [None, 5, None, 0.5, None], [(0, 2), (4, 0)], [(2, 1, template)]
    )
    q, k, out = (torch.zeros(4) for _ in range(3))
    for _ in range(2):
        one(99, (q, k, out))
    before = (7, 1, 1, 99, "function", False, False, None, None, "packed", None, None, None)
    described = (f"map of {k.data_ptr()} by meta 0", 2, 3, 3, 1)
    assert received == [(*before, out.data_ptr(), 5, *described, 0.5, q.data_ptr())] * 2
    assert encoded == [k.data_ptr()]


def test_encoded_descriptors_are_bounded(encoded, monkeypatch):
    monkeypatch.setattr(direct, "MOST_MAPS", 2)
    template = SimpleNamespace(shape=[2], strides=[1])
    one = direct.Direct(compiled([]), 1, [None], [], [(0, 0, template)])
    tensors = [torch.zeros(4) for _ in range(3)]
    for x in (*tensors, *tensors):
        one(0, (x,))
    assert len(encoded) == 6
    one(0, (tensors[-1],))
    assert len(encoded) == 6


class Kernel:
    """Stands for a kernel of Triton's; remembers what it was launched with."""

    arg_names = ("out", "n", "q")

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        def run(*values, **options):
            self.launched.append((grid, values, options))
            return compiled(self.received, 0)

        return run


def test_a_plan_is_made_once_and_goes_past_triton_from_the_second_call_on(monkeypatch):
    kernel = Kernel()
    kernel.received, made = [], []
    monkeypatch.setattr(direct, "applies", lambda found: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 40 + i, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    entered = []

    class Device:
        def __init__(self, device):
            self.index = torch.device("cuda", device).index if isinstance(device, int) else 0

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)

    def make(call):
        made.append(set(call))
        return [Launch(kernel, 3, {"out": Of("out"), "n": 5, "q": Of("q")}, {"num_warps": 4})]

    plan = Plan(NAMES, torch.device("cuda", 0), make)
    q, _, out = tensors = tuple(torch.zeros(4) for _ in range(3))
    for _ in range(3):
        plan(tensors)
    assert made == [set(NAMES)]
    ((grid, values, options),) = kernel.launched
    assert grid == (3,) and options == {"num_warps": 4}
    assert values[0] is out and values[1] == 5 and values[2] is q
    assert [x[3] for x in kernel.received] == [40, 40]  # the stream
    assert [x[-3:] for x in kernel.received] == [(out.data_ptr(), 5, q.data_ptr())] * 2
    assert entered == [0, 0, 0]  # another device is the current one


def test_a_plan_keeps_to_triton_where_nothing_else_applies(monkeypatch):
    kernel = Kernel()
    kernel.received = []
    monkeypatch.setattr(direct, "applies", lambda found: False)
    plan = Plan(
        NAMES,
        torch.device("cpu"),
        lambda call: [Launch(kernel, 3, {"out": Of("out"), "n": 5, "q": Of("q")}, {})],
    )
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, call: kernel.received.append(call))
    tensors = tuple(torch.zeros(4) for _ in range(3))
    for _ in range(2):
        plan(tensors)
    assert kernel.received == [dict(zip(NAMES, tensors, strict=True))] * 2
