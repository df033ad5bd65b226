"""Shapes, dtypes and strides under compilation and with fake tensors: C25."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise

from .test_layout import every_second, heads_first, plain, wide
from .tools import int32, rand


def expanded_heads(x):
    return x[:, :, :1].expand(x.shape)


LAYOUTS = {f.__name__: f for f in (plain, heads_first, every_second, wide, expanded_heads)}


def meta(tensors):
    """What a compiled model relies on."""
    return [(x.shape, x.stride(), x.dtype, x.device.type) for x in tensors]


def dense(q, k, v):
    return tilewise.flash_attn_func(q, k, v, causal=True, return_lse=True)


def cross(q, k, v):
    return tilewise.flash_attn_func(q[:, :5], k[:, :, :1], v[:, :, :1], return_lse=True)


def packed(q, k, v):
    cu = int32(0, q.shape[0] // 2, q.shape[0])
    return tilewise.flash_attn_varlen_func(
        q, k, v, cu, cu, q.shape[0], q.shape[0], causal=True, return_lse=True
    )


def results(function, tensors):
    """out, lse and the gradients, with a gradient of each."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    found = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    return [out, lse, *found]


def fake(function, tensors):
    """The same in FakeTensorMode."""
    with FakeTensorMode() as mode:
        views = [mode.from_tensor(x) for x in tensors]
        assert [x.stride() for x in views] == [x.stride() for x in tensors]
        return results(function, views)


def tensors_of(layout, seqlen, head_dim, dtype=torch.float32):
    return [LAYOUTS[layout](rand(2, seqlen, 2, head_dim, seed=s, dtype=dtype)) for s in range(3)]


def check_compiled(function, tensors):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    real, other = results(function, tensors), results(compiled, tensors)
    assert meta(real) == meta(other)
    for a, b in zip(real, other, strict=True):
        assert torch.equal(a, b)


SIZES = [(1, 33), (17, 64), (128, 33), (196, 64), (257, 33)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c25_fake_tensors_promise_what_a_call_delivers(layout, size, dtype):
    """C25 Comfy-Org/ComfyUI#15044: the fake operator promised other strides than the real one."""
    tensors = tensors_of(layout, *size, dtype)
    assert meta(results(dense, tensors)) == meta(fake(dense, tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c25_fake_tensors_of_other_calls(layout, dtype):
    """C25: cross-attention with grouped heads, a packed call, and every operand with a gradient."""
    tensors = tensors_of(layout, 17, 8, dtype)
    assert meta(results(cross, tensors)) == meta(fake(cross, tensors))
    rows = [x[0] for x in tensors]
    real = results(packed, rows)
    with FakeTensorMode() as mode:
        views = [mode.from_tensor(x) for x in rows]
        assert meta(results(packed, views)) == meta(real)

    def operands(q, k, v, bias, sink):
        return tilewise.flash_attn_func(q, k, v, attn_bias=bias, sink=sink, return_lse=True)

    tensors += [rand(17, 1, 17, 2, seed=4, dtype=dtype).permute(1, 3, 0, 2), rand(2, seed=5)]
    assert meta(results(operands, tensors)) == meta(fake(operands, tensors))


def test_c25_fake_probabilities(dtype):
    """C25 ROCm/flash-attention#163: the third result's shape."""
    tensors = tensors_of("heads_first", 17, 8, dtype)

    def function(q, k, v):
        return tilewise.flash_attn_func(q, k, v, return_attn_probs=True)

    real = function(*tensors)
    with FakeTensorMode() as mode:
        assert meta(function(*(mode.from_tensor(x) for x in tensors))) == meta(real)


@pytest.mark.parametrize("size", [(1, 33), (17, 64), (196, 33)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c25_compiled_without_a_graph_break(layout, size):
    """C25: compiled and plain agree in values and metadata, backward included."""
    check_compiled(dense, tensors_of(layout, *size))


@pytest.mark.parametrize("layout", ["plain", "heads_first", "expanded_heads"])
def test_c25_other_calls_compiled(layout):
    tensors = tensors_of(layout, 17, 8, torch.bfloat16)
    check_compiled(cross, tensors)
    check_compiled(packed, [x[0] for x in tensors])


def test_c25_compiled_pieces_around_the_call():
    """C25: the strides reach what follows: a projection that views out as (B, S, H * D)."""

    def block(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 2, 8)).unbind(2)
        out, lse = tilewise.flash_attn_func(q, k, v, causal=True, return_lse=True)
        return out.view(*out.shape[:2], 16), lse.transpose(1, 2)

    check_compiled(block, [rand(2, 9, 16, seed=1).float(), rand(16, 48, seed=2).float()])


def test_c25_three_lengths_in_a_row():
    """C25: dynamic=True compiles at most twice, and every length is right."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph

    compiled = torch.compile(dense, fullgraph=True, dynamic=True, backend=backend)
    for seqlen in (17, 40, 33):
        tensors = tensors_of("plain", seqlen, 8)
        for a, b in zip(results(compiled, tensors), results(dense, tensors), strict=True):
            assert torch.equal(a, b)
    assert len(compilations) <= 2


def test_c25_inductor():
    """C25: torch.compile's own backend asserts strides at run time."""
    torch._dynamo.reset()
    compiled = torch.compile(dense, fullgraph=True)
    tensors = tensors_of("heads_first", 17, 33)
    real, other = results(dense, tensors), results(compiled, tensors)
    assert meta(real) == meta(other)
    for a, b in zip(real, other, strict=True):
        torch.testing.assert_close(a, b)
