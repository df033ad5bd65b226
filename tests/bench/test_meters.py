import warnings
import weakref
from dataclasses import replace

import pytest
import torch

from tilewise.bench import memory, meters, timing
from tilewise.bench.cells import Cell
from tilewise.bench.meters import CpuMeter, Failure, GpuMeter, attempt
from tilewise.bench.providers import EAGER, PROVIDERS, Shape
from tilewise.bench.rivals import providers_on

TINY = Shape(1, 32, 2, 16)


def _broken(message="no such kernel", after=0):
    """Raises in its call number ``after`` and in every later one."""
    calls = []

    def bind(shape):
        eager = EAGER.bind(shape)

        def attend(q, k, v):
            calls.append(1)
            if len(calls) > after:
                raise RuntimeError(message)
            return eager(q, k, v)

        return attend

    return replace(EAGER, name="broken", bind=bind)


def test_an_exception_becomes_a_reason_with_the_warnings_before_it():
    def fail():
        warnings.warn("the head size is odd", UserWarning, stacklevel=1)
        raise ValueError("no\n kernel")

    assert attempt(fail, "cpu") == Failure("ValueError: no kernel | the head size is odd")


def test_a_warning_of_what_went_well_is_passed_on():
    with pytest.warns(UserWarning, match="only a word"):
        assert attempt(lambda: warnings.warn("only a word", stacklevel=1) or 3, "cpu") == 3


def test_an_interrupt_is_no_reason():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(stop, "cpu")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_on_a_cpu_one_that_fails_leaves_the_others_their_numbers(direction):
    rows = CpuMeter(0.001).measure(Cell("generations", direction, TINY), [_broken(), EAGER])
    bad, good = rows
    assert bad.error == "RuntimeError: no such kernel" and bad.ms is bad.tflops is None
    assert good.ms > 0 and good.error is None
    assert {(r.suite, r.direction, r.protocol) for r in rows} == {
        ("generations", direction, "interleaved")
    }


def test_torch_says_why_its_kernel_does_not_take_dropout():
    cell = Cell("generations", "fwd", replace(TINY, dropout_p=0.1))
    (row,) = CpuMeter(0.001).measure(cell, [PROVIDERS["sdpa-flash"]])
    assert "No available kernel" in row.error and row.features == {"dropout_p": 0.1}


def test_what_does_not_fit_says_how_much_it_needs(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    (row,) = CpuMeter(0.001).measure(Cell("generations", "bwd", TINY), [EAGER])
    assert row.error == "MemoryError: would need 0.0 GiB"


def test_the_peak_of_both_directions_is_measured_and_a_failure_said(monkeypatch):
    def peak_extra(name, shape):
        if name == "eager":
            return 3 << 20
        raise memory.MeasurementError("killed")

    monkeypatch.setattr(memory, "peak_extra", peak_extra)
    cell = Cell("generations", "fwd_bwd", TINY)
    good, bad = CpuMeter(0.001).measure(cell, [EAGER, PROVIDERS["tilewise"]])
    assert good.peak_mib == 3.0 and good.error is None
    assert bad.ms > 0 and bad.peak_mib is None
    assert bad.error == "peak memory: MeasurementError: killed"


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """The GPU's meter with a host's clock, and peaks that are given."""

    def device_peak(function):
        function()
        return 5 << 20

    def seconds(call, launches):
        call()
        return 0.5

    monkeypatch.setattr(meters, "_recover", lambda reason: None)
    monkeypatch.setattr(memory, "device_peak", device_peak)
    monkeypatch.setattr(timing, "event_seconds", seconds)
    monkeypatch.setattr(timing, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        timing, "sustained", lambda calls, seconds: {n: c() and 0.25 for n, c in calls.items()}
    )


@pytest.mark.parametrize("direction", ["bwd", "fwd_bwd"])
def test_a_gpu_has_a_row_for_each_protocol(no_gpu_needed, direction):
    cell = Cell(direction, direction, TINY)
    rows = GpuMeter().measure(cell, [EAGER, PROVIDERS["tilewise"], _broken()])
    found = {(r.provider, r.protocol): r for r in rows}
    assert len(found) == len(rows) == 6
    for protocol, ms in (("burst", 500.0), ("sustained", 250.0)):
        for name in ("eager", "tilewise"):
            row = found[name, protocol]
            assert (row.ms, row.peak_mib, row.error) == (ms, 5.0, None)
            assert row.tflops == pytest.approx(TINY.flops(direction) / ms / 1e9)
        assert found["broken", protocol].error == "RuntimeError: no such kernel"


def test_one_that_fails_while_it_is_timed_loses_that_protocol_alone(no_gpu_needed):
    late = _broken("gone", after=3)  # warm, peak, warm: then the burst
    rows = GpuMeter(("burst",)).measure(Cell("bwd", "fwd_bwd", TINY), [late, EAGER])
    found = {r.provider: r for r in rows}
    assert found["broken"].error == "RuntimeError: gone" and found["eager"].ms == 500.0


def test_a_device_that_answers_nothing_ends_the_run(monkeypatch):
    def lost():
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(meters.DeviceLostError, match="illegal memory access"):
        attempt(lost, "cuda")


@pytest.mark.parametrize(("device", "emptied"), [("cpu", 0), ("cuda", 1)])
def test_cached_blocks_are_given_back_after_what_was_a_cycle(monkeypatch, device, emptied):
    class Node:
        pass

    gone = []
    node = Node()
    node.itself, found = node, weakref.ref(node)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(found() is None))
    del node
    meters.release(device)
    assert found() is None and gone == [True] * emptied


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_what_was_allocated():
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    peak = memory.device_peak(lambda: torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
    assert peak == 32 << 20
    del held


@pytest.mark.gpu
def test_out_of_memory_is_a_reason_and_the_next_provider_is_measured():
    shape = Shape(1, 131072, 64, 64, True, "bfloat16", device="cuda")  # 2 TiB of scores
    (row,) = GpuMeter(("burst",)).measure(
        Cell("fwd", "fwd", shape), [providers_on("cuda")["eager"]]
    )
    assert row.error.startswith("OutOfMemoryError") and row.ms is None
    small = Shape(1, 128, 2, 64, True, "bfloat16", device="cuda")
    (row,) = GpuMeter(("burst",)).measure(
        Cell("fwd", "fwd", small), [providers_on("cuda")["eager"]]
    )
    assert row.ms > 0


@pytest.mark.gpu
def test_standard_attention_holds_its_matrices_and_a_fused_one_does_not():
    shape = Shape(1, 2048, 4, 64, False, "bfloat16", device="cuda")
    names = ("eager", "sdpa-flash")
    chosen = [providers_on("cuda")[name] for name in names]
    rows = GpuMeter(("sustained",), 0.05).measure(Cell("fwd", "fwd", shape), chosen)
    peaks = {r.provider: r.peak_mib for r in rows}
    matrix = shape.matrix_bytes / 2**20
    assert peaks["eager"] > 1.5 * matrix and peaks["sdpa-flash"] < 0.5 * matrix
    assert all(r.ms > 0 for r in rows)
