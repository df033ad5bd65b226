"""Scores far from zero, biases at the ends of their range, masks written as large numbers."""

import math

import pytest
import torch

from tilewise import flash_attn_func
from tilewise.testing import run


def draw(*shape, seed, dtype=torch.float32, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen, dtype=torch.float64) * scale).to(dtype)


def qkv(scale=1.0, dtype=torch.float32, sq=70, sk=300):
    return {
        "q": draw(1, sq, 2, 16, seed=1, dtype=dtype, scale=scale),
        "k": draw(1, sk, 2, 16, seed=2, dtype=dtype, scale=scale),
        "v": draw(1, sk, 2, 16, seed=3, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 4.0, 10.0, 30.0, 60.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_of_hundreds_and_thousands(scale, dtype, causal, engine, assert_agrees):
    assert_agrees(qkv(scale, dtype) | {"causal": causal}, engine)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_three_equal_scores_far_from_zero_weigh_a_third_each(sign, dtype, engine):
    q = torch.full((1, 1, 1, 16), 400.0 * sign, dtype=dtype)
    k = torch.full((1, 3, 1, 16), 400.0, dtype=dtype)
    v = draw(1, 3, 1, 16, seed=1, dtype=dtype)
    got = run(q, k, v, **engine, softmax_scale=0.25)
    third = v.double().mean(1, keepdim=True)
    torch.testing.assert_close(got.out.double(), third, rtol=0, atol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(got.lse, torch.full((1, 1, 1), 640000.0 * sign + math.log(3)))
    dv = torch.autograd.grad(
        flash_attn_func(q, k, v.requires_grad_(), softmax_scale=0.25, **engine).sum(), v
    )[0]
    torch.testing.assert_close(dv.float(), torch.full(v.shape, 1 / 3), rtol=4e-3, atol=0)


@pytest.mark.parametrize("step", [16, 256])
def test_the_largest_score_comes_last(step, engine, assert_agrees):
    """Each key block raises the running maximum by hundreds."""
    inputs = qkv(1.0, sk=1030)
    inputs["q"][..., 0] = 40.0
    inputs["k"][..., 0] = (torch.arange(1030) // step)[None, :, None] * 0.5
    assert_agrees(inputs, engine)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("fill", ["finfo_min", "half_min", "-1e9", "-1e4", "-inf"])
def test_a_float_bias_as_mask(fill, dtype, engine, assert_agrees):
    values = {"finfo_min": torch.finfo(dtype).min, "half_min": torch.finfo(dtype).min / 2}
    value = values.get(fill) or float(fill)
    sees = torch.ones(70, 300, dtype=torch.bool).tril(200)
    sees[5, 1:] = False
    if value < torch.finfo(dtype).min and value != -torch.inf:
        value = torch.finfo(dtype).min
    bias = torch.zeros(1, 1, 70, 300, dtype=dtype).masked_fill(~sees, value)
    got = assert_agrees(qkv(dtype=dtype) | {"attn_bias": bias}, engine)
    if value < -1e5:
        want = run(**qkv(dtype=dtype), **engine, attn_bias=sees)
        band = 2 * torch.finfo(dtype).eps * float(want.out.abs().max())
        torch.testing.assert_close(got.out, want.out, rtol=0, atol=band)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", ["finfo_min", "-1e9"])
def test_rows_masked_by_large_numbers_throughout_average_their_keys(
    value, dtype, engine, assert_agrees
):
    """A finite bias hides nothing: with one number everywhere, a row is as without it."""
    value = torch.finfo(dtype).min if value == "finfo_min" else float(value)
    bias = torch.zeros(1, 1, 70, 300, dtype=dtype)
    bias[:, :, 10:20] = value
    got = assert_agrees(qkv(dtype=dtype) | {"attn_bias": bias}, engine)
    assert torch.isfinite(got.out).all()


@pytest.mark.parametrize("value", [1e4, 1e30, 3e38])
def test_a_large_positive_bias_takes_all_the_weight(value, engine):
    inputs = qkv()
    bias = torch.zeros(70, 300)
    bias[:, 7] = value
    got = run(**inputs, **engine, attn_bias=bias)
    torch.testing.assert_close(got.out, inputs["v"][:, 7:8].expand_as(got.out))
    assert all(torch.isfinite(g).all() for g in (got.dq, got.dk, got.dv, got.dbias))


@pytest.mark.parametrize("steep", [50.0, 1e4])
@pytest.mark.parametrize("length", [1, 7, 129, 130, 513])
def test_scores_that_grow_behind_the_mask_do_not_matter(length, steep, engine):
    inputs = qkv(sq=length, sk=length)
    j, i = torch.arange(length)[None], torch.arange(length)[:, None]
    rising = steep * (j - i).float()
    want = run(**inputs, **engine, causal=True, attn_bias=rising.masked_fill(j > i, 0.0))
    got = run(**inputs, **engine, causal=True, attn_bias=rising)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got.out[0, 0], inputs["v"][0, 0])


@pytest.mark.parametrize("slope", [1e-3, 1.0, 3.0])
def test_steep_alibi(slope, engine, assert_agrees):
    slopes = torch.tensor([slope, slope / 2])
    assert_agrees(qkv() | {"alibi_slopes": slopes, "causal": True}, engine)


@pytest.mark.parametrize("sink", [-1e4, -30.0, 30.0, 1e4])
def test_sinks_far_from_the_scores(sink, engine, assert_agrees):
    assert_agrees(qkv(4.0) | {"sink": torch.tensor([sink, sink / 2])}, engine)


@pytest.mark.parametrize("scale", [1e10, 1e18])
def test_values_as_large_as_the_dtype_allows(scale, engine, assert_agrees):
    inputs = qkv()
    inputs["v"] = inputs["v"] * scale
    assert_agrees(inputs, engine)
