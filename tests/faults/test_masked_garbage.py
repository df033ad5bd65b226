"""NaN, infinities and huge numbers where no row may look: C04."""

import pytest
import torch

import tilewise

from .tools import (
    CROSS,
    F64,
    INF,
    MERGE,
    NAN,
    all_empty,
    all_finite,
    all_zero,
    check,
    check_packed,
    gradients,
    int32,
    noted,
    rand,
    run,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def all_garbage(dtype):
    return NAN, INF, -INF, torch.finfo(dtype).max


@pytest.fixture(params=range(4), ids=["nan", "inf", "minus-inf", "huge"])
def garbage(request, dtype):
    """What stands in memory."""
    return all_garbage(dtype)[request.param]


def without(got, q, k, v, visible, dout=None, **formula):
    """Holds results against those of a call that has the visible keys alone."""
    assert all_zero(got["dk"][:, ~visible]) and all_zero(got["dv"][:, ~visible])
    shown = {"out": got["out"], "lse": got["lse"], "dq": got["dq"]}
    shown |= {"dk": got["dk"][:, visible], "dv": got["dv"][:, visible]}
    check(shown, q, k[:, visible], v[:, visible], dout=dout, **formula)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("entry", CROSS + MERGE)
def test_c04_a_key_that_a_mask_hides_from_every_row(entry, kind, backend, dtype):
    """C04 Dao-AILab/flash-attention#1745: weight 0 times NaN is NaN."""
    for garbage in all_garbage(dtype):
        with noted(garbage):
            q, k, v = (rand(2, s, 2, 8, seed=s, dtype=dtype) for s in (5, 6, 7))
            v = v[:, :6].clone()
            visible = torch.tensor([True, True, False, True, True, False])
            k[:, 2] = v[:, 5] = garbage
            bias = visible[None, None, None]
            if kind == "float":
                bias = torch.zeros(1, 1, 1, 6, dtype=dtype).masked_fill(~bias, -INF)
            for both in (False, True):
                if both:
                    k[:, ~visible] = v[:, ~visible] = garbage
                got = run(entry, backend, q, k, v, attn_bias=bias)
                if kind == "float":
                    assert all_finite(got.pop("dbias"))
                without(got, q, k, v, visible)


@pytest.mark.parametrize("entry", CROSS)
def test_c04_keys_that_a_window_hides_from_every_row(entry, backend, dtype):
    """C04: two rows, and keys further to the left than either sees."""
    for garbage in all_garbage(dtype):
        with noted(garbage):
            q, k, v = (rand(1, s, 2, 8, seed=n, dtype=dtype) for n, s in enumerate((2, 6, 6)))
            k[:, :3] = v[:, :3] = garbage
            got = run(entry, backend, q, k, v, window_size=(1, 0))
            visible = torch.arange(6) >= 3
            seen = torch.tensor([[True, True, False], [False, True, True]])
            without(got, q, k, v, visible, seen=seen)


@pytest.mark.parametrize("entry", ["dense", "varlen"])
@pytest.mark.parametrize("hidden", [slice(0, 300), slice(200, 530), slice(100, 400)], ids=str)
def test_c04_hidden_keys_in_every_tile(entry, hidden, backend):
    """C04, across tiles: garbage in whole tiles and in parts of tiles."""
    q, k, v = (rand(1, s, 1, 8, seed=n) for n, s in enumerate((600, 530, 530)))
    visible = torch.ones(530, dtype=torch.bool)
    visible[hidden] = False
    for held in all_garbage(F64):
        with noted(held):
            k[:, ~visible] = v[:, ~visible] = held
            got = run(entry, backend, q, k, v, attn_bias=visible[None, None, None])
            without(got, q, k, v, visible)


def test_c04_causal_keeps_the_future_out_of_the_past(garbage, backend, dtype):
    """C04: rows before a bad key are right, forward and backward, when it is hidden from them."""
    q, k, v = (rand(1, 40, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    k[:, 30:] = v[:, 30:] = garbage
    dout = torch.ones(1, 40, 1, 8, dtype=dtype)
    dout[:, 30:] = 0
    arguments = {"causal": True, **backend}
    out, lse = tilewise.flash_attn_func(q, k, v, return_lse=True, **arguments)
    seen = torch.ones(30, 30, dtype=torch.bool).tril()
    got = {"out": out[:, :30], "lse": lse[:, :, :30]}
    check(got, q[:, :30], k[:, :30], v[:, :30], seen=seen)


def packed(backend, q, k, v, cu_q, cu_k, longest, dout=None, **arguments):
    """Results of flash_attn_varlen_func in packed shapes."""

    def function(q, k, v):
        return tilewise.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, longest, longest, return_lse=True, **arguments, **backend
        )

    return gradients(function, {"q": q, "k": k, "v": v}, dout)


@pytest.mark.parametrize("causal", [False, True])
def test_c04_slack_rows_of_packed_input(causal, garbage, backend, dtype):
    """C04 Dao-AILab/flash-attention#2374: rows behind the last sequence hold anything."""
    cu = int32(0, 1, 4)
    q, k, v = (rand(n, 2, 8, seed=n, dtype=dtype) for n in (6, 7, 8))
    v = v[:7].clone()
    q[4:] = k[4:] = v[4:] = garbage
    dout = rand(6, 2, 8, seed=9, dtype=dtype)
    dout[4:] = garbage
    got = packed(backend, q, k, v, cu, cu, 3, dout, causal=causal)
    assert all_zero(got["out"][4:]) and all_empty(got["lse"][:, 4:])
    for name in ("dq", "dk", "dv"):
        assert all_zero(got[name][4:]), name
    check_packed(got, q, k, v, cu, cu, dout, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_c04_rows_behind_seqused(causal, garbage, backend, dtype):
    """C04 flashinfer-ai/flashinfer#941: padding between the used length and the next sequence."""
    cu = int32(0, 4, 8)
    q, k, v = (rand(8, 2, 8, seed=s, dtype=dtype) for s in (11, 12, 13))
    used_q, used_k = (2, 3), (3, 1)
    dout = rand(8, 2, 8, seed=4, dtype=dtype)
    for start, n in zip((0, 4), used_q, strict=True):
        q[start + n : start + 4] = garbage
        dout[start + n : start + 4] = garbage
    for start, n in zip((0, 4), used_k, strict=True):
        k[start + n : start + 4] = v[start + n : start + 4] = garbage
    got = packed(
        backend, q, k, v, cu, cu, 4, dout, causal=causal,
        seqused_q=int32(*used_q), seqused_k=int32(*used_k),
    )  # fmt: skip
    for start, nq, nk in zip((0, 4), used_q, used_k, strict=True):
        rest_q, rest_k = slice(start + nq, start + 4), slice(start + nk, start + 4)
        assert all_zero(got["out"][rest_q]) and all_empty(got["lse"][:, rest_q])
        assert all_zero(got["dq"][rest_q])
        assert all_zero(got["dk"][rest_k]) and all_zero(got["dv"][rest_k])
    check_packed(got, q, k, v, cu, cu, dout, causal, used_q, used_k)


def test_c04_a_neighbouring_sequence_is_not_touched_by_a_bad_one(garbage, backend, dtype):
    """C04: one packed sequence holds garbage, the others are right."""
    cu = int32(0, 3, 5, 9)
    q, k, v = (rand(9, 1, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    q[3:5] = k[3:5] = v[3:5] = garbage
    got = packed(backend, q, k, v, cu, cu, 4)
    for rows in (slice(0, 3), slice(5, 9)):
        one = {name: x[None, rows] for name, x in got.items() if name != "lse"}
        one["lse"] = got["lse"][None, :, rows]
        check(one, q[None, rows], k[None, rows], v[None, rows])


def test_c04_a_neighbouring_batch_entry_or_head_is_not_touched(garbage, backend, dtype):
    """C04: one batch entry and one head hold garbage, the others are right."""
    q, k, v = (rand(3, 5, 3, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[1] = bad_v[1] = garbage
    bad_k[:, :, 2] = bad_v[:, :, 2] = garbage
    got = run("dense", backend, q, bad_k, bad_v)
    keep = [0, 2]
    good = {name: x[keep][:, :, :2] for name, x in got.items() if name != "lse"}
    good["lse"] = got["lse"][keep][:, :2]
    check(good, *(x[keep][:, :, :2] for x in (q, k, v)))


def test_c04_nan_in_a_key_that_is_seen_shows(backend):
    """C04: hiding what is hidden must not hide what is not: a row that sees NaN gives NaN."""
    q, k, v = (rand(1, 4, 1, 8, seed=s) for s in (1, 2, 3))
    k[0, 2] = NAN
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[0, 2] = mask[3, 2] = False
    out, lse = tilewise.flash_attn_func(q, k, v, attn_bias=mask, return_lse=True, **backend)
    assert out[0, 1:3].isnan().all() and lse[0, 0, 1:3].isnan().all()
    kept = [0, 1, 3]
    rows = [0, 3]
    check({"out": out[:, rows], "lse": lse[:, :, rows]}, q[:, rows], k[:, kept], v[:, kept])
    assert out.dtype == F64
