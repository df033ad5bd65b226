"""Which dtypes are taken, mixed dtypes, and autocast: C27."""

import itertools

import pytest
import torch

import tilewise

from .tools import CROSS, F64, SELF, call, check, lse_dtype, near, rand, run

NAMES = ("q", "k", "v")


@pytest.mark.parametrize("entry", SELF)
def test_c27_every_floating_dtype(entry, backend, dtype):
    """C27 unslothai/unsloth#827: float32 stopped with a bare message. out like q, lse float32."""
    q, k, v = (rand(2, 9, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    got = run(entry, backend, q, k, v)
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == lse_dtype(dtype)
    assert all(got[name].dtype == dtype for name in ("dq", "dk", "dv"))
    check(got, q, k, v)


@pytest.mark.parametrize("backward", [False, True])
def test_c27_lse_is_float32_with_and_without_a_backward(backward, backend, dtype):
    q, k, v = (rand(2, 9, 2, 8, seed=s, dtype=dtype).requires_grad_(backward) for s in (1, 2, 3))
    for entry in SELF:
        assert call(entry, q, k, v, **backend)[1].dtype == lse_dtype(dtype)


MIXED = list(itertools.permutations((torch.float16, torch.bfloat16, torch.float32, F64), 2))


@pytest.mark.parametrize("odd", NAMES)
@pytest.mark.parametrize("pair", MIXED, ids=lambda p: f"{p[0]}-{p[1]}".replace("torch.", ""))
def test_c27_mixed_dtypes_are_refused_naming_both(pair, odd, backend):
    """C27: never memory of one dtype read as another."""
    tensors = {name: rand(1, 4, 2, 8, seed=1, dtype=pair[0]) for name in NAMES}
    tensors[odd] = tensors[odd].to(pair[1])
    with pytest.raises(tilewise.InvalidInputError) as caught:
        tilewise.flash_attn_func(**tensors, **backend)
    for d in pair:
        assert str(d) in str(caught.value)
    kv_odd = {name: x[0] for name, x in tensors.items()}
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(tilewise.InvalidInputError):
        tilewise.flash_attn_varlen_func(
            **kv_odd, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4, **backend
        )


@pytest.mark.parametrize(
    "bad",
    [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
@pytest.mark.parametrize("entry", SELF)
def test_c27_other_dtypes_are_refused_by_name(entry, bad, backend):
    """C27: integers, bool, complex and float8."""
    q = torch.zeros(1, 4, 2, 8).to(bad)
    with pytest.raises(tilewise.InvalidInputError, match=str(bad)):
        call(entry, q, q, q, **backend)


@pytest.mark.parametrize("cast_to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("entry", SELF)
def test_c27_autocast_is_casting_first(entry, cast_to, backend):
    """C27 Dao-AILab/flash-attention#622: autocast ignored by a custom autograd function."""
    tensors = [rand(2, 9, 2, 8, seed=s, dtype=torch.float32) for s in (1, 2, 3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.autocast("cpu", cast_to):
        out, lse = call(entry, *leaves, **backend)
    assert out.dtype == cast_to and lse.dtype == torch.float32
    dout = rand(2, 9, 2, 8, seed=4, dtype=cast_to)
    found = torch.autograd.grad(out, leaves, dout)  # outside the block
    assert all(x.dtype == torch.float32 for x in found)
    first = run(entry, backend, *(x.to(cast_to) for x in tensors), dout=dout)
    assert torch.equal(out, first["out"]) and torch.equal(lse, first["lse"])
    for grad, name in zip(found, ("dq", "dk", "dv"), strict=True):
        assert torch.equal(grad, first[name].float())


def test_c27_autocast_mixes_what_it_can(backend):
    """C27: mixed inputs become one dtype; float64 stays and so is still refused beside others."""
    q, k, v = (rand(1, 5, 2, 8, seed=s) for s in (1, 2, 3))
    half = (q.float(), k.bfloat16(), v.half())
    with torch.autocast("cpu", torch.bfloat16):
        out = tilewise.flash_attn_func(*half, **backend)
        assert out.dtype == torch.bfloat16
        assert tilewise.flash_attn_func(q, k, v, **backend).dtype == F64
        with pytest.raises(tilewise.InvalidInputError, match="float64"):
            tilewise.flash_attn_func(q, k.float(), v, **backend)
    with torch.autocast("cpu", enabled=False):
        assert (
            tilewise.flash_attn_func(*(x.float() for x in half), **backend).dtype == torch.float32
        )


def test_c27_backward_inside_the_autocast_block(backend):
    leaves = [rand(2, 9, 2, 8, seed=s, dtype=torch.float32).requires_grad_() for s in (1, 2, 3)]
    with torch.autocast("cpu", torch.bfloat16):
        out = tilewise.flash_attn_func(*leaves, **backend)
        inside = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    outside = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("of", [torch.float32, F64, torch.bfloat16, torch.float16], ids=str)
def test_c27_operands_of_another_floating_dtype(of, backend, dtype):
    """C27: a bias, slopes or a sink of another dtype; gradients come in theirs."""
    q, k, v = (rand(1, 5, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    bias, sink = rand(1, 2, 5, 5, seed=4, dtype=of), rand(2, seed=5, dtype=of)
    got = run("dense", backend, q, k, v, attn_bias=bias, sink=sink)
    assert got["out"].dtype == dtype
    assert got["dbias"].dtype == got["dsink"].dtype == of
    right = check(
        {n: got[n] for n in ("out", "lse", "dq", "dk", "dv")}, q, k, v, attn_bias=bias, sink=sink
    )
    coarse = max((of, dtype), key=lambda d: torch.finfo(d).eps)
    for name in ("dbias", "dsink"):
        near(got[name], right[name], coarse, name, right[name].to(coarse))
    slopes = torch.tensor([0.5, 0.25], dtype=of)
    out = tilewise.flash_attn_func(q, k, v, alibi_slopes=slopes, **backend)
    i = torch.arange(5, dtype=F64)
    far = -slopes.double()[:, None, None] * (i[:, None] - i[None, :]).abs()
    check(
        {"out": out, "lse": call("dense", q, k, v, alibi_slopes=slopes, **backend)[1]},
        q,
        k,
        v,
        attn_bias=far,
    )


@pytest.mark.parametrize("entry", CROSS)
def test_c27_out_and_lse_are_contiguous(entry, backend, dtype):
    q, k, v = (rand(2, 9, 2, 8, seed=s, dtype=dtype).transpose(0, 1) for s in (1, 2, 3))
    out, _ = call(entry, q, k, v, **backend)
    assert out.is_contiguous()
