"""One counter serves launch after launch: each leaves it as it found it."""

import pytest
import torch

from tilewise.backends.gluon import counters

from .test_fwd_sm90 import packed, qkv

CALLS = {
    "causal": qkv(300, 333) | {"causal": True},
    "one_tile": qkv(33, 49) | {"causal": True},
    "as_many_tiles_as_programs": qkv(150, 150, h=3) | {"window_size": (64, 64)},
    "packed": packed([0, 200, 200, 290], [0, 333, 338, 458]) | {"causal": True},
    "packed_with_empty_sequences": packed([0, 0, 0, 70, 70], [0, 9, 9, 90, 95]),
    "packed_with_nothing_but_slack": packed([0, 0, 0, 0], [0, 5, 5, 9], slack=20)
    | {"max_seqlen_q": 64},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_counter_is_back_at_zero_and_serves_again(name, forward, monkeypatch):
    want = forward(**CALLS[name])
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(counters, "counter_of", lambda device: counter)
    for _ in range(2):
        got = forward(**CALLS[name])
        assert counter.item() == 0
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.fixture
def gpu(monkeypatch):
    """Streams and captures as a test sets them; counters lie on the CPU."""
    state = {"stream": 0, "capturing": False, "device": 0}

    class Entered:
        def __init__(self, what):
            self.what = what

        def __enter__(self):
            self.before = dict(state)
            state.update(self.what)

        def __exit__(self, *_):
            state.update(self.before)

    c, cuda = torch._C, torch.cuda
    for name, value in (
        ("_cuda_getDevice", lambda: state["device"]),
        ("_cuda_isCurrentStreamCapturing", lambda: state["capturing"]),
        ("_cuda_getCurrentRawStream", lambda index: state["stream"]),
    ):
        monkeypatch.setattr(c, name, value, raising=False)
    monkeypatch.setattr(cuda, "device", lambda index: Entered({"device": index}))
    monkeypatch.setattr(cuda, "current_stream", lambda device: state["stream"])
    monkeypatch.setattr(cuda, "stream", lambda stream: Entered({"stream": stream}))
    monkeypatch.setattr(counters, "_zero", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(counters, "_counters", {})
    return state


def test_a_stream_has_one_counter_and_a_captured_launch_its_own(gpu):
    devices = [torch.device("cuda", n) for n in range(2)]
    first = counters.counter_of(devices[0])
    assert counters.counter_of(devices[0]) is first
    assert counters.counter_of(devices[1]) is not first
    assert gpu["device"] == 0
    gpu["stream"] = 7
    other = counters.counter_of(devices[0])
    assert other is not first and counters.counter_of(devices[0]) is other
    gpu["capturing"] = True
    captured = [counters.counter_of(devices[0]) for _ in range(2)]
    assert captured[0] is not captured[1] and not {id(x) for x in captured} & {id(other), id(first)}
    gpu.update(stream=0, capturing=False)
    assert counters.counter_of(devices[0]) is first
