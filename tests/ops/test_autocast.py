"""torch.autocast: q, k and v are cast as torch's own attention casts them."""

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func


def leaves(dtype=torch.float32):
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(2, 9, 2, 8, generator=gen, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_is_as_of_inputs_cast_first_and_gradients_are_float32(dtype, engine):
    qkv = leaves()
    with torch.autocast("cpu", dtype):
        out, lse = flash_attn_func(*qkv, causal=True, return_lse=True, **engine)
    cast = [x.detach().to(dtype).requires_grad_() for x in qkv]
    want, want_lse = flash_attn_func(*cast, causal=True, return_lse=True, **engine)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, qkv, dout)  # outside of the block
    for a, b in zip(got, torch.autograd.grad(want, cast, dout), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_backward_inside_of_the_block(engine):
    qkv = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(*qkv, **engine)
        inside = torch.autograd.grad(out.float().square().sum(), qkv, retain_graph=True)
    outside = torch.autograd.grad(out.float().square().sum(), qkv)
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)


def test_mixed_dtypes_become_one():
    q, k, v = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k.bfloat16(), v.half())
    assert out.dtype == torch.bfloat16


def test_float64_stays_as_torch_leaves_it():
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn_func(*leaves(torch.float64)).dtype == torch.float64


def test_disabled_block_changes_nothing():
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert flash_attn_func(*leaves()).dtype == torch.float32


def test_packed_calls_with_sink_and_bias():
    q, k, v = (x.detach()[0].requires_grad_() for x in leaves())
    cu = torch.tensor([0, 4, 9])
    sink = torch.randn(2, requires_grad=True)
    bias = torch.randn(2, 9, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, sink=sink, attn_bias=bias)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.sum(), (q, k, v, sink, bias))
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads)


def test_under_torch_compile():
    def attention(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attn_func(q, k, v)

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    qkv = leaves()
    out = compiled(*qkv)
    assert out.dtype == torch.bfloat16 and torch.equal(out, attention(*qkv))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.sum(), qkv))
