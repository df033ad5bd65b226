"""Offsets beyond 2^31 elements, and grids beyond 65535."""

import pytest
import torch

from tilewise import testing

from .tools import draw, fill, packed, qkv, results, same_bits, within

BEYOND = 2**31


def materialised(dtype, q, k, v, dout, bias=None, hidden=None):
    """out, lse and all gradients of one head each, scores held, in ``dtype``; (B, H, S, D)."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    s = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        bias = bias.to(dtype).requires_grad_()
        leaves.append(bias)
        s = s + bias
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    out = torch.softmax(s, -1) @ v
    found = torch.autograd.grad(out, leaves, dout.to(dtype))
    names = ("dq", "dk", "dv", "dbias")
    return {
        "out": out.detach(),
        "lse": s.detach().logsumexp(-1),
        **dict(zip(names, found, strict=False)),
    }


def sequence_first(x):
    return x.transpose(1, 2)


@pytest.mark.alone
def test_q_k_v_and_their_gradients_of_more_than_2_31_elements(triton_engine, loads):
    length, heads, width, window, tail = 300_000, 56, 128, 255, 300
    shape = (1, length, heads, width)
    q, k, v, dout = (
        fill(torch.empty(shape, dtype=torch.bfloat16, device="cuda"), seed) for seed in range(4)
    )
    assert q.numel() > BEYOND
    got = results({"q": q, "k": k, "v": v}, dout, window_size=(window, 0), **triton_engine)
    # The last rows, and the last keys, which they alone see.
    seen = tail + window
    i = torch.arange(tail, device="cuda")[:, None] + window
    j = torch.arange(seen, device="cuda")[None]
    hidden = (j > i) | (j < i - window)
    parts = [sequence_first(x) for x in (q[:, -tail:], k[:, -seen:], v[:, -seen:], dout[:, -tail:])]
    ref, plain = (materialised(t, *parts, hidden=hidden) for t in (torch.float64, torch.bfloat16))
    last = {"out": tail, "dq": tail, "dk": tail, "dv": tail}
    for name, rows in last.items():
        x = sequence_first(got[name])[:, :, -rows:]
        within(name, x, ref[name][:, :, -rows:], plain[name][:, :, -rows:])
    first = slice(0, 256)  # row 0 sees key 0 alone
    torch.testing.assert_close(got["out"][:, 0], v[:, 0], rtol=0, atol=0.02)
    assert all(torch.isfinite(got[n][:, first]).all() for n in ("out", "dq", "dk", "dv"))


@pytest.mark.alone
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("far", ["batch", "row", "head"])
def test_a_stride_of_2_30_elements(which, far, triton_engine):
    """C18: the tensors are small and what lies between them is large."""
    inputs = qkv(4, 4, 4, 4, 4, d=16)
    dout = draw(4, 4, 4, 16, seed=4)
    want = results(inputs, dout, causal=True, **triton_engine)
    strides = {"batch": 256, "row": 64, "head": 16} | {far: 2**30}
    buffer = torch.empty(3 * 2**30 + 4096, dtype=torch.bfloat16, device="cuda")
    view = buffer.as_strided((4, 4, 4, 16), (*strides.values(), 1))
    near = dout if which == "dout" else inputs[which]
    view.copy_(near)
    if which == "dout":
        dout = view
    else:
        inputs[which] = view
    same_bits(results(inputs, dout, causal=True, **triton_engine), want)


@pytest.mark.alone
def test_a_packed_sequence_that_starts_beyond_2_31_elements(triton_engine):
    rows = BEYOND // 128 + 100
    cu = torch.tensor([0, 10, rows - 90, rows - 5], dtype=torch.int32, device="cuda")
    q, k, v = (
        fill(torch.empty(rows, 1, 128, dtype=torch.bfloat16, device="cuda"), s) for s in range(3)
    )
    used = torch.tensor([10, 100, 85], dtype=torch.int32, device="cuda")
    longest = rows - 100
    inputs = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest,
        "max_seqlen_k": longest, "seqused_q": used, "seqused_k": used,
    }  # fmt: skip
    dout = torch.zeros_like(q)
    fill(dout[-90:], 3)
    got = results(inputs, dout, causal=True, **triton_engine)
    alone = {n: x[None, -90:-5] for n, x in {"q": q, "k": k, "v": v}.items()}
    want = results(alone, dout[None, -90:-5], causal=True, **triton_engine)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name][-90:-5], want[name][0], rtol=0.01, atol=0.01)
        assert (got[name][-5:] == 0).all() and (got[name][200:300] == 0).all(), name


def test_a_batch_of_more_than_65535(triton_engine, assert_agrees):
    assert_agrees(qkv(70_000, 5, 7, 2, 1, d=16) | {"causal": True}, triton_engine)


def test_more_than_65535_packed_sequences(triton_engine):
    lengths = [1, 3] * 33_000
    inputs = packed(lengths, lengths, h=2, hk=2, d=16)
    got = results(inputs, causal=True, **triton_engine)
    starts = inputs["cu_seqlens_q"][:-1].long()
    torch.testing.assert_close(got["out"][starts], inputs["v"][starts], rtol=0, atol=0.02)
    dense = {n: inputs[n][: len(lengths) * 2].unflatten(0, (-1, 4))[:, 1:] for n in "qkv"}
    want = results(dense, causal=True, **triton_engine)
    for name in ("out", "dq", "dk", "dv"):
        part = got[name][: len(lengths) * 2].unflatten(0, (-1, 4))[:, 1:]
        torch.testing.assert_close(part, want[name], rtol=0.01, atol=0.01)


@pytest.mark.alone
def test_an_attn_bias_of_more_than_2_31_elements_and_its_gradient(triton_engine):
    length, heads, width = 33_000, 2, 64
    q, k, v, dout = (draw(1, length, heads, width, seed=s) for s in range(4))
    bias = fill(torch.empty(1, heads, length, length, dtype=torch.bfloat16, device="cuda"), 9)
    assert bias.numel() > BEYOND
    got = results({"q": q, "k": k, "v": v, "attn_bias": bias}, dout, **triton_engine)
    sums = {t: {"dk": 0.0, "dv": 0.0} for t in (torch.float64, torch.bfloat16)}
    for start in range(0, length, 1000):
        rows = slice(start, start + 1000)
        parts = [sequence_first(x) for x in (q[:, rows], k, v, dout[:, rows])]
        found = {t: materialised(t, *parts, bias[:, :, rows]) for t in sums}
        for dtype, kept in sums.items():
            for name in kept:
                kept[name] = kept[name] + found[dtype][name].double()
        ref, plain = found.values()
        for name in ("out", "dq"):
            within(name, sequence_first(got[name])[:, :, rows], ref[name], plain[name])
        within("dbias", got["dattn_bias"][:, :, rows], ref["dbias"], plain["dbias"])
    ref, plain = sums.values()
    for name in ("dk", "dv"):
        within(name, sequence_first(got[name]), ref[name], plain[name])


@pytest.mark.alone
def test_a_bool_mask_of_more_than_2_31_elements(triton_engine):
    length = 47_000
    inputs = qkv(1, length, length, 1, 1)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril_()
    assert mask.numel() > BEYOND
    with torch.no_grad():
        got, want = (
            testing.run(**inputs, **triton_engine, backward=False, **option)
            for option in ({"attn_bias": mask}, {"causal": True})
        )
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=0.02)
    torch.testing.assert_close(got.lse, want.lse)
