"""Strides of inputs, biases and incoming gradients: C14, C15, C16, C17."""

import itertools

import pytest
import torch

import tilewise

from .tools import (
    F64,
    MERGE,
    NAN,
    SELF,
    band_mask,
    call,
    check,
    gradients,
    int32,
    lse_dtype,
    near,
    noted,
    rand,
    run,
    zeros,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def filled(x, *, dims, at):
    """x as a view into a larger buffer of NaN, which nothing may read."""
    buffer = torch.full(dims, NAN, dtype=x.dtype)
    view = buffer[at]
    view.copy_(x)
    return view


# Layouts of (B, S, H, D); all but the last two have a last stride of 1.


def plain(x):
    return x.clone()


def every_second(x):
    b, s, h, d = x.shape
    return filled(x, dims=(b, 2 * s, h, d), at=(slice(None), slice(None, None, 2)))


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wide(x):
    d = x.shape[-1]
    return filled(x, dims=(*x.shape[:-1], 3 * d), at=(..., slice(d, 2 * d)))


def sequence_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def last_slowest(x):
    return x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


def every_second_column(x):
    d = x.shape[-1]
    return filled(x, dims=(*x.shape[:-1], 2 * d), at=(..., slice(None, None, 2)))


def backwards_in_memory(x):
    """Columns outermost, then heads, rows, batch: every stride in reverse order."""
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


LAYOUTS = {f.__name__: f for f in (plain, every_second, heads_first, wide)}
ALL_LAYOUTS = LAYOUTS | {
    f.__name__: f for f in (sequence_first, last_slowest, every_second_column, backwards_in_memory)
}


@pytest.mark.parametrize("entry", SELF + MERGE)
def test_c14_gradient_that_arrives_with_other_strides(entry, backend, dtype):
    """C14 Dao-AILab/flash-attention#355: a gradient read with the strides of out."""
    for view in [n for n in ALL_LAYOUTS if n != "plain"]:
        with noted(view):
            q, k, v = (rand(2, 11, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
            dout = ALL_LAYOUTS[view](rand(2, 11, 2, 8, seed=4, dtype=dtype))
            dlse = rand(2, 11, 2, seed=5, dtype=lse_dtype(dtype)).transpose(1, 2)
            assert dout.stride() != (176, 16, 8, 1) and not dlse.is_contiguous()
            got = run(entry, backend, q, k, v, dout=dout, dlse=dlse)
            check(got, q, k, v, dout=dout, dlse=dlse)


@pytest.mark.parametrize("entry", SELF + MERGE)
def test_c14_the_gradient_that_sum_sends(entry, backend, dtype):
    """C14: .sum().backward() sends ones whose strides are all 0, for out and for lse."""
    q, k, v = (rand(2, 11, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = call(entry, *leaves, **backend)
    (out.sum() + lse.sum()).backward()
    got = {"out": out.detach(), "lse": lse.detach()}
    got |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)}
    check(got, q, k, v, dlse=torch.ones(2, 2, 11))


def test_c14_a_gradient_with_strides_in_every_tile(backend):
    """C14, across tiles."""
    q, k, v = (rand(1, s, 2, 8, seed=s) for s in (600, 530, 531))
    v = v[:, :530]
    for view in (last_slowest, every_second, heads_first):
        dout = view(rand(1, 600, 2, 8, seed=4))
        got = run("dense", backend, q, k, v, dout=dout, causal=True)
        check(got, q, k, v, dout=dout, seen=band_mask(600, 530, -1, 0))


def test_c15_inputs_in_different_layouts(backend):
    """C15 flagos-ai/FlagAttention#45: the keys' strides used for the values."""
    for names in itertools.product(LAYOUTS, repeat=3):
        with noted(names):
            q, k, v = (rand(2, 7, 2, 8, seed=s) for s in (1, 2, 3))
            views = [LAYOUTS[name](x) for name, x in zip(names, (q, k, v), strict=True)]
            got = run("dense", backend, *views, causal=True)
            check(got, q, k, v, seen=band_mask(7, 7, -1, 0))


def test_c15_inputs_in_different_layouts_in_every_dtype(backend, dtype):
    """C15: the combinations without a repeat, in every dtype, unequal lengths, grouped heads."""
    for names in itertools.permutations(LAYOUTS, 3):
        with noted(names):
            q = rand(2, 5, 4, 8, seed=1, dtype=dtype)
            k, v = rand(2, 9, 2, 8, seed=2, dtype=dtype), rand(2, 9, 2, 16, seed=3, dtype=dtype)
            views = [LAYOUTS[name](x) for name, x in zip(names, (q, k, v), strict=True)]
            got = run("dense", backend, *views)
            check(got, q, k, v)


def test_c15_packed_inputs_in_different_layouts(backend, dtype):
    """C15: the same for flash_attn_varlen_func, whose tensors have three dimensions."""
    q, k, v = (rand(1, 9, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    cu = int32(0, 9)

    def function(q, k, v):
        return tilewise.flash_attn_varlen_func(
            q, k, v, cu, cu, 9, 9, causal=True, return_lse=True, **backend
        )

    for names in itertools.permutations(LAYOUTS, 3):
        with noted(names):
            views = [LAYOUTS[name](x)[0] for name, x in zip(names, (q, k, v), strict=True)]
            got = gradients(function, dict(zip(("q", "k", "v"), views, strict=True)))
            got = {name: x[None] for name, x in got.items()}
            check(got, q, k, v, seen=band_mask(9, 9, -1, 0))


def test_c15_inputs_in_different_layouts_across_tiles(backend):
    """C15, across tiles."""
    q, k, v = (rand(2, s, 1, 8, seed=n) for n, s in enumerate((600, 530, 530)))
    got = run("dense", backend, every_second(q), heads_first(k), wide(v))
    check(got, q, k, v)


@pytest.mark.parametrize("form", ["heads outside", "rows doubled", "columns inside"])
def test_c15_one_packed_tensor_with_strides(form, backend, dtype):
    """C15: qkv and kv in a buffer of another order."""
    qkv = rand(2, 7, 3, 2, 8, seed=1, dtype=dtype)
    if form == "heads outside":
        view = qkv.permute(2, 3, 0, 1, 4).contiguous().permute(2, 3, 0, 1, 4)
    elif form == "rows doubled":
        view = filled(qkv, dims=(2, 14, 3, 2, 8), at=(slice(None), slice(None, None, 2)))
    else:
        view = qkv.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert not view.is_contiguous()
    cu = int32(0, 7)
    calls = {
        "qkvpacked": lambda x: tilewise.flash_attn_qkvpacked_func(x, return_lse=True, **backend),
        "kvpacked": lambda x: tilewise.flash_attn_kvpacked_func(
            x[:, :, 0], x[:, :, 1:], return_lse=True, **backend
        ),
        "varlen_qkvpacked": lambda x: tilewise.flash_attn_varlen_qkvpacked_func(
            x[0], cu, 7, return_lse=True, **backend
        ),
        "varlen_kvpacked": lambda x: tilewise.flash_attn_varlen_kvpacked_func(
            x[0, :, 0], x[0, :, 1:], cu, cu, 7, 7, return_lse=True, **backend
        ),
    }
    for name, function in calls.items():
        leaf = view.detach().requires_grad_()
        out, lse = function(leaf)
        (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        if name.startswith("varlen"):
            out, lse, grad = out[None], lse[None], grad[:1]
        got = {"out": out.detach(), "lse": lse.detach()}
        got |= dict(zip(("dq", "dk", "dv"), grad.unbind(2), strict=True))
        check(got, *qkv[: len(out)].unbind(2))


def test_c15_expanded_heads_and_batches(backend, dtype):
    """C15: strides of 0, as .expand() makes them."""
    q = rand(2, 7, 4, 8, seed=1, dtype=dtype)
    k, v = rand(1, 7, 1, 8, seed=2, dtype=dtype), rand(2, 7, 1, 8, seed=3, dtype=dtype)
    views = (q, k.expand(2, 7, 4, 8), v.expand(2, 7, 4, 8))
    got = run("dense", backend, *views)
    check(got, *views)
    same_query = q[:, :1].expand(2, 7, 4, 8)
    got = run("dense", backend, same_query, *views[1:])
    check(got, same_query, *views[1:])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("view", ["last_slowest", "every_second_column", "backwards_in_memory"])
def test_c16_last_dimension_not_contiguous(view, which, backend, dtype):
    """C16 pytorch/pytorch#187506: wrong numbers where the innermost stride is not 1."""
    ts = [rand(2, 6, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3)]
    views = list(ts)
    views[which] = ALL_LAYOUTS[view](ts[which])
    assert views[which].stride(-1) != 1
    got = run("dense", backend, *views, causal=True)
    check(got, *ts, seen=band_mask(6, 6, -1, 0))
    cu = int32(0, 6)

    def packed(q, k, v):
        return tilewise.flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, return_lse=True, **backend)

    got = gradients(packed, dict(zip(("q", "k", "v"), (x[1] for x in views), strict=True)))
    check({name: x[None] for name, x in got.items()}, *(x[1:] for x in ts))


def test_c16_the_case_as_written(backend):
    """C16: last stride 12 after a transpose, every second column, and a transposed bias."""
    base = [rand(1, 6, 2, 8, seed=s) for s in (1, 2, 3)]
    for which in range(3):
        ts = list(base)
        ts[which] = ts[which].transpose(1, 3).contiguous().transpose(1, 3)
        assert ts[which].stride(-1) == 12
        check(run("dense", backend, *ts), *base)
    skip = rand(1, 6, 2, 16, seed=4)[..., ::2]
    check(run("dense", backend, skip, *base[1:]), skip.contiguous(), *base[1:])
    bias = rand(6, 6, seed=5)
    check(run("dense", backend, *base, attn_bias=bias.t()), *base, attn_bias=bias.t().contiguous())


def test_c16_small_operands_with_strides(backend, dtype):
    """C16: slopes, sink and lengths taken out of wider tensors."""
    q, k, v = (rand(2, 6, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
    table = torch.tensor([[0.5, 9.0], [0.25, 9.0]])
    sink = torch.tensor([[0.3, 9.0], [-1.0, 9.0]], dtype=dtype)
    i = torch.arange(6, dtype=F64)
    far = (i[:, None] - i[None, :]).abs()
    got = run("dense", backend, q, k, v, alibi_slopes=table[:, 0], sink=sink[:, 0])
    bias = -table[:, 0].double()[:, None, None] * far
    check(got, q, k, v, attn_bias=bias, sink=sink[:, 0].contiguous())
    both = torch.stack([table[:, 0], 2 * table[:, 0]], 1).t()  # (batch, nheads), heads slowest
    assert both.stride() == (1, 2)
    got = run("dense", backend, q, k, v, alibi_slopes=both)
    check(got, q, k, v, attn_bias=-both.double()[:, :, None, None] * far)


def bias_views(bias):
    """The same bias in unaligned, transposed and padded memory."""
    *lead, sk = bias.shape
    yield filled(bias, dims=(*lead, sk + 6), at=(..., slice(5, 5 + sk)))
    yield bias.transpose(2, 3).contiguous().transpose(2, 3)
    yield bias.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    flat = torch.full((1 + bias.numel(),), NAN, dtype=bias.dtype)
    flat[1:] = bias.flatten()
    yield flat[1:].view(bias.shape)  # starts one element off


@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("entry", SELF[:1] + MERGE)
def test_c17_a_bias_whose_rows_are_not_aligned(entry, kind, backend, dtype):
    """C17 facebookresearch/xformers#813: a row pitch that is no multiple of eight was refused."""
    q, k, v = (rand(2, s, 3, 8, seed=n, dtype=dtype) for n, s in enumerate((5, 45, 45)))
    bias = rand(2, 3, 5, 45, seed=4, dtype=dtype)
    if kind == "float":
        for view in bias_views(bias):
            got = run(entry, backend, q, k, v, attn_bias=view)
            check(got, q, k, v, attn_bias=bias)
        return
    mask = bias > -0.5
    for view in (mask.transpose(2, 3).contiguous().transpose(2, 3), (bias > -0.5)[..., :45]):
        check(run(entry, backend, q, k, v, attn_bias=view), q, k, v, attn_bias=mask)


SHAPES = [(1, 1, 1, -1), (2, 1, 1, -1), (1, 3, 5, 1), (5, -1), (1, 1, 1, 1), (-1,), (3, 1, -1)]


@pytest.mark.parametrize("seqlen_k", [1, 2, 7, 45, 70])
def test_c17_a_broadcast_bias_and_its_gradient(seqlen_k, backend, dtype):
    """C17 pytorch/pytorch#121943: the gradient of a broadcast bias is a sum."""
    for shape in SHAPES:
        with noted(shape):
            shape = tuple(seqlen_k if n == -1 else n for n in shape)
            q = rand(2, 5, 3, 8, seed=1, dtype=dtype)
            k, v = (rand(2, seqlen_k, 3, 8, seed=s, dtype=dtype) for s in (2, 3))
            bias = rand(*shape, seed=5, dtype=dtype)
            given = {"dout": rand(2, 5, 3, 8, seed=7, dtype=dtype), "dlse": rand(2, 3, 5, seed=6)}
            got = run("dense", backend, q, k, v, attn_bias=bias, **given)
            assert got["dbias"].shape == shape
            check(got, q, k, v, attn_bias=bias, **given)


def test_c17_every_length_of_a_bias(backend):
    """C17: as asserted, for every seqlen_k from 1 to 70."""
    for seqlen_k in range(1, 71):
        with noted(seqlen_k):
            q = rand(2, 5, 3, 8, seed=1)
            k, v = (rand(2, seqlen_k, 3, 8, seed=s) for s in (2, 3))
            bias = rand(2, 3, 5, seqlen_k, seed=5)
            got = run("dense", backend, q, k, v, attn_bias=next(bias_views(bias)))
            check(got, q, k, v, attn_bias=bias)


@pytest.mark.parametrize("shape", [(1, 1, 600, 1), (1, 1, 1, 530), (1, 2, 600, 530)], ids=str)
def test_c17_a_bias_across_tiles(shape, backend):
    """C17, across tiles: each tile adds to a broadcast gradient."""
    q, k, v = (rand(2, s, 2, 8, seed=n) for n, s in enumerate((600, 530, 530)))
    bias = rand(*shape, seed=5)
    got = run("dense", backend, q, k, v, attn_bias=bias, causal=True)
    check(got, q, k, v, attn_bias=bias, seen=band_mask(600, 530, -1, 0))


@pytest.mark.parametrize("heads", [1, 2])
def test_c17_a_packed_bias(heads, backend, dtype):
    """C17: a packed bias in unaligned memory, for one head or each, with its gradient."""
    cu_q, cu_k = int32(0, 2, 5), int32(0, 7, 10)
    q = rand(5, 2, 8, seed=1, dtype=dtype)
    k, v = rand(10, 2, 8, seed=2, dtype=dtype), rand(10, 2, 8, seed=3, dtype=dtype)
    bias = rand(heads, 5, 7, seed=4, dtype=dtype)
    view = filled(bias, dims=(heads, 5, 12), at=(..., slice(3, 10)))

    def function(q, k, v, attn_bias):
        return tilewise.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 3, 7, attn_bias=attn_bias, return_lse=True, **backend
        )

    got = gradients(function, {"q": q, "k": k, "v": v, "attn_bias": view})
    assert got["dbias"].shape == bias.shape
    assert (got["dbias"][:, 2:, 3:] == 0).all()  # past the second sequence
    for rows, keys in ((slice(0, 2), slice(0, 7)), (slice(2, 5), slice(7, 10))):
        n = keys.stop - keys.start
        one = {"out": got["out"][None, rows], "lse": got["lse"][None, :, rows]}
        one |= {"dq": got["dq"][None, rows], "dbias": got["dbias"][None, :, rows, :n]}
        one |= {"dk": got["dk"][None, keys], "dv": got["dv"][None, keys]}
        own = bias[None, :, rows, :n]
        check(one, q[None, rows], k[None, keys], v[None, keys], attn_bias=own)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_c14_c16_merge_takes_any_strides(packed, parts, dtype):
    """C14, C16: parts and incoming gradients of merge_attention with strides of their own."""
    outs = [rand(2, 5, 3, 8, seed=s, dtype=dtype) for s in range(parts)]
    lses = [rand(2, 3, 5, seed=9 + s, dtype=lse_dtype(dtype)) for s in range(parts)]
    dout = last_slowest(rand(2, 5, 3, 8, seed=20, dtype=dtype))
    leaves = [backwards_in_memory(x) for x in outs]
    leaves += [x.transpose(1, 2).contiguous().transpose(1, 2) for x in lses]
    if packed:
        outs, lses = [x[0] for x in outs], [x[0] for x in lses]
        leaves, dout = [x[0] for x in leaves], dout[0]
    leaves = [x.detach().requires_grad_() for x in leaves]
    merged, lse = tilewise.merge_attention(list(zip(leaves[:parts], leaves[parts:], strict=True)))
    got = torch.autograd.grad(merged, leaves, dout)
    wide = [x.double().requires_grad_() for x in (*outs, *lses)]
    weights = torch.softmax(torch.stack(wide[parts:]), 0).mT[..., None]
    want = (weights * torch.stack(wide[:parts])).sum(0)
    want_grads = torch.autograd.grad(want, wide, dout.double())
    near(merged, want.detach(), dtype)
    near(lse, torch.logsumexp(torch.stack(wide[parts:]), 0).detach(), lse_dtype(dtype), "lse")
    for name, a, b in zip(("dv",) * parts + ("dq",) * parts, got, want_grads, strict=True):
        measure = b if name == "dv" else b + 4 * torch.finfo(lse_dtype(dtype)).eps
        near(a, b, a.dtype, name, measure)


def test_nothing_reads_the_padding_of_a_view():
    """The helper's buffers hold NaN around the view."""
    view = filled(zeros(1, 2, 1, 4), dims=(1, 4, 1, 4), at=(slice(None), slice(None, None, 2)))
    assert view.stride() == (16, 8, 4, 1)
    assert view._base.isnan().sum() == 8
