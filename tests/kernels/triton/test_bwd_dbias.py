"""The gradient of a floating bias, summed over whatever the bias was broadcast over."""

import pytest
import torch

from tilewise import flash_attn_varlen_func

from .tools import (
    BAD_BOUNDS,
    INF,
    NAN,
    check,
    draw,
    gradients,
    guarded_memory,
    packed,
    qkv,
    with_bounds,
)

BIAS = ("attn_bias",)
B, H, SQ, SK = 2, 4, 37, 67
SHAPES = [
    (SK,), (SQ, 1), (SQ, SK), (1, SQ, SK), (H, 1, 1), (H, SQ, SK), (1, 1, 1, SK), (B, 1, 1, SK),
    (B, 1, SQ, 1), (1, H, SQ, SK), (B, H, 1, 1), (1, 1, 1, 1), (B, H, SQ, SK), (B, H, 1, SK),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_of_every_broadcast_shape(shape):
    # one number for all keys moves no weight: that gradient is lse's alone, and in float32 the
    # rule has no measure of the rest's rounding
    dtype = torch.float16 if shape[-1] == 1 else torch.float32
    inputs = qkv(SQ, SK, H, 2, batch=B, dtype=dtype)
    got = check(inputs | {"attn_bias": draw(*shape, seed=4, dtype=dtype)}, BIAS)
    assert got["dbias"].shape == shape


@pytest.mark.parametrize("sizes", [(1, 2), (1, 70), (70, 2), (32, 64), (33, 31)], ids=str)
def test_sizes_of_one_and_beside_the_tile_edges(sizes):
    check(qkv(*sizes) | {"attn_bias": draw(1, 2, *sizes, seed=4), "causal": True}, BIAS)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=str)
def test_no_rows_or_no_keys(sizes):
    for shape in ((1, 1, *sizes), (1, 1, 1, 1)):
        got = gradients(qkv(*sizes) | {"attn_bias": draw(*shape, seed=4)}, BIAS)["dbias"]
        assert got.shape == shape and (got == 0).all()


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes_of_inputs_and_bias_may_differ(dtype, bias_dtype):
    bias = draw(1, 1, SQ, SK, seed=4, dtype=bias_dtype)
    got = gradients(qkv(SQ, SK, dtype=dtype) | {"attn_bias": bias}, BIAS)["dbias"]
    assert got.dtype == bias_dtype
    if dtype == bias_dtype:
        check(qkv(SQ, SK, dtype=dtype) | {"attn_bias": bias}, BIAS)


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (20, 3)},
    "softcap": {"softcap": 1.0},
    "alibi": {"alibi_slopes": torch.linspace(0, 1, 4)},
    "sink": {"sink": torch.linspace(-1, 1, 4)},
    "dropout": {"dropout_p": 0.4, "seed": 9},
    "negative_scale": {"softmax_scale": -0.5},
    "width": {"softmax_scale": 0.1},
}


@pytest.mark.parametrize("shape", [(1, H, SQ, SK), (B, 1, 1, SK)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_beside_every_other_feature(option, shape):
    d, dv = (40, 24) if option == "width" else (16, 16)
    inputs = qkv(SQ, SK, H, 2, batch=B, d=d, dv=dv) | OPTIONS[option]
    check(inputs | {"attn_bias": draw(*shape, seed=4)}, BIAS)


def test_elements_outside_of_a_window_get_zeros():
    inputs = qkv(40, 40) | {"attn_bias": draw(1, 1, 40, 40, seed=4), "window_size": (3, 0)}
    got = gradients(inputs, BIAS)["dbias"][0, 0]
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    assert (got[(j > i) | (j < i - 3)] == 0).all() and (got[(j == i) & (i > 0)] != 0).all()


@pytest.mark.parametrize("heads", [1, 2])
def test_packed_sequences_have_rows_of_their_own(heads):
    inputs = packed([40, 0, 33, 1], [45, 3, 66, 2])
    bias = draw(heads, len(inputs["q"]), 66, seed=4)
    inputs["seqused_k"] = torch.tensor([40, 3, 60, 0], dtype=torch.int32)
    got = check(inputs | {"attn_bias": bias, "causal": True}, BIAS)["dbias"]
    assert (got[:, 74:] == 0).all()  # slack
    assert (got[:, :40, 40:] == 0).all()  # past the keys of the first


def test_hidden_elements_get_zeros_whatever_stands_in_memory():
    bias = draw(1, 2, 40, 70, seed=4)
    bias[..., [0, 33, 69]] = -INF
    bias[0, 0, 7] = -INF  # a row without keys
    inputs = qkv(40, 70) | {"attn_bias": bias}
    dout = torch.randn(1, 40, 2, 16)
    want = gradients(inputs, BIAS, dout)["dbias"]
    assert (want[bias == -INF] == 0).all() and torch.isfinite(want).all()
    for name in "kv":
        inputs[name][:, [0, 33, 69]] = NAN
    assert torch.equal(gradients(inputs, BIAS, dout)["dbias"], want)


def test_a_bias_of_any_strides():
    inputs, bias = qkv(SQ, SK, H, 2), draw(1, H, SQ, SK, seed=4)
    want = gradients(inputs | {"attn_bias": bias}, BIAS)["dbias"]
    wide = torch.full((1, H, SQ, SK + 6), NAN)
    wide[..., 5 : 5 + SK] = bias
    turned = bias.transpose(2, 3).contiguous().transpose(2, 3)
    for view in (wide[..., 5 : 5 + SK], turned):
        assert torch.equal(gradients(inputs | {"attn_bias": view}, BIAS)["dbias"], want)
    row = draw(1, 1, 1, SK, seed=5)
    full = gradients(inputs | {"attn_bias": row.expand(1, H, SQ, SK)}, BIAS)["dbias"]
    got = gradients(inputs | {"attn_bias": row}, BIAS)["dbias"]
    torch.testing.assert_close(got, full.sum_to_size(row.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
def test_bad_boundaries_lead_to_no_write_outside(bounds):
    inputs = with_bounds(bounds)
    total = len(inputs["q"])
    room = torch.full((3 * total, 64), 77.0)
    real = torch.zeros

    def zeros(*shape, **options):
        x = real(*shape, **options)
        return x if tuple(x.shape) != (1, total, 64) else room[None, total : 2 * total].zero_()

    with guarded_memory(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        bias = draw(1, total, 64, seed=4).requires_grad_()
        out = flash_attn_varlen_func(**inputs, attn_bias=bias, backend="triton")
        (got,) = torch.autograd.grad(out.sum(), bias)
    assert torch.isfinite(got).all()
    assert (room[:total] == 77).all() and (room[2 * total :] == 77).all()
