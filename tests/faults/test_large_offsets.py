"""Offsets past 2**31 in buffers of which a few pages are touched: C18."""

import resource

import pytest
import torch

import tilewise

from .tools import check, check_packed, gradients, int32, rand

pytestmark = pytest.mark.slow

STEP = 2**30  # elements between rows: the fourth lies at 3 * 2**30
CU = int32(0, 1, 4)


def far(x):
    """x with its first dimension 2**30 elements apart: 6 GiB of addresses, a few pages."""
    inner = x[0].numel()
    buffer = torch.empty((len(x) - 1) * STEP + inner, dtype=x.dtype)
    view = buffer.as_strided(x.shape, (STEP, *x[0].contiguous().stride()))
    view.copy_(x)
    return view


@pytest.fixture(autouse=True)
def cheap():
    """The buffers must stay addresses without memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 * 1024, f"{grown // 1024} MiB of resident memory"


def inputs():
    return [rand(4, 2, 8, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3, 4)]


def packed(backend, q, k, v, dout, **arguments):
    def function(q, k, v):
        return tilewise.flash_attn_varlen_func(
            q, k, v, CU, CU, 3, 3, causal=True, return_lse=True, **arguments, **backend
        )

    return gradients(function, {"q": q, "k": k, "v": v}, dout)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_c18_packed_rows_far_apart(which, backend):
    """C18 Dao-AILab/flash-attention#2611: row times stride wrapped in 32 bits."""
    names = ("q", "k", "v", "dout")
    tensors = dict(zip(names, inputs(), strict=True))
    got = packed(backend, **{**tensors, which: far(tensors[which])})
    check_packed(got, **tensors, cu_q=CU, cu_k=CU, causal=True)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_c18_batch_entries_far_apart(which, backend):
    """C18 Dao-AILab/flash-attention#772: a batch stride of 2**30."""
    shape = (4, 5, 2, 8)
    tensors = {
        name: rand(*shape, seed=s, dtype=torch.bfloat16)
        for s, name in enumerate(("q", "k", "v", "dout"))
    }
    views = {**tensors, which: far(tensors[which])}

    def function(q, k, v):
        return tilewise.flash_attn_func(q, k, v, return_lse=True, **backend)

    got = gradients(function, {n: views[n] for n in ("q", "k", "v")}, views["dout"])
    check(got, tensors["q"], tensors["k"], tensors["v"], dout=tensors["dout"])


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_c18_sequence_first_rows_far_apart(which, backend):
    """C18 pytorch/pytorch#190857: (seqlen, batch, heads, dim) with seqlen * batch * dim > 2**31."""
    tensors = {
        name: rand(2, 4, 1, 8, seed=s, dtype=torch.bfloat16)
        for s, name in enumerate(("q", "k", "v"))
    }
    view = far(tensors[which].transpose(0, 1)).transpose(0, 1)
    assert view.stride(1) == STEP

    def function(q, k, v):
        return tilewise.flash_attn_func(q, k, v, causal=True, return_lse=True, **backend)

    got = gradients(function, {**tensors, which: view})
    check(got, **tensors, seen=torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_c18_a_bias_with_rows_far_apart(kind, backend):
    """C18: the same for the bias, the gradient of lse and the packed qkv."""
    q, k, v = (rand(1, 4, 2, 8, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3))
    bias = rand(4, 4, seed=5, dtype=torch.bfloat16)
    if kind == "bool":
        bias = bias > -1
        buffer = torch.empty(3 * STEP + 4, dtype=torch.bool)
        view = buffer.as_strided((4, 4), (STEP, 1)).copy_(bias)
    else:
        view = far(bias)

    def function(q, k, v, attn_bias):
        return tilewise.flash_attn_func(q, k, v, attn_bias=attn_bias, return_lse=True, **backend)

    got = gradients(function, {"q": q, "k": k, "v": v, "attn_bias": view})
    check(got, q, k, v, attn_bias=bias)


def test_c18_one_packed_tensor_with_rows_far_apart(backend):
    """C18: qkv and its halves."""
    qkv = rand(4, 3, 2, 8, seed=1, dtype=torch.bfloat16)
    leaf = far(qkv).detach().requires_grad_()
    out, lse = tilewise.flash_attn_varlen_qkvpacked_func(
        leaf, CU, 3, causal=True, return_lse=True, **backend
    )
    dout = rand(4, 2, 8, seed=2, dtype=torch.bfloat16)
    # the gradient of a leaf takes its strides, 6 GiB of zeros: the parts' gradients are taken
    parts = [x.detach().requires_grad_() for x in far(qkv).unbind(1)]
    got = packed(backend, *parts, dout)
    check_packed(got, *qkv.unbind(1), CU, CU, dout, causal=True)
    assert torch.equal(out, got["out"]) and torch.equal(lse, got["lse"])
