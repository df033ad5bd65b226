"""Rows that see no key: C01."""

import math

import pytest
import torch

import tilewise

from .tools import (
    CROSS,
    INF,
    MERGE,
    NAN,
    SELF,
    all_empty,
    all_finite,
    all_zero,
    check,
    int32,
    near,
    rand,
    run,
    same,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def two_of_four():
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, 0] = True
    mask[1, :2] = True  # rows 2 and 3 see nothing
    return mask


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("entry", SELF + MERGE)
def test_c01_rows_whose_mask_is_all_false_are_zero_not_nan(entry, kind, backend, dtype):
    """C01 pytorch/pytorch#103963: NaN for rows that a boolean mask leaves without a key."""
    q, k, v = (rand(1, 4, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    mask = two_of_four()
    bias = mask if kind == "bool" else torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, -INF)
    dlse = torch.ones(1, 1, 4)
    got = run(entry, backend, q, k, v, attn_bias=bias, dlse=dlse)
    near(got["out"][0, 0], v[0, 0].double(), dtype)
    assert all_zero(got["out"][0, 2:])
    assert all_empty(got["lse"][0, 0, 2:])
    for name in ("dq", "dk", "dv"):
        assert all_zero(got[name][0, 2:]), name
    assert all_finite(*(x for name, x in got.items() if name != "lse"))
    if kind == "float":
        assert all_zero(got["dbias"][~mask])
    check(got, q, k, v, attn_bias=bias, dlse=dlse)


@pytest.mark.parametrize("sent", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("entry", SELF)
def test_c01_what_an_empty_row_is_sent_reaches_no_gradient(entry, sent, backend, dtype):
    """C01: a NaN that a later layer sends to an empty row is multiplied with nothing."""
    q, k, v = (rand(1, 4, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    dout = torch.ones(1, 4, 1, 8, dtype=dtype)
    clean = dout.clone()
    clean[0, 2:] = 0
    dout[0, 2:] = sent
    dlse = torch.zeros(1, 1, 4)
    dlse[..., 2:] = sent
    mask = two_of_four()
    got = run(entry, backend, q, k, v, attn_bias=mask, dout=dout, dlse=dlse)
    assert all_zero(got["dq"][0, 2:])
    check(got, q, k, v, attn_bias=mask, dout=clean)


@pytest.mark.parametrize("entry", ["dense", "varlen", "merge"])
def test_c01_empty_rows_in_every_tile(entry, backend, dtype):
    """C01: every third row of 600 is empty, others lack the first or the last tile of keys."""
    b, sq, sk, h = 1, 600, 530, 2
    q, k, v = (rand(b, s, h, 8, seed=n, dtype=dtype) for n, s in enumerate((sq, sk, sk)))
    mask = rand(sq, sk, seed=5) > 0
    mask[::3] = False
    mask[1::3, :256] = False
    mask[2::3, 256:] = False
    got = run(entry, backend, q, k, v, attn_bias=mask)
    assert all_zero(got["out"][:, ::3])
    assert all_empty(got["lse"][:, :, ::3])
    assert all_zero(got["dq"][:, ::3])
    check(got, q, k, v, attn_bias=mask)


@pytest.mark.parametrize("entry", SELF)
def test_c01_nothing_seen_at_all(entry, backend, dtype):
    """C01: every row is empty."""
    q, k, v = (rand(2, 5, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    mask = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    got = run(entry, backend, q, k, v, attn_bias=mask, dlse=torch.ones(2, 2, 5))
    assert all_empty(got["lse"])
    for name in ("out", "dq", "dk", "dv"):
        assert all_zero(got[name]), name


@pytest.mark.parametrize("entry", CROSS)
def test_c01_no_keys_at_all(entry, backend, dtype):
    """C01: seqlen_k = 0."""
    q = rand(2, 3, 2, 8, seed=1, dtype=dtype)
    k = torch.empty(2, 0, 2, 8, dtype=dtype)
    got = run(entry, backend, q, k, k.clone(), dlse=torch.ones(2, 2, 3))
    assert got["out"].shape == (2, 3, 2, 8) and all_zero(got["out"])
    assert got["lse"].shape == (2, 2, 3) and all_empty(got["lse"])
    assert all_zero(got["dq"])
    assert got["dk"].shape == got["dv"].shape == k.shape


@pytest.mark.parametrize("entry", SELF)
def test_c01_an_empty_row_with_a_sink_has_the_sink_as_its_lse(entry, backend, dtype):
    """C01: with a sink nothing is empty: lse = sink, its gradient is dlse, out is 0."""
    q, k, v = (rand(1, 4, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    sink = torch.tensor([0.5, -2.0], dtype=dtype)
    mask = two_of_four()
    dlse = rand(1, 2, 4, seed=4)
    got = run(entry, backend, q, k, v, attn_bias=mask, sink=sink, dlse=dlse)
    assert all_zero(got["out"][0, 2:])
    near(got["lse"][0, :, 2:], sink.double()[:, None].expand(2, 2), dtype)
    for name in ("dq", "dk", "dv"):
        assert all_zero(got[name][0, 2:]), name
    check(got, q, k, v, attn_bias=mask, sink=sink, dlse=dlse)


def test_c01_an_empty_row_under_a_sink_of_minus_infinity(backend, dtype):
    """C01: exp(-inf) adds nothing, so a sink of -inf is no sink."""
    q, k, v = (rand(1, 4, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    sink = torch.full((2,), -INF, dtype=dtype)
    mask = two_of_four()
    got = run("dense", backend, q, k, v, attn_bias=mask, sink=sink)
    assert all_empty(got["lse"][..., 2:])
    assert all_zero(got["out"][0, 2:])
    assert all_zero(got.pop("dsink"))
    check(got, q, k, v, attn_bias=mask)


def test_c01_merge_of_parts_without_keys(dtype):
    """C01: both parts empty gives exactly 0 and -inf; one empty part changes nothing."""
    out = rand(1, 3, 2, 4, seed=1, dtype=dtype)
    lse = rand(1, 2, 3, seed=2).float()
    none = (torch.zeros_like(out), torch.full_like(lse, -INF))
    leaves = [x.clone().requires_grad_() for x in (*none, *none)]
    merged, total = tilewise.merge_attention([tuple(leaves[:2]), tuple(leaves[2:])])
    assert all_zero(merged) and all_empty(total)
    found = torch.autograd.grad(
        (merged, total), leaves, [torch.ones_like(x) for x in (merged, total)]
    )
    assert all(all_zero(x) for x in found)
    for parts in ([(out, lse), none], [none, (out, lse)]):
        merged, total = tilewise.merge_attention(parts)
        same(merged, out)
        near(total, lse.double(), torch.float32, "lse")


@pytest.mark.parametrize("held", [0.0, NAN, INF], ids=["zero", "nan", "inf"])
def test_c01_merge_never_looks_into_an_empty_part(held, dtype):
    """C01: an empty part's out may hold anything, in the forward and in the backward."""
    full = rand(1, 3, 2, 4, seed=1, dtype=dtype)
    full_lse = rand(
        1, 2, 3, seed=2, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    leaves = [full, full_lse, torch.full_like(full, held), torch.full_like(full_lse, -INF)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    out, lse = tilewise.merge_attention([tuple(leaves[:2]), tuple(leaves[2:])])
    same(out, full)
    found = torch.autograd.grad((out, lse), leaves, [torch.ones_like(x) for x in (out, lse)])
    same(found[0], torch.ones_like(full))
    assert all_zero(found[2]) and all_zero(found[3])
    # d out / d lse of the only part is 0 and d lse / d lse is 1
    near(found[1], torch.ones(1, 2, 3), torch.float32, "dq")


def test_c01_merge_joins_two_keys(dtype):
    """C01: equal scores: out is the mean and lse is log 2."""
    v = rand(2, 1, 1, 4, seed=1, dtype=dtype)
    lse = torch.zeros(1, 1, 1)
    out, total = tilewise.merge_attention([(v[None, 0], lse), (v[None, 1], lse)])
    near(out[0], v.double().mean(0), dtype)
    near(total, torch.full((1, 1, 1), math.log(2), dtype=torch.float64), torch.float32, "lse")


def test_c01_packed_sequence_with_queries_and_a_mask_of_nothing(backend, dtype):
    """C01: the mask hides one whole sequence of a packed call."""
    q, k, v = (rand(5, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    cu = int32(0, 2, 5)
    mask = torch.ones(1, 5, 3, dtype=torch.bool)
    mask[:, :2] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.flash_attn_varlen_func(
        *leaves, cu, cu, 3, 3, attn_bias=mask, return_lse=True, **backend
    )
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all_zero(out[:2]) and all_empty(lse[:, :2]) and all_finite(out, *found)
    assert all(all_zero(x[:2]) for x in found)
    got = {"out": out[None, 2:].detach(), "lse": lse[None, :, 2:].detach()}
    got |= {name: x[None, 2:] for name, x in zip(("dq", "dk", "dv"), found, strict=True)}
    check(got, *(x.detach()[None, 2:] for x in leaves))
