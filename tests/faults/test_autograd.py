"""Gradients of lse, and any subset of inputs that need one: C19, C20."""

import itertools

import pytest
import torch

import tilewise

from .tools import (
    CROSS,
    F64,
    INF,
    MERGE,
    SELF,
    all_zero,
    band_mask,
    call,
    check,
    expected,
    lse_dtype,
    near,
    noted,
    plain_twin,
    rand,
    run,
    zeros,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("entry", CROSS + MERGE)
def test_c19_a_loss_on_lse_alone(entry, backend, dtype):
    """C19 Dao-AILab/flash-attention#1817: the gradient of lse was dropped without an error."""
    q = rand(1, 3, 2, 4, seed=1, dtype=dtype)
    k, v = rand(1, 5, 1, 4, seed=2, dtype=dtype), rand(1, 5, 1, 4, seed=3, dtype=dtype)
    g = rand(1, 2, 3, seed=4, dtype=lse_dtype(dtype))
    got = run(entry, backend, q, k, v, dout=zeros(1, 3, 2, 4), dlse=g, softmax_scale=0.5)
    plain = plain_twin(q, k, v, dout=zeros(1, 3, 2, 4), dlse=g, scale=0.5)
    qd, kd, gd = q.double(), k.double()[:, :, 0], g.double()
    p = torch.softmax(0.5 * torch.einsum("bihd,bjd->bhij", qd, kd), -1)
    dq = 0.5 * torch.einsum("bhi,bhij,bjd->bihd", gd, p, kd)
    dk = 0.5 * torch.einsum("bhi,bhij,bihd->bjd", gd, p, qd)[:, :, None]
    near(got["dq"], dq, dtype, "dq", plain["dq"])
    near(got["dk"], dk, dtype, "dk", plain["dk"])
    assert all_zero(got["dv"])
    assert got["dq"].abs().max() > 0.01


@pytest.mark.parametrize("entry", CROSS)
def test_c19_only_lse_is_used(entry, backend, dtype):
    """C19: out has no part in the loss, as in lse.sum().backward()."""
    q = rand(2, 3, 2, 4, seed=1, dtype=dtype)
    k, v = rand(2, 5, 1, 4, seed=2, dtype=dtype), rand(2, 5, 1, 4, seed=3, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = call(entry, *leaves, **backend)
    lse.sum().backward()
    got = {"out": out.detach(), "lse": lse.detach(), "dq": leaves[0].grad, "dk": leaves[1].grad}
    check(got, q, k, v, dout=zeros(2, 3, 2, 4), dlse=torch.ones(2, 2, 3))
    assert leaves[2].grad is None or all_zero(leaves[2].grad)


@pytest.mark.parametrize("entry", SELF)
def test_c19_gradients_of_out_and_lse_together(entry, backend, dtype):
    """C19: with every feature that the backward of lse passes through."""
    for features in ("plain", "causal", "softcap", "bias", "sink", "all"):
        with noted(features):
            q, k, v = (rand(2, 7, 2, 8, seed=s, dtype=dtype) for s in (1, 2, 3))
            on = {features} if features != "all" else {"causal", "softcap", "bias", "sink"}
            tensors = {}
            if "bias" in on:
                tensors["attn_bias"] = rand(2, 2, 7, 7, seed=6, dtype=dtype)
            if "sink" in on:
                tensors["sink"] = rand(2, seed=7, dtype=dtype)
            cap = 1.5 if "softcap" in on else 0.0
            causal = "causal" in on
            given = {
                "dout": rand(2, 7, 2, 8, seed=4, dtype=dtype),
                "dlse": rand(2, 2, 7, seed=5),
                **tensors,
            }
            got = run(entry, backend, q, k, v, softcap=cap, causal=causal, **given)
            check(
                got, q, k, v, softcap=cap, seen=band_mask(7, 7, -1, 0) if causal else None, **given
            )


@pytest.mark.parametrize("entry", ["dense", "varlen"])
def test_c19_across_tiles(entry, backend):
    """C19, across tiles, with rows that see nothing."""
    q, k, v = (rand(1, s, 2, 8, seed=n) for n, s in enumerate((600, 530, 530)))
    dlse = rand(1, 2, 600, seed=4)
    got = run(entry, backend, q, k, v, causal=True, dlse=dlse)
    assert all_zero(got["dq"][:, :70])
    check(got, q, k, v, seen=band_mask(600, 530, -1, 0), dlse=dlse)


@pytest.mark.parametrize("entry", CROSS)
def test_c19_rows_without_keys_send_nothing_through_lse(entry, backend, dtype):
    """C19: rows with lse = -inf send zero, whatever their gradient."""
    q = rand(1, 5, 1, 4, seed=1, dtype=dtype)
    k, v = rand(1, 2, 1, 4, seed=2, dtype=dtype), rand(1, 2, 1, 4, seed=3, dtype=dtype)
    dlse = torch.full((1, 1, 5), 1e4)
    dlse[..., 3:] = 1
    got = run(entry, backend, q, k, v, causal=True, dlse=dlse)
    assert all_zero(got["dq"][0, :3])
    check(got, q, k, v, seen=band_mask(5, 2, -1, 0), dlse=dlse)


def test_c19_through_a_merge(dtype):
    """C19: the weights of a merge depend on lse, and so does the merged lse."""
    outs = [rand(1, 3, 2, 4, seed=s, dtype=dtype) for s in (1, 2)]
    lses = [rand(1, 2, 3, seed=s, dtype=lse_dtype(dtype)) for s in (3, 4)]
    leaves = [x.clone().requires_grad_() for x in (*outs, *lses)]
    _, lse = tilewise.merge_attention(list(zip(leaves[:2], leaves[2:], strict=True)))
    got = torch.autograd.grad(lse.sum(), leaves[2:])
    want = torch.softmax(torch.stack(lses).double(), 0)
    for a, b in zip(got, want, strict=True):
        near(a, b, lse_dtype(dtype), "dv")


NAMES = ("q", "k", "v", "attn_bias", "sink")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
SUBSETS = [c for n in range(1, 6) for c in itertools.combinations(range(5), n)]


def five(dtype):
    shapes = ((2, 3, 2, 4), (2, 5, 1, 4), (2, 5, 1, 4), (1, 2, 3, 5), (2,))
    return {
        name: rand(*shape, seed=s, dtype=dtype)
        for s, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))
    }


@pytest.mark.parametrize("entry", CROSS + MERGE)
def test_c20_only_some_inputs_need_a_gradient(entry, backend):
    """C20 pytorch/pytorch#148476: only the mask required a gradient, and the backward crashed."""
    for wanted in SUBSETS:
        with noted(wanted):
            ts = five(F64)
            if entry == "merge":  # a sink belongs to one part only
                del ts["sink"]
                wanted = [i for i in wanted if i != 4]
                if not wanted:
                    wanted = [3]
            right = expected(**ts)
            now = {
                name: x.clone().requires_grad_(NAMES.index(name) in wanted)
                for name, x in ts.items()
            }
            out, _ = call(entry, **now, **backend)
            got = torch.autograd.grad(out.sum(), [now[NAMES[i]] for i in wanted])
            for i, grad in zip(wanted, got, strict=True):
                near(grad, right[GRADIENTS[i]], F64, GRADIENTS[i])


@pytest.mark.parametrize("wanted", [(3,), (4,), (0,), (1,), (2,)], ids=lambda c: NAMES[c[0]])
def test_c20_one_input_in_every_dtype(wanted, backend, dtype):
    """C20: each input alone, in every dtype, with .backward()."""
    ts = five(dtype)
    right, plain = expected(**ts), plain_twin(**ts)
    now = {n: x.clone().requires_grad_(NAMES.index(n) in wanted) for n, x in ts.items()}
    out = tilewise.flash_attn_func(**now, **backend)
    out.sum().backward()
    for i, name in enumerate(NAMES):
        if i in wanted:
            grad, key = now[name].grad, GRADIENTS[i]
            assert grad.dtype == dtype
            near(grad, right[key], dtype, key, plain[key])
        else:
            assert now[name].grad is None


@pytest.mark.parametrize("entry", CROSS)
def test_c20_no_gradient_wanted(entry, backend):
    """C20: nothing is kept under no_grad or inference_mode, and the values stay."""
    ts = five(F64)
    right = expected(**ts)
    leaves = {name: x.clone().requires_grad_() for name, x in ts.items()}
    with torch.no_grad():
        out, lse = call(entry, **leaves, **backend)
    assert not out.requires_grad and not lse.requires_grad
    assert out.grad_fn is None and lse.grad_fn is None
    near(out, right["out"], F64)
    with torch.inference_mode():
        out, lse = call(entry, **ts, **backend)
        assert out.is_inference()
        near(out.clone(), right["out"], F64)
    out, lse = call(entry, **ts, **backend)
    assert not out.requires_grad and not lse.requires_grad


def test_c20_lse_need_not_be_returned(backend):
    """C20: out alone still has every gradient."""
    ts = five(F64)
    leaves = {name: x.clone().requires_grad_() for name, x in ts.items()}
    out = tilewise.flash_attn_func(**leaves, **backend)
    assert isinstance(out, torch.Tensor)
    right = expected(**ts)
    got = torch.autograd.grad(out.sum(), list(leaves.values()))
    for name, grad in zip(GRADIENTS, got, strict=True):
        near(grad, right[name], F64, name)


def test_c20_one_tensor_for_several_inputs(backend, dtype):
    """C20: q, k and v are one leaf, whose gradient is the sum."""
    x = rand(2, 7, 2, 8, seed=1, dtype=dtype)
    leaf = x.clone().requires_grad_()
    out = tilewise.flash_attn_func(leaf, leaf, leaf, **backend)
    out.sum().backward()
    right, plain = expected(x, x, x), plain_twin(x, x, x)
    want, measure = (r["dq"].double() + r["dk"] + r["dv"] for r in (right, plain))
    near(leaf.grad, want, dtype, "dq", measure)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3)], ids=str)
def test_c20_some_parts_of_a_merge_need_a_gradient(wanted):
    """C20: outs and lses, each alone, one of them of a part that holds nothing."""
    ts = [rand(1, 3, 2, 4, seed=1), rand(1, 2, 3, seed=2), rand(1, 3, 2, 4, seed=3)]
    ts.append(rand(1, 2, 3, seed=4))
    ts[3][..., 0] = -INF
    leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(ts)]
    out, _ = tilewise.merge_attention([tuple(leaves[:2]), tuple(leaves[2:])])
    got = torch.autograd.grad(out.square().sum(), [leaves[i] for i in wanted])
    p = torch.softmax(torch.stack([ts[1], ts[3]]), 0).mT[..., None]
    values = torch.stack([ts[0], ts[2]])
    merged = (p * values).sum(0)
    for i, grad in zip(wanted, got, strict=True):
        part = i // 2
        if i % 2 == 0:
            near(grad, 2 * merged * p[part], F64, "dv")
        else:
            shift = (2 * merged * p[part] * (values[part] - merged)).sum(-1)
            near(grad, shift.mT, F64, "dq")
