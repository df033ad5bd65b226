"""Devices, streams, CUDA graphs, and calls that never wait for the GPU."""

import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from tilewise import InvalidInputError, flash_attn_func, flash_attn_varlen_func

from .tools import draw, packed, qkv, results, same_bits

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="one GPU: needs a second that is not the current one"
)


def calls(device="cuda"):
    """Inputs of every kind of kernel, by name."""
    mask = draw(1, 1, 200, 333, seed=7, device=device) > -1
    return {
        "dense": qkv(device=device) | {"causal": True},
        "bias": qkv(device=device) | {"attn_bias": draw(2, 1, 200, 333, seed=5, device=device)},
        "bool_mask": qkv(device=device) | {"attn_bias": mask},
        "sink": qkv(device=device) | {"sink": draw(4, seed=8, device=device)},
        "varlen": packed([200, 1, 90], [333, 5, 120], device=device) | {"causal": True},
        "dropout": qkv(device=device)
        | {"dropout_p": 0.3, "seed": torch.tensor([42], device=device)},
        "negative_scale": qkv(device=device) | {"softmax_scale": -0.1, "softcap": 2.0},
    }


NAMES = tuple(calls("cpu"))


@contextmanager
def no_waiting():
    """Inside, whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_no_call_waits_for_the_gpu(name, triton_engine):
    inputs = calls()[name]
    want = results(inputs, **triton_engine)
    with no_waiting():
        got = results(inputs, **triton_engine)
    same_bits(got, want)


def test_a_seed_drawn_from_torch_does_not_wait_either(triton_engine):
    inputs = qkv() | {"dropout_p": 0.5}
    results(inputs, **triton_engine)
    with no_waiting():
        torch.cuda.manual_seed(3)
        first = results(inputs, **triton_engine)
        second = results(inputs, **triton_engine)
        torch.cuda.manual_seed(3)
        again = results(inputs, **triton_engine)
    same_bits(again, first)
    assert not torch.equal(first["out"], second["out"])


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_its_own(name, triton_engine):
    inputs = calls()[name]
    want = results(inputs, **triton_engine)
    torch.cuda.synchronize()
    floats = {n: x for n, x in inputs.items() if n in "qkv"}
    late = {n: torch.full_like(x, torch.nan) for n, x in floats.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on another stream would read the NaN
        for n, x in late.items():
            x.copy_(floats[n])
        got = results(inputs | late, **triton_engine)
    stream.synchronize()
    same_bits(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_forward_and_backward_replays_on_new_contents(name, triton_engine):
    inputs = calls()[name]
    new = {
        n: draw(*x.shape, seed=90 + i, dtype=x.dtype)
        for i, (n, x) in enumerate(inputs.items())
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    if name == "dropout":
        new["seed"] = torch.tensor([7], device="cuda")
    dout = draw(*inputs["q"].shape, seed=80)
    want = results(inputs | new, dout, **triton_engine)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(inputs, dout, **triton_engine)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(inputs, dout, **triton_engine)
    for n, x in new.items():
        inputs[n].copy_(x)
    for _ in range(2):
        for x in got.values():
            x.fill_(torch.nan)
        graph.replay()
        same_bits(got, want)


def test_packed_boundaries_may_change_under_a_captured_graph(triton_engine):
    inputs = packed([100, 100], [100, 100])
    inputs |= {"max_seqlen_q": 200, "max_seqlen_k": 200, "causal": True}
    other = torch.tensor([0, 30, 180], dtype=torch.int32, device="cuda")
    want = results(inputs | {"cu_seqlens_q": other, "cu_seqlens_k": other}, **triton_engine)
    results(inputs, **triton_engine)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(inputs, **triton_engine)
    inputs["cu_seqlens_q"].copy_(other)
    inputs["cu_seqlens_k"].copy_(other)
    graph.replay()
    same_bits(got, want)


def test_each_replay_draws_a_seed_of_its_own(triton_engine):
    inputs = qkv() | {"dropout_p": 0.5}
    results(inputs, **triton_engine)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(inputs, **triton_engine)
    graph.replay()
    first = {n: x.clone() for n, x in got.items()}
    graph.replay()
    assert not torch.equal(got["out"], first["out"])
    assert not torch.equal(got["dv"], first["dv"])


@pytest.mark.parametrize(
    "bounds",
    [[0, 10**6], [-5, 70], [0, -1], [50, 20], [2**31 - 1, -(2**31)], [70, 10**6]],
    ids=str,
)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_boundaries_that_lead_outside_are_clamped(bounds, side, triton_engine):
    """Values on a device are not checked: whatever they are, nothing outside is read or written.
    Rows that they leave to no sequence hold anything."""
    inputs = packed([20, 40], [20, 40], slack=10)
    bad = torch.tensor([*bounds, 60], dtype=torch.int32, device="cuda")
    for name in ("q", "k") if side == "both" else (side,):
        inputs[f"cu_seqlens_{name}"] = bad
    inputs |= {"max_seqlen_q": 64, "max_seqlen_k": 64}
    got = results(inputs, **triton_engine)
    torch.cuda.synchronize()
    for name, x in got.items():
        if name != "lse":
            side_of = inputs["cu_seqlens_q" if name in ("out", "dq") else "cu_seqlens_k"]
            ends = side_of.clamp(0, x.shape[0]).tolist()
            for start, stop in pairwise([*ends, x.shape[0]]):
                assert torch.isfinite(x[start:stop][:64]).all(), (name, start, stop)


@pytest.mark.parametrize("used", [[-3, 10**6], [2**31 - 1, -(2**31)]], ids=str)
def test_used_lengths_are_clamped_to_their_sequence(used, triton_engine):
    inputs = packed([20, 40], [30, 50])
    clamped = torch.tensor(used).clamp(min=0)
    lengths_q, lengths_k = torch.tensor([20, 40]), torch.tensor([30, 50])

    def with_used(q, k):
        return inputs | {"seqused_q": q.int().cuda(), "seqused_k": k.int().cuda()}

    got = results(with_used(torch.tensor(used), torch.tensor(used)), **triton_engine)
    want = results(
        with_used(torch.minimum(clamped, lengths_q), torch.minimum(clamped, lengths_k)),
        **triton_engine,
    )
    same_bits(got, want)


def test_validate_names_a_bad_boundary(triton_engine):
    inputs = packed([20, 40], [20, 40])
    inputs["cu_seqlens_q"] = torch.tensor([0, 30, 10**6], dtype=torch.int32, device="cuda")
    with pytest.raises(InvalidInputError, match="cu_seqlens_q"):
        flash_attn_varlen_func(**inputs, validate=True, **triton_engine)


@pytest.mark.parametrize("name", ["k", "v", "attn_bias", "sink", "alibi_slopes", "seed"])
def test_a_tensor_on_the_cpu_is_refused_by_name(name, triton_engine):
    inputs = qkv()
    extra = {
        "attn_bias": torch.zeros(1, 1, 200, 333),
        "sink": torch.zeros(4),
        "alibi_slopes": torch.zeros(4),
        "seed": torch.tensor([1]),
    }
    inputs[name] = inputs[name].cpu() if name in inputs else extra[name]
    with pytest.raises(InvalidInputError, match=name):
        flash_attn_func(**inputs, dropout_p=0.1, **triton_engine)


@two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_a_gpu_that_is_not_the_current_one(name, triton_engine):
    torch.cuda.set_device(0)
    want = results(calls("cuda:0")[name], **triton_engine)
    got = results(calls("cuda:1")[name], **triton_engine)
    assert all(x.device.index == 1 for x in got.values())
    same_bits({n: x.cpu() for n, x in got.items()}, {n: x.cpu() for n, x in want.items()})
    assert torch.cuda.current_device() == 0


@two_gpus
def test_a_backward_from_a_new_thread_on_another_gpu(triton_engine):
    inputs = qkv(device="cuda:1")
    want = results(inputs, **triton_engine)
    found = {}

    def run():
        found.update(results(inputs, **triton_engine))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    same_bits(found, want)


@two_gpus
@pytest.mark.parametrize("which", ["k", "v", "attn_bias", "cu_seqlens_k"])
def test_tensors_on_two_gpus_are_refused_by_name(which, triton_engine):
    inputs = packed([20], [20]) if which == "cu_seqlens_k" else qkv()
    inputs.setdefault("attn_bias", None)
    if which == "attn_bias":
        inputs["attn_bias"] = torch.zeros(1, 1, 200, 333, device="cuda:1")
    else:
        inputs[which] = inputs[which].to("cuda:1")
    function = flash_attn_varlen_func if which == "cu_seqlens_k" else flash_attn_func
    with pytest.raises(InvalidInputError, match=which):
        function(**inputs, **triton_engine)


def test_threads_at_once_give_each_its_own_results(triton_engine):
    inputs = [qkv(sq=100 + 50 * n) for n in range(4)]
    want = [results(x, **triton_engine) for x in inputs]
    got = [None] * len(inputs)

    def run(n):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                got[n] = results(inputs[n], **triton_engine)
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)
