"""FlashAttention 1: a program for each head, its results in device memory between key blocks."""

import pytest
import torch

from tilewise import flash_attn_varlen_func, testing

from .tools import (
    BAD_BOUNDS,
    FA1,
    FA2,
    INF,
    NAN,
    TILE,
    draw,
    guarded_memory,
    packed,
    qkv,
    with_bounds,
)

MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (20, 5)}}


@pytest.mark.parametrize("mask", MASKS)
def test_lengths_beside_the_tile_edges(mask, loads, assert_agrees):
    for sq in (1, TILE - 1, TILE + 1, 67):
        for sk in (2, TILE, 2 * TILE + 1):
            assert_agrees(qkv(sq, sk, h=1) | MASKS[mask], FA1)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_rows_or_no_keys(sizes, assert_agrees):
    assert_agrees(qkv(*sizes), FA1)
    assert_agrees(qkv(batch=0), FA1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("widths", [(1, 1), (7, 3), (40, 33), (192, 128), (512, 512)], ids=str)
def test_head_dims(widths, dtype, assert_agrees):
    d, dv = widths
    assert_agrees(qkv(35, 40, h=1, d=d, dv=dv, dtype=dtype) | {"causal": True}, FA1)


@pytest.mark.parametrize("heads", [(6, 3), (6, 1)], ids=str)
def test_grouped_heads_with_dropout_and_a_bias_of_one_row(heads, assert_agrees):
    h, hk = heads
    inputs = qkv(h=h, hk=hk) | {"attn_bias": draw(1, 1, 1, 49, seed=5), "causal": True}
    assert_agrees(inputs | {"dropout_p": 0.3, "seed": 4}, FA1)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_of_any_sign_and_none(scale, assert_agrees):
    assert_agrees(qkv() | {"softmax_scale": scale, "causal": True}, FA1)


def test_packed_sequences_have_whole_tiles_of_scratch(loads, assert_agrees):
    inputs = packed([40, 0, 1, 33, 32], [45, 3, 0, 70, 31], slack=7)
    inputs["seqused_k"] = torch.tensor([45, 3, 0, 66, 1], dtype=torch.int32)
    got = assert_agrees(inputs | {"causal": True}, FA1)
    assert (got.out[106:] == 0).all() and (got.dk[149:] == 0).all()


@pytest.mark.parametrize("garbage", [NAN, INF], ids=str)
def test_keys_that_no_row_sees_are_not_read(garbage):
    mask = torch.ones(70, dtype=torch.bool).index_fill(0, torch.tensor([0, 33, 69]), False)
    inputs = qkv(40, 70) | {"attn_bias": mask}
    want = testing.run(**inputs, **FA1)
    for name in "kv":
        inputs[name][:, ~mask] = garbage
    got = testing.run(**inputs, **FA1)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert torch.equal(a, b) and torch.isfinite(a).all(), name


def test_the_two_algorithms_agree():
    inputs = qkv(67, 70, h=4, hk=2) | {"causal": True, "softcap": 2.0}
    got, want = testing.run(**inputs, **FA1), testing.run(**inputs, **FA2)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
def test_bad_boundaries_lead_to_no_write_outside(bounds):
    with guarded_memory():
        inputs = with_bounds(bounds)
        leaves = [inputs[n].requires_grad_() for n in "qkv"]
        out = flash_attn_varlen_func(**inputs, **FA1)
        found = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.isfinite(x).all() for x in found)
