"""The gradient of queries, the kernel that computes it alone."""

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
QUERIES = ("q",)


@pytest.mark.parametrize("mask", MASKS)
def test_lengths_beside_the_tile_edges(mask, loads):
    for sq in (1, TILE, TILE + 1, 67):
        for sk in (2, TILE - 1, TILE, TILE + 1, 2 * TILE + 1):
            check(qkv(sq, sk, h=1) | MASKS[mask], QUERIES)


def test_one_key():
    """dS is 0 but for rounding: in float32 the rule has no measure of it, plain's is exact."""
    check(qkv(67, 1, dtype=torch.float16), QUERIES)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=str)
def test_no_rows_or_no_keys_give_zeros(sizes):
    got = check(qkv(*sizes), QUERIES)
    assert (got["dq"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "widths", [(1, 1), (7, 3), (33, 40), (96, 80), (192, 128), (64, 256), (512, 512)], ids=str
)
def test_head_dims(widths, dtype, loads):
    d, dv = widths
    check(qkv(35, 40, h=1, d=d, dv=dv, dtype=dtype) | {"causal": True}, QUERIES)


@pytest.mark.parametrize("heads", [(6, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("extra", ["plain", "dropout", "alibi", "bias", "bool", "softcap"])
def test_the_query_heads_of_a_group_share_keys(extra, heads):
    h, hk = heads
    options = {
        "plain": {},
        "dropout": {"dropout_p": 0.3, "seed": 5},
        "alibi": {"alibi_slopes": torch.linspace(0, 1, h)},
        "bias": {"attn_bias": torch.linspace(-2, 2, h * 33).reshape(1, h, 33, 1)},
        "bool": {"attn_bias": torch.arange(h * 49).reshape(h, 1, 49) % 3 > 0},
        "softcap": {"softcap": 1.0},
    }[extra]
    check(qkv(h=h, hk=hk) | {"causal": True} | options, QUERIES)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-30])
def test_scales_of_any_sign_and_none(scale):
    got = check(qkv() | {"softmax_scale": scale}, QUERIES)
    if scale == 0:
        assert (got["dq"] == 0).all()


def test_a_cotangent_of_any_strides():
    inputs = qkv(35, 40, h=2, hk=2, batch=2)
    dout = torch.randn(2, 2, 35, 16).transpose(1, 2)
    want = gradients(inputs, QUERIES, dout.contiguous())
    for view in (dout, torch.stack([dout, dout * NAN], -1)[..., 0]):
        got = gradients(inputs, QUERIES, view)
        assert all(torch.equal(got[n], want[n]) for n in want)
    ones = torch.ones(()).expand(2, 35, 2, 16)  # what .sum() sends
    got, want = (gradients(inputs, QUERIES, x) for x in (ones, ones.contiguous()))
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
    want = gradients(inputs, QUERIES, dout)
    assert (want["dq"][rows] == 0).all() and torch.isfinite(want["dq"]).all()
    for name in "kv":
        inputs[name] = inputs[name].masked_fill(keys[:, None, None], garbage)
    inputs["q"] = inputs["q"].masked_fill(rows[:, None, None], garbage)
    got = gradients(inputs, QUERIES, dout.masked_fill(rows[:, None, None], garbage))
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_keys_that_a_mask_hides_from_every_row_are_not_read(kind, loads):
    inputs = qkv(40, 70)
    hidden = torch.zeros(70, dtype=torch.bool).index_fill(0, torch.tensor([0, 31, 32, 69]), True)
    inputs["attn_bias"] = ~hidden if kind == "bool" else torch.zeros(70).masked_fill(hidden, -INF)
    dout = torch.randn(1, 40, 2, 16)
    want = gradients(inputs, QUERIES, dout)["dq"]
    for name in "kv":
        inputs[name][:, hidden] = NAN
    assert torch.equal(gradients(inputs, QUERIES, dout)["dq"], want)


def test_rows_without_keys_get_zeros():
    mask = torch.ones(40, 70, dtype=torch.bool)
    mask[3] = False
    got = check(qkv(40, 70) | {"attn_bias": mask}, QUERIES)
    assert (got["dq"][:, 3] == 0).all()
    got = check(qkv(70, 40) | {"causal": True}, QUERIES)
    assert (got["dq"][:, :30] == 0).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
def test_bad_boundaries_lead_to_no_write_outside(bounds):
    with guarded_memory():
        inputs = with_bounds(bounds)
        leaves = [inputs[n].requires_grad_() for n in QUERIES]
        from tilewise import flash_attn_varlen_func

        out = flash_attn_varlen_func(**inputs, backend="triton")
        found = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.isfinite(x).all() for x in found)
