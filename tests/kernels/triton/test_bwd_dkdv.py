"""Gradients of keys and values, the kernel that computes them alone."""

import pytest
import torch

from .tools import (
    BAD_BOUNDS,
    INF,
    NAN,
    TILE,
    check,
    gradients,
    guarded_memory,
    packed,
    qkv,
    with_bounds,
)

MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (20, 5)}}
KEYS = ("k", "v")


@pytest.mark.parametrize("mask", MASKS)
def test_lengths_beside_the_tile_edges(mask, loads):
    for sq in (1, TILE, TILE + 1, 67):
        for sk in (2, TILE - 1, TILE, TILE + 1, 2 * TILE + 1):
            check(qkv(sq, sk, h=1) | MASKS[mask], KEYS)


def test_one_key():
    """dS is 0 but for rounding: in float32 the rule has no measure of it, plain's is exact."""
    check(qkv(67, 1, dtype=torch.float16), KEYS)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=str)
def test_no_rows_give_zeros(sizes):
    got = check(qkv(*sizes), KEYS)
    assert (got["dk"] == 0).all() and (got["dv"] == 0).all()


@pytest.mark.parametrize("names", [("k",), ("v",)], ids=str)
def test_one_of_the_two_alone(names):
    inputs = qkv(40, 35) | {"causal": True}
    got, both = check(inputs, names), check(inputs, KEYS)
    for name, x in got.items():
        torch.testing.assert_close(x, both[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "widths", [(1, 1), (7, 3), (33, 40), (96, 80), (192, 128), (64, 256), (512, 512)], ids=str
)
def test_head_dims(widths, dtype, loads):
    d, dv = widths
    check(qkv(35, 40, h=1, d=d, dv=dv, dtype=dtype) | {"causal": True}, KEYS)


@pytest.mark.parametrize("heads", [(6, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("extra", ["plain", "dropout", "alibi", "bias", "bool", "softcap"])
def test_the_query_heads_of_a_group_are_summed(extra, heads):
    h, hk = heads
    options = {
        "plain": {},
        "dropout": {"dropout_p": 0.3, "seed": 5},
        "alibi": {"alibi_slopes": torch.linspace(0, 1, h)},
        "bias": {"attn_bias": torch.linspace(-2, 2, h * 33).reshape(1, h, 33, 1)},
        "bool": {"attn_bias": torch.arange(h * 49).reshape(h, 1, 49) % 3 > 0},
        "softcap": {"softcap": 1.0},
    }[extra]
    check(qkv(h=h, hk=hk) | {"causal": True} | options, KEYS)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-30])
def test_scales_of_any_sign_and_none(scale):
    got = check(qkv() | {"softmax_scale": scale}, KEYS)
    if scale == 0:
        assert (got["dk"] == 0).all()


def test_a_cotangent_of_any_strides():
    inputs = qkv(35, 40, h=2, hk=2, batch=2)
    dout = torch.randn(2, 2, 35, 16).transpose(1, 2)
    want = gradients(inputs, KEYS, dout.contiguous())
    for view in (dout, torch.stack([dout, dout * NAN], -1)[..., 0]):
        got = gradients(inputs, KEYS, view)
        assert all(torch.equal(got[n], want[n]) for n in want)
    ones = torch.ones(()).expand(2, 35, 2, 16)  # what .sum() sends
    got, want = (gradients(inputs, KEYS, x) for x in (ones, ones.contiguous()))
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("garbage", [NAN, INF], ids=str)
def test_unused_rows_and_keys_are_not_read_and_get_zeros(garbage, loads):
    inputs = packed([40, 1, 33], [45, 0, 70], slack=40)
    inputs["seqused_q"] = torch.tensor([35, 1, 20], dtype=torch.int32)
    inputs["seqused_k"] = torch.tensor([33, 0, 66], dtype=torch.int32)
    inputs["causal"] = True
    rows = torch.ones(len(inputs["q"]), dtype=torch.bool)
    rows[:35] = rows[40] = rows[41:61] = False
    keys = torch.ones(len(inputs["k"]), dtype=torch.bool)
    keys[:33] = keys[45 : 45 + 66] = False
    dout = torch.randn(inputs["q"].shape)
    want = gradients(inputs, KEYS, dout)
    assert all((x[keys] == 0).all() and torch.isfinite(x).all() for x in want.values())
    for name in "kv":
        inputs[name] = inputs[name].masked_fill(keys[:, None, None], garbage)
    inputs["q"] = inputs["q"].masked_fill(rows[:, None, None], garbage)
    got = gradients(inputs, KEYS, dout.masked_fill(rows[:, None, None], garbage))
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_left_of_every_window_get_zeros(which, loads):
    inputs = qkv(10, 70) | {"window_size": (5, 0)}
    dout = torch.randn(1, 10, 2, 16)
    want = gradients(inputs, KEYS, dout)
    inputs[which][:, :55] = NAN  # row 0 stands on key 60 and sees from key 55 on
    got = gradients(inputs, KEYS, dout)
    assert all(torch.equal(got[n], want[n]) and (got[n][:, :55] == 0).all() for n in want)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_keys_that_a_mask_hides_from_every_row_get_zeros(kind, loads):
    inputs = qkv(40, 70)
    hidden = torch.zeros(70, dtype=torch.bool).index_fill(0, torch.tensor([0, 31, 32, 69]), True)
    inputs["attn_bias"] = ~hidden if kind == "bool" else torch.zeros(70).masked_fill(hidden, -INF)
    want = check(inputs, KEYS)
    for name in "kv":
        inputs[name][:, hidden] = NAN
    got = gradients(inputs, KEYS, torch.ones(1, 40, 2, 16))
    assert all((x[:, hidden] == 0).all() for x in (*got.values(), *want.values()))
    assert all(torch.isfinite(x).all() for x in got.values())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
def test_bad_boundaries_lead_to_no_write_outside(bounds):
    with guarded_memory():
        inputs = with_bounds(bounds)
        leaves = [inputs[n].requires_grad_() for n in KEYS]
        from tilewise import flash_attn_varlen_func

        out = flash_attn_varlen_func(**inputs, backend="triton")
        found = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.isfinite(x).all() for x in found)
