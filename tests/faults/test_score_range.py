"""Scores far from zero, and scores that grow behind the mask: C05, C28."""

import math

import pytest
import torch

import tilewise

from .tools import (
    F64,
    INF,
    all_finite,
    band_mask,
    by_hand,
    check,
    lse_dtype,
    near,
    plain_twin,
    rand,
    run,
    zeros,
)

pytestmark = pytest.mark.usefixtures("poisoned")

ENTRIES = ("dense", "kvpacked", "varlen", "varlen_kvpacked")
# float64 has no digits beyond 1e-10 left beside scores of 640000, and the case asks for no more
FAR = 1e-9


def far(got, want, dtype, name="out", plain=None):
    near(got, want, dtype, name, plain, tolerance=FAR)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["above", "below"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_c05_equal_scores_far_from_zero(entry, sign, backend, dtype):
    """C05 flashinfer-ai/flashinfer#4267: rows far below a finite stand-in for -inf became zero."""
    v = rand(1, 3, 1, 16, seed=1, dtype=dtype)
    q = torch.full((1, 1, 1, 16), 400.0 * sign, dtype=dtype)
    k = torch.full((1, 3, 1, 16), 400.0, dtype=dtype)
    got = run(entry, backend, q, k, v, softmax_scale=0.25)
    far(got["out"][0, 0], v[0].double().mean(0), dtype)
    far(got["lse"][0, 0, 0], 640000.0 * sign + math.log(3), dtype, "lse")
    far(got["dv"], torch.full((1, 3, 1, 16), 1 / 3, dtype=F64), dtype, "dv")
    assert all_finite(got["dq"], got["dk"])
    # dq cancels to 0: what is left may be the rounding of the terms, 0.25 * 400 * ds each
    value = v.double()[0, :, 0].sum(-1)
    ds = (value - value.mean()) / 3
    unit = max(torch.finfo(dtype).eps, torch.finfo(lse_dtype(dtype)).eps)
    assert got["dq"].abs().max() <= 4 * unit * 100 * ds.abs().sum() + 100 * unit * value.abs().max()
    far(
        got["dk"][0, :, 0],
        (100 * sign * ds)[:, None].expand(3, 16),
        dtype,
        "dk",
        _plain_dk(v, sign),
    )


def _plain_dk(v, sign):
    """dk when delta is taken from an out that was rounded to v's dtype."""
    value = v.sum(-1, dtype=torch.float32)[0, :, 0]
    rounded = v.float().mean(1).to(v.dtype).sum(dtype=torch.float32)
    return (100 * sign * (value - rounded) / 3)[:, None].expand(3, 16)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["above", "below"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_c05_one_score_3200_away_from_the_others(entry, sign, backend, dtype):
    """C05: the other keys' weights are exactly 0."""
    v = rand(1, 3, 1, 16, seed=1, dtype=dtype)
    q = torch.full((1, 1, 1, 16), 400.0 * sign, dtype=dtype)
    k = torch.full((1, 3, 1, 16), 400.0, dtype=dtype)
    k[0, 1] = 402.0
    got = run(entry, backend, q, k, v, softmax_scale=0.25)
    if sign > 0:
        weights, lse = [0.0, 1.0, 0.0], 643200.0
    else:
        weights, lse = [0.5, 0.0, 0.5], -640000.0 + math.log(2)
    weights = torch.tensor(weights, dtype=F64)
    far(got["out"][0, 0, 0], weights @ v.double()[0, :, 0], dtype)
    far(got["lse"][0, 0, 0], lse, dtype, "lse")
    far(got["dv"][0, :, 0], weights[:, None].expand(3, 16), dtype, "dv")
    assert (got["dv"][0, weights == 0] == 0).all()
    assert (got["dk"][0, weights == 0] == 0).all()
    assert all_finite(got["dq"], got["dk"])


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["above", "below"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entry", ["dense", "varlen"])
def test_c05_scores_far_from_zero_across_tiles(entry, causal, sign, backend, dtype):
    """C05, across tiles: 600 rows, every score +-640000, so every visible key weighs the same."""
    sq, sk = 600, 530
    v = rand(1, sk, 1, 16, seed=1, dtype=dtype)
    q = torch.full((1, sq, 1, 16), 400.0 * sign, dtype=dtype)
    k = torch.full((1, sk, 1, 16), 400.0, dtype=dtype)
    got = run(entry, backend, q, k, v, softmax_scale=0.25, causal=causal)
    visible = (torch.arange(sq) + sk - sq + 1).clamp(min=0) if causal else torch.full((sq,), sk)
    some = visible > 0
    seen = torch.arange(sk)[None, :] < visible[:, None]
    level = zeros(1, sq, 1, 16, dtype=dtype)
    plain = plain_twin(level, k, v, seen=seen)  # as equal scores do, zero scores weigh the same
    means = v.double()[0, :, 0].cumsum(0) / torch.arange(1, sk + 1)[:, None]
    far(got["out"][0, some, 0], means[visible[some] - 1], dtype, "out", plain["out"][0, some, 0])
    assert (got["out"][0, ~some] == 0).all()
    far(got["lse"][0, 0, some], 640000.0 * sign + visible[some].double().log(), dtype, "lse")
    shares = (seen / visible.clamp(min=1)[:, None].double()).sum(0)[:, None].expand(sk, 16)
    far(got["dv"][0, :, 0], shares, dtype, "dv", plain["dv"][0, :, 0])


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_c05_a_maximum_that_moves_with_every_tile(order, backend, dtype):
    """C05: each tile of keys stands 1000 above (or below) the one before; the highest takes all."""
    sk = 700
    steps = torch.arange(sk) // 100 * 1000.0
    bias = (steps if order == "rising" else steps.flip(0)).to(torch.float32)[None, None, None]
    q, k, v = (rand(1, s, 1, 8, seed=s, scale=0.01, dtype=dtype) for s in (3, sk, sk + 1))
    v = v[:, :sk]
    got = run("dense", backend, q, k, v, attn_bias=bias)
    best = slice(600, 700) if order == "rising" else slice(0, 100)
    hidden = torch.ones(sk, dtype=torch.bool)
    hidden[best] = False
    assert (got["dv"][0, hidden] == 0).all() and (got["dk"][0, hidden] == 0).all()
    check(got, q, k, v, attn_bias=bias, tolerance=FAR)
    want, lse = by_hand(q.double(), k[:, best].double(), v[:, best].double())
    plain = plain_twin(q, k, v, attn_bias=bias)
    far(got["out"], want, dtype, "out", plain["out"])
    far(got["lse"], lse + 6000, dtype, "lse", plain["lse"])


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["above", "below"])
def test_c05_merge_of_two_calls_far_from_zero(sign, backend):
    """C05: one key and two, joined. In float32 an lse of 640000 cannot tell them apart."""
    v = rand(1, 3, 1, 16, seed=1)
    q = torch.full((1, 1, 1, 16), 400.0 * sign, dtype=F64)
    k = torch.full((1, 3, 1, 16), 400.0, dtype=F64)
    got = run("merge", backend, q, k, v, softmax_scale=0.25)
    far(got["out"][0, 0], v[0].mean(0), F64)
    far(got["lse"][0, 0, 0], 640000.0 * sign + math.log(3), F64, "lse")
    far(got["dv"], torch.full((1, 3, 1, 16), 1 / 3, dtype=F64), F64, "dv")


def test_c05_merge_of_parts_far_from_zero(dtype):
    """C05: parts with lse of +-640000, and parts 3200 apart."""
    outs = [rand(1, 2, 1, 4, seed=s, dtype=dtype) for s in (1, 2, 3)]
    wide = lse_dtype(dtype)
    for level in (640000.0, -640000.0):
        lses = [torch.full((1, 1, 2), level, dtype=wide) for _ in outs]
        leaves = [x.clone().requires_grad_() for x in (*outs, *lses)]
        out, lse = tilewise.merge_attention(list(zip(leaves[:3], leaves[3:], strict=True)))
        far(out, torch.stack(outs).double().mean(0), dtype)
        far(lse, torch.full((1, 1, 2), level + math.log(3), dtype=F64), dtype, "lse")
        for grad in torch.autograd.grad(out.sum(), leaves)[:3]:
            far(grad, torch.full((1, 2, 1, 4), 1 / 3, dtype=F64), dtype, "dv")
        lses[1] = lses[1] + 3200
        out, lse = tilewise.merge_attention(list(zip(outs, lses, strict=True)))
        far(out, outs[1].double(), dtype)
        far(lse, torch.full((1, 1, 2), level + 3200, dtype=F64), dtype, "lse")


@pytest.mark.parametrize("lowest", ["finfo.min", "-1e30", "-inf"])
def test_c05_every_common_way_to_write_a_mask_as_a_bias(lowest, backend, dtype):
    """C05 pytorch/pytorch#121558: a bias of finfo.min hides a key; it is not an overflow."""
    value = {"finfo.min": torch.finfo(dtype).min, "-1e30": -1e30, "-inf": -INF}[lowest]
    if value == -1e30 and dtype == torch.float16:
        value = -60000.0
    q, k, v = (rand(2, 9, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    seen = torch.arange(9)[None, None, None] < 5
    bias = torch.zeros(1, 1, 1, 9, dtype=dtype).masked_fill(~seen, value)
    got = run("dense", backend, q, k, v, attn_bias=bias)
    assert (got.pop("dbias")[~seen] == 0).all()
    assert (got["dk"][:, 5:] == 0).all() and (got["dv"][:, 5:] == 0).all()
    check(got, q, k, v, seen=seen)


@pytest.mark.parametrize("seqlen", [1, 7, 129, 130])
@pytest.mark.parametrize("entry", ["dense", "qkvpacked", "varlen", "varlen_qkvpacked"])
def test_c28_scores_that_grow_behind_the_causal_mask(entry, seqlen, backend, dtype):
    """C28 pytorch/pytorch#153799: exp before masking overflows in a tile that is not full."""
    q, k, v = (rand(1, seqlen, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    dlse = _ones_like_lse(q)
    steep, tame, seen = _steep(seqlen, 0, dtype)
    got = run(entry, backend, q, k, v, attn_bias=steep, causal=True, dlse=dlse)
    near(got["out"][0, 0], v[0, 0].double(), dtype)
    assert (got["dbias"][~seen] == 0).all()
    check(got, q, k, v, attn_bias=tame, seen=seen, dlse=dlse)


@pytest.mark.parametrize("entry", ["dense", "varlen"])
def test_c28_scores_that_grow_behind_the_causal_mask_across_tiles(entry, backend, dtype):
    """C28, across tiles."""
    test_c28_scores_that_grow_behind_the_causal_mask(entry, 530, backend, dtype)


def _ones_like_lse(q):
    """Where one key takes all the weight, what dout alone sends cancels down to rounding."""
    return torch.ones(q.shape[0], q.shape[2], q.shape[1])


def _steep(seqlen, right, dtype):
    """50 * (j - i), hugely positive where causal hides; the same with 0 there; what is seen."""
    i = torch.arange(seqlen)
    steep = (50.0 * (i[None, :] - i[:, None])).to(dtype)
    seen = band_mask(seqlen, seqlen, -1, right)
    return steep, steep.masked_fill(~seen, 0.0), seen


@pytest.mark.parametrize("seqlen", [7, 130, 530])
@pytest.mark.parametrize("entry", ["dense", "varlen"])
def test_c28_scores_that_grow_behind_a_left_window(entry, seqlen, backend, dtype):
    """C28: the same behind the left side of a window."""
    q, k, v = (rand(1, seqlen, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    dlse = _ones_like_lse(q)
    steep = -_steep(seqlen, 0, dtype)[0]
    seen = band_mask(seqlen, seqlen, 2, 1)
    got = run(entry, backend, q, k, v, attn_bias=steep, window_size=(2, 1), dlse=dlse)
    check(got, q, k, v, attn_bias=steep.masked_fill(~seen, 0.0), seen=seen, dlse=dlse)


@pytest.mark.parametrize("kind", ["largest", "infinite"])
@pytest.mark.parametrize("seqlen", [7, 130])
def test_c28_the_largest_bias_behind_the_mask(seqlen, kind, backend, dtype):
    """C28: even finfo.max or inf behind the mask has no effect, forward or backward."""
    q, k, v = (rand(1, seqlen, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    dlse = _ones_like_lse(q)
    seen = band_mask(seqlen, seqlen, -1, 0)
    value = INF if kind == "infinite" else torch.finfo(dtype).max
    bias = rand(seqlen, seqlen, seed=4, dtype=dtype)
    hidden = bias.masked_fill(~seen, value)
    got = run("dense", backend, q, k, v, attn_bias=hidden, causal=True, dlse=dlse)
    assert (got["dbias"][~seen] == 0).all()
    check(got, q, k, v, attn_bias=bias, seen=seen, dlse=dlse)


@pytest.mark.parametrize("seqlen", [7, 130, 530])
@pytest.mark.parametrize("entry", ["dense", "varlen"])
def test_c28_negative_slopes_grow_behind_the_causal_mask(entry, seqlen, backend, dtype):
    """C28: ALiBi with a negative slope rewards distance, most of all where causal hides."""
    q, k, v = (rand(1, seqlen, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    dlse = _ones_like_lse(q)
    slopes = torch.tensor([-2.0])
    got = run(entry, backend, q, k, v, alibi_slopes=slopes, causal=True, dlse=dlse)
    i = torch.arange(seqlen, dtype=F64)
    bias = 2.0 * (i[None, :] - i[:, None]).abs()
    seen = band_mask(seqlen, seqlen, -1, 0)
    check(got, q, k, v, attn_bias=bias, seen=seen, dlse=dlse)
