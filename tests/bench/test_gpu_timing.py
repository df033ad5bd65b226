import pytest
import torch

from tilewise.bench import timing
from tilewise.bench.providers import Shape
from tilewise.bench.rivals import providers_on


@pytest.fixture
def clock(monkeypatch):
    """A clock that only launches move."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_rivals_are_loaded_in_turn_for_more_than_a_second(clock):
    order, cost = [], {"fast": 0.001, "slow": 0.004}

    def measure(call, launches):
        name = call()
        order.append(name)
        clock[0] += launches * cost[name]
        return cost[name]

    calls = {name: lambda name=name: name for name in cost}
    found = timing.sustained(calls, 0.01, measure)
    assert found == pytest.approx(cost)
    assert clock[0] > timing.SUSTAINED_SECONDS
    turns = [name for i, name in enumerate(order[2:]) if i == 0 or name != order[1 + i]]
    assert turns == ["fast", "slow", "fast", "slow"]  # fast slow | slow fast | fast slow


def test_the_start_of_each_turn_does_not_count_and_slow_launches_make_short_chunks(clock):
    chunks, times = [], iter([0.06] + 3 * [0.9, 0.05, 0.05])

    def measure(call, launches):
        chunks.append(launches)
        seconds = next(times)
        clock[0] += 0.14
        return seconds

    assert timing.sustained({"a": lambda: None}, 0.01, measure) == {"a": 0.05}
    assert chunks == [1] * 10  # 0.06 s a launch leave room for one in 0.1 s


def test_no_rivals_take_no_time():
    assert timing.sustained({}, 1.0, lambda call, launches: 1.0) == {}


@pytest.mark.gpu
def test_both_protocols_run_on_a_gpu():
    x = torch.randn(4096, 4096, device="cuda")
    call = lambda: x @ x  # noqa: E731
    call()
    assert timing.event_seconds(call, 1) > 0 and timing.burst(call) > 0
    found = timing.sustained({"a": call, "b": call}, 0.1)
    assert set(found) == {"a", "b"} and min(found.values()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eager", "sdpa-flash", "sdpa-memeff", "sdpa-cudnn", "flex"])
def test_every_torch_provider_computes_the_same_and_repeats_its_backward(name):
    provider = providers_on("cuda")[name]
    for causal in (True, False):
        shape = Shape(2, 256, 3, 64, causal, "bfloat16", device="cuda")
        eager = providers_on("cuda")["eager"]
        expected = eager.layout(timing.prepare(eager, shape, "fwd")())
        out = provider.layout(timing.prepare(provider, shape, "fwd")())
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        backward = timing.prepare(provider, shape, "bwd")
        first, again = backward(), backward()
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        both = timing.prepare(provider, shape, "fwd_bwd")()
        for a, b in zip(first, both, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
