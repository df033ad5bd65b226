import torch

from tilewise.bench import timing
from tilewise.bench.providers import PROVIDERS, Shape, make_inputs


def test_rivals_run_in_turn_in_rotating_order():
    order, ticks = [], []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    found = timing.interleaved(calls, seconds=0.0, tick=lambda: ticks.append(1))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # warm calls first
    assert list(found) == ["a", "b", "c"] and len(ticks) == timing.MIN_ROUNDS


def test_the_median_is_taken(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 29.0])  # 1, 2 and 9 seconds
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timing.interleaved({"a": lambda: None}, seconds=0.0) == {"a": 2.0}


def test_every_provider_computes_the_same_and_its_backward_can_be_repeated():
    shape = Shape(batch=2, seqlen=40, nheads=3, head_dim=16)
    outs, grads = [], []
    for provider in PROVIDERS.values():
        outs.append(provider.layout(timing.prepare(provider, shape, "fwd")()))
        backward = timing.prepare(provider, shape, "bwd")
        first, again = backward(), backward()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        grads.append([provider.layout(g) for g in first])
    for out, grad in zip(outs, grads, strict=True):
        assert out.shape == (2, 40, 3, 16)
        torch.testing.assert_close(out, outs[-1])
        torch.testing.assert_close(grad, grads[-1])


def test_each_provider_gets_its_own_contiguous_layout():
    q = make_inputs(Shape(batch=2, seqlen=8, nheads=3, head_dim=4))[0]
    for provider in PROVIDERS.values():
        x = provider.layout(q)
        assert x.is_contiguous()
        assert x.shape == ((2, 3, 8, 4) if provider.heads_first else (2, 8, 3, 4))
