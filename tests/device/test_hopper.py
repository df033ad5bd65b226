"""The Gluon backend on a Hopper GPU: what the emulator is held to, and what it cannot show."""

from dataclasses import replace

import pytest
import torch
from kernels.gluon import test_bwd_two_pass_sm90 as emulated_backward
from kernels.gluon import test_fwd_sm90 as emulated

from tilewise import flash_attn_func, testing
from tilewise.testing import make_inputs

from .tools import HALF, draw, name_of, packed, qkv, results, same_bits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)

GLUON = {"backend": "gluon", "algorithm": "fa3"}
LENGTHS = ((200, 333), (33, 49))
REPEATS = 1000
BACKWARD_REPEATS = 50


@pytest.fixture
def forward():
    """The backend's forward, in place of the emulated one."""

    def call(**arguments):
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        with testing.poisoned_memory():
            return testing.run(**moved, **GLUON, backward=False)

    return call


@pytest.fixture
def assert_forward_agrees(forward):
    """Holds out and lse against the oracle and plain torch."""

    def check(inputs):
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        got = forward(**moved)
        testing.assert_within(
            got, testing.oracle(**moved), testing.plain(**moved), inputs["q"].dtype
        )
        return got

    return check


@pytest.fixture
def assert_gradients_agree(forward):
    """Holds all results against the oracle and plain torch, or gives them, on the CPU."""

    def check(inputs, against=None):
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        with testing.poisoned_memory():
            got = testing.run(**moved, **GLUON)
        if against is None:
            testing.assert_within(
                got, testing.oracle(**moved), testing.plain(**moved), inputs["q"].dtype
            )
        return got

    return check


for _prefix, _module in (("test_", emulated), ("test_two_pass_", emulated_backward)):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and _name != "test_only_what_is_wanted":
            globals()[_prefix + _name.removeprefix("test_")] = _test


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("case", emulated.SUPPORTED, ids=lambda c: c.id)
def test_every_feature_with_its_gradients(case, dtype, assert_agrees):
    """One pass, two passes or Triton's kernels read this forward's out and lse."""
    for sq, sk in LENGTHS:
        sized = replace(case, seqlen_q=sq, seqlen_k=sk, head_dim=64)
        assert_agrees(make_inputs(sized, dtype, "cuda"), GLUON)


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("case", emulated.SUPPORTED, ids=lambda c: c.id)
def test_every_feature_of_the_two_pass_backward(case, dtype, d, assert_agrees):
    """d 256, and d 128 with additions in one order."""
    d -= 8 * ("head_dim_v" in case.features)  # whose values are 8 wider
    for sq, sk in LENGTHS:
        sized = replace(case, seqlen_q=sq, seqlen_k=sk, head_dim=d)
        assert_agrees(make_inputs(sized, dtype, "cuda") | {"deterministic": True}, GLUON)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("dropout_p", [1e-6, 0.5, 0.7, 0.99, 0.9999])
def test_dropout_of_any_probability(dropout_p, dtype, d, assert_gradients_agree):
    """The threshold of a lane of 16 bits goes from 0, which drops nothing, to nearly 2^16."""
    inputs = qkv(2, 150, 200, 4, 2, d=d, dtype=dtype)
    assert_gradients_agree(inputs | {"dropout_p": dropout_p, "seed": 5, "causal": True})


CALLS = {
    "causal_varlen_gqa": lambda: (
        packed([1536, 700, 1, 900], [1536, 901, 77, 640], h=8, hk=2) | {"causal": True}
    ),
    "dropout": lambda: qkv(2, 1536, 1536, 8, 2) | {"dropout_p": 0.2, "seed": 99, "causal": True},
    "window": lambda: qkv(2, 1536, 1700, 8, 2, d=128) | {"window_size": (200, 100)},
    "wide": lambda: qkv(1, 700, 900, 8, 2, d=256),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_forward_has_equal_bits_each_time(call):
    inputs = CALLS[call]()
    first = testing.run(**inputs, **GLUON, backward=False)
    for _ in range(REPEATS):
        got = testing.run(**inputs, **GLUON, backward=False)
        assert torch.equal(got.out, first.out) and torch.equal(got.lse, first.lse)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("call", ["causal_varlen_gqa", "dropout", "window", "wide"])
def test_the_two_pass_backward_has_equal_bits_each_time(call, d):
    inputs = CALLS[call]() | {"deterministic": True}
    for name in "qkv":
        inputs[name] = draw(*inputs[name].shape[:-1], d, seed=ord(name))
    dout = torch.randn_like(inputs["q"])
    first = results(inputs, dout, **GLUON)
    assert all(torch.isfinite(x).all() for name, x in first.items() if name != "lse")
    for _ in range(BACKWARD_REPEATS):
        # other work in flight changes which program meets which
        torch.mm(torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda"))
        same_bits(results(inputs, dout, **GLUON), first)


def test_long_rows_in_the_two_pass_backward():
    """Rings that turn many times, and several groups of heads."""
    inputs = qkv(1, 4096, 4096, 8, 2, d=256) | {"causal": True}
    dout = draw(*inputs["q"].shape, seed=4)
    got = results(inputs, dout, **GLUON)
    want = results(inputs, dout, backend="triton")
    for name in ("dq", "dk", "dv"):
        top = float(want[name].abs().max())
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=2**-6 * top)


def test_a_graph_replays_it():
    inputs = qkv(2, 300, 300) | {"causal": True}
    testing.run(**inputs, **GLUON, backward=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = testing.run(**inputs, **GLUON, backward=False)
    inputs["q"].copy_(draw(*inputs["q"].shape, seed=7))
    for _ in range(3):
        graph.replay()
    want = testing.run(**inputs, **GLUON, backward=False)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_a_side_stream():
    inputs = qkv(2, 300, 300)
    want = testing.run(**inputs, **GLUON, backward=False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = testing.run(**inputs, **GLUON, backward=False)
    stream.synchronize()
    assert torch.equal(got.out, want.out)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="one GPU: needs a second that is not the current one"
)
def test_a_gpu_that_is_not_the_current_one():
    inputs = qkv(2, 300, 300)
    want = results(inputs, causal=True, **GLUON)
    moved = {name: x.to("cuda:1") for name, x in inputs.items()}
    same_bits(results(moved, causal=True, **GLUON), want)


def test_long_rows_and_many_tiles():
    """More tiles than programs, each of many blocks."""
    inputs = qkv(2, 4096, 4096, 8, 2, d=128) | {"causal": True}
    got = testing.run(**inputs, **GLUON, backward=False)
    want = testing.run(**inputs, backend="triton", backward=False)
    torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=1e-4)
    # both are rounded: neighbours in bfloat16 are equal
    torch.testing.assert_close(got.out, want.out, rtol=2**-7, atol=2**-7)


def test_launches_on_several_streams_at_once_share_no_counter():
    calls = [qkv(sq=1500 + 50 * n, sk=1500, d=64) | {"causal": True} for n in range(4)]
    want = [results(x, **GLUON) for x in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, x in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                got.append(results(x, **GLUON))
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a["out"], b["out"]) and torch.equal(a["lse"], b["lse"])


def test_two_replays_at_once_of_graphs_captured_on_one_stream():
    calls = [qkv(sq=1500 + 50 * n, sk=1500, d=64) | {"causal": True} for n in range(2)]
    want = [flash_attn_func(**x, **GLUON) for x in calls]
    torch.cuda.synchronize()
    graphs, got = [], []
    for x in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got.append(flash_attn_func(**x, **GLUON))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for x in got:
            x.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_graph_that_torch_compile_captures_holds_no_counter():
    x = qkv(sq=300, sk=300, d=64)
    compiled = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, **GLUON) * 2, mode="reduce-overhead"
    )
    want = 2 * flash_attn_func(**x, causal=True, **GLUON)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(compiled(*(x[n] for n in "qkv")), want)
