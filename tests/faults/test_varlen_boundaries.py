"""Sequences without queries or keys, slack rows, and what cu_seqlens may be: C10, C11, C12."""

import pytest
import torch

import tilewise

from .tools import (
    all_empty,
    all_finite,
    all_zero,
    check,
    check_packed,
    gradients,
    int32,
    near,
    rand,
)

pytestmark = pytest.mark.usefixtures("poisoned")

FORMS = ("separate", "kvpacked")


def packed(form, backend, q, k, v, cu_q, cu_k, max_q, max_k, dout=None, dlse=None, **arguments):
    """Results of the packed functions in packed shapes."""
    arguments = {"return_lse": True, **arguments, **backend}

    def function(q, k, v):
        if form == "kvpacked":
            kv = torch.stack((k, v), 1)
            return tilewise.flash_attn_varlen_kvpacked_func(
                q, kv, cu_q, cu_k, max_q, max_k, **arguments
            )
        return tilewise.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **arguments)

    return gradients(function, {"q": q, "k": k, "v": v}, dout, dlse)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 33])
def test_c10_keys_without_queries(head_dim, causal, form, backend, dtype):
    """C10 Dao-AILab/flash-attention#2562: a loop of no trips left gradients unwritten."""
    cu_q, cu_k = int32(0, 0, 3, 5, 5), int32(0, 4, 7, 9, 13)
    q = rand(5, 4, head_dim, seed=1, dtype=dtype)
    k, v = (rand(13, 1, head_dim, seed=s, dtype=dtype) for s in (12, 13))
    got = packed(form, backend, q, k, v, cu_q, cu_k, 3, 4, causal=causal)
    for keys in (slice(0, 4), slice(9, 13)):
        assert all_zero(got["dk"][keys]) and all_zero(got["dv"][keys])
    check_packed(got, q, k, v, cu_q, cu_k, causal=causal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_c10_queries_without_keys(causal, form, backend, dtype):
    """C10: the reverse, exact zeros and -inf."""
    cu_q, cu_k = int32(0, 2, 5), int32(0, 0, 3)
    q = rand(5, 4, 8, seed=1, dtype=dtype)
    k, v = (rand(3, 1, 8, seed=s, dtype=dtype) for s in (2, 3))
    got = packed(form, backend, q, k, v, cu_q, cu_k, 3, 3, causal=causal)
    assert all_zero(got["out"][:2]) and all_empty(got["lse"][:, :2])
    assert all_zero(got["dq"][:2])
    check_packed(got, q, k, v, cu_q, cu_k, causal=causal)


@pytest.mark.parametrize("form", FORMS)
def test_c10_no_rows_or_no_keys_at_all(form, backend, dtype):
    """C10: empty tensors, sequences of no rows, and no sequence."""
    q, k, v = (rand(4, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    none = torch.empty(0, 2, 8, dtype=dtype)
    got = packed(form, backend, none, k, v, int32(0, 0), int32(0, 4), 0, 4)
    assert got["out"].shape == (0, 2, 8) and got["lse"].shape == (2, 0)
    assert all_zero(got["dk"]) and all_zero(got["dv"])
    got = packed(form, backend, q, none, none, int32(0, 4), int32(0, 0), 4, 0)
    assert all_zero(got["out"]) and all_empty(got["lse"]) and all_zero(got["dq"])
    got = packed(form, backend, none, none, none, int32(0, 0, 0), int32(0, 0, 0), 0, 0)
    assert got["out"].shape == (0, 2, 8) and got["dk"].shape == (0, 2, 8)
    got = packed(form, backend, q, k, v, int32(0), int32(0), 0, 0)  # a batch of 0: all is slack
    assert all_zero(got["out"]) and all_empty(got["lse"])
    assert all(all_zero(got[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("causal", [False, True])
def test_c10_empty_sequences_between_long_ones(causal, backend):
    """C10: sequences beyond a tile beside sequences of nothing."""
    cu_q, cu_k = int32(0, 0, 530, 530, 531, 831), int32(0, 7, 7, 307, 907, 1207)
    q = rand(831, 2, 8, seed=1)
    k, v = rand(1207, 1, 8, seed=2), rand(1207, 1, 8, seed=3)
    got = packed("separate", backend, q, k, v, cu_q, cu_k, 530, 600, causal=causal)
    assert all_zero(got["dk"][:7]) and all_zero(got["dk"][7:307])
    assert all_zero(got["out"][0:530]) and all_empty(got["lse"][:, :530])
    check_packed(got, q, k, v, cu_q, cu_k, causal=causal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_c11_rows_behind_the_last_sequence(causal, form, backend, dtype):
    """C11 Dao-AILab/flash-attention#2324: gradients of slack rows were what the allocator gave."""
    cu = int32(0, 1, 4)
    q = rand(6, 2, 4, seed=1, dtype=dtype)
    k, v = rand(7, 2, 4, seed=2, dtype=dtype), rand(7, 2, 4, seed=3, dtype=dtype)
    q[4:] = k[4:] = v[4:] = torch.nan
    got = packed(form, backend, q, k, v, cu, cu, 3, 3, causal=causal)
    assert all_zero(got["out"][4:]) and all_empty(got["lse"][:, 4:])
    for name in ("dq", "dk", "dv"):
        assert all_zero(got[name][4:]), name
    assert all_finite(got["out"], got["dq"], got["dk"], got["dv"])
    check_packed(got, q, k, v, cu, cu, causal=causal)


def test_c11_slack_rows_of_qkvpacked(backend, dtype):
    """C11: slack rows of one packed tensor."""
    qkv = rand(6, 3, 2, 4, seed=1, dtype=dtype)
    qkv[4:] = torch.nan
    leaf = qkv.clone().requires_grad_()
    cu = int32(0, 1, 4)
    out, lse = tilewise.flash_attn_varlen_qkvpacked_func(
        leaf, cu, 3, causal=True, return_lse=True, **backend
    )
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert all_zero(out[4:]) and all_empty(lse[:, 4:]) and all_zero(grad[4:])
    got = {"out": out.detach(), "lse": lse.detach()}
    got |= dict(zip(("dq", "dk", "dv"), grad.unbind(1), strict=True))
    check_packed(got, *qkv.unbind(1), cu, cu, causal=True)


def test_c11_slack_rows_of_a_bias(backend, dtype):
    """C11: the bias's gradient is 0 past every sequence, in rows and in columns."""
    cu = int32(0, 1, 4)
    q, k, v = (rand(6, 2, 4, seed=s, dtype=dtype) for s in (1, 2, 3))
    bias = rand(2, 6, 3, seed=4, dtype=dtype)
    inside = torch.zeros(6, 3, dtype=torch.bool)
    inside[0, :1] = inside[1:4] = True
    bias[:, ~inside] = torch.nan

    def function(q, k, v, attn_bias):
        return tilewise.flash_attn_varlen_func(
            q, k, v, cu, cu, 3, 3, attn_bias=attn_bias, return_lse=True, **backend
        )

    got = gradients(function, {"q": q, "k": k, "v": v, "attn_bias": bias})
    assert all_zero(got["dbias"][:, ~inside])
    for rows in (slice(0, 1), slice(1, 4)):
        n = rows.stop - rows.start
        one = {"out": got["out"][None, rows], "lse": got["lse"][None, :, rows]}
        one |= {name: got[name][None, rows] for name in ("dq", "dk", "dv")}
        one["dbias"] = got["dbias"][None, :, rows, :n]
        own = bias[None, :, rows, :n]
        check(one, q[None, rows], k[None, rows], v[None, rows], attn_bias=own)


def test_c11_slack_does_not_reach_the_sinks_gradient(backend, dtype):
    """C11: dsink adds over the rows of sequences alone."""
    cu = int32(0, 1, 4)
    q, k, v = (rand(6, 2, 4, seed=s, dtype=dtype) for s in (1, 2, 3))
    sink = rand(2, seed=4, dtype=dtype)

    def function(q, k, v, sink):
        return tilewise.flash_attn_varlen_func(
            q, k, v, cu, cu, 3, 3, sink=sink, return_lse=True, **backend
        )

    bad = [x.index_fill(0, torch.tensor([4, 5]), torch.nan) for x in (q, k, v)]
    got = gradients(function, dict(zip(("q", "k", "v"), bad, strict=True)) | {"sink": sink})
    short = gradients(function, {"q": q[:4], "k": k[:4], "v": v[:4], "sink": sink})
    # by hand: -sum_i exp(sink - lse_i) <out_i, 1>
    out, lse = got["out"][:4].double(), got["lse"][:, :4].double()
    want = -(torch.exp(sink.double()[:, None] - lse) * out.sum(-1).T).sum(1)
    near(got["dsink"], want, dtype, "dsink", short["dsink"].double() + 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("index", [torch.int64, torch.int16, torch.uint8, torch.int8], ids=str)
def test_c12_lengths_of_another_integer_type(index, backend, dtype):
    """C12 QwenLM/Qwen3-VL#567: lengths that were not int32 were refused deep inside."""
    q, k, v = (rand(5, 1, 4, seed=s, dtype=dtype) for s in (1, 2, 3))
    cu = torch.tensor([0, 2, 5], dtype=index)
    used = torch.tensor([2, 3], dtype=index)
    got = packed("separate", backend, q, k, v, cu, cu, 3, 3, seqused_q=used, seqused_k=used)
    check_packed(got, q, k, v, cu.long(), cu.long())
    mixed = packed("kvpacked", backend, q, k, v, cu, cu.to(torch.int32), 3, 3)
    check_packed(mixed, q, k, v, cu.long(), cu.long())


def test_c12_lengths_with_a_stride(backend, dtype):
    """C12: a column of a table, read as if it were dense."""
    q, k, v = (rand(5, 1, 4, seed=s, dtype=dtype) for s in (1, 2, 3))
    cu = torch.tensor([[0, 9], [2, 9], [5, 9]], dtype=torch.int32)[:, 0]
    used = torch.tensor([[2, 9], [3, 9]], dtype=torch.int32)[:, 0]
    got = packed("separate", backend, q, k, v, cu, cu, 3, 3, seqused_q=used, seqused_k=used)
    check_packed(got, q, k, v, cu, cu)


@pytest.mark.parametrize(
    "bad",
    [torch.tensor([0.0, 2.0, 5.0]), torch.tensor([[0, 2, 5]]), torch.tensor([0, 3, 2])],
    ids=["floating", "two-dimensional", "decreasing"],
)
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_c12_wrong_lengths_are_refused_by_name(which, bad, backend):
    """C12 Dao-AILab/flash-attention#742: the error says which argument and what is wanted."""
    q, k, v = (rand(5, 1, 4, seed=s) for s in (1, 2, 3))
    cu = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 2, 5), which: bad}
    with pytest.raises(tilewise.InvalidInputError, match=which):
        tilewise.flash_attn_varlen_func(q, k, v, max_seqlen_q=3, max_seqlen_k=3, **cu, **backend)
