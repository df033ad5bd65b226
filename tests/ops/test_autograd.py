"""Autograd: what is saved, what is computed, seeds, checkpoints, penalties on gradients."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilewise import flash_attn_func, flash_attn_varlen_func
from tilewise.backends.base import Wanted
from tilewise.dispatch import BACKENDS


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(sq=9, sk=11, dtype=torch.float64):
    return [draw(2, s, 2, 4, seed=i, dtype=dtype) for i, s in enumerate((sq, sk, sk))]


@pytest.fixture
def spied(monkeypatch):
    """Records what each backward is asked for and what it hands back."""
    calls = []
    for backend in (BACKENDS["cpu"], BACKENDS["reference"]):
        original = type(backend).bwd

        def bwd(self, problem, tensors, out, lse, dout, dlse, wanted, algorithm, original=original):
            found = original(self, problem, tensors, out, lse, dout, dlse, wanted, algorithm)
            calls.append((wanted, found, dlse))
            return found

        monkeypatch.setattr(type(backend), "bwd", bwd)
    return calls


NAMES = ("q", "k", "v", "attn_bias", "sink")


@pytest.mark.parametrize(
    "needs", [n for r in (1, 2, 4, 5) for n in itertools.combinations(NAMES, r)], ids="+".join
)
def test_gradients_only_of_what_needs_them(needs, spied, engine):
    q, k, v = qkv()
    tensors = dict(zip(NAMES, (q, k, v, draw(2, 2, 9, 11, seed=4), draw(2, seed=5)), strict=True))
    full = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    everything = torch.autograd.grad(flash_attn_func(**full, **engine).cos().sum(), full.values())
    spied.clear()
    some = {n: x.clone().requires_grad_(n in needs) for n, x in tensors.items()}
    flash_attn_func(**some, **engine).cos().sum().backward()
    ((wanted, found, _),) = spied
    expected = Wanted(*(n in needs for n in NAMES))
    assert wanted == expected
    for name, place, want in zip(
        NAMES, ("dq", "dk", "dv", "dbias", "dsink"), everything, strict=True
    ):
        assert (getattr(found, place) is not None) == (name in needs)
        if name in needs:
            torch.testing.assert_close(some[name].grad, want, rtol=1e-12, atol=1e-13)
        else:
            assert some[name].grad is None


def test_no_gradient_of_lse_is_passed_when_lse_is_not_used(spied, engine):
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = flash_attn_func(q, k, v, return_lse=True, **engine)
    out.sum().backward(retain_graph=True)
    lse.sum().backward(retain_graph=True)
    (out.sum() + lse.sum()).backward()
    assert [dlse is None for _, _, dlse in spied] == [True, False, False]


def saved_by(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = function()
    return result, saved


def test_nothing_is_saved_without_gradients(engine):
    q, k, v = (x.requires_grad_() for x in qkv())
    with torch.no_grad():
        out, saved = saved_by(lambda: flash_attn_func(q, k, v, **engine))
    assert not saved and out.grad_fn is None and not out.requires_grad
    detached = [x.detach() for x in (q, k, v)]
    out, saved = saved_by(lambda: flash_attn_func(*detached, **engine))
    assert not saved and out.grad_fn is None


def test_what_is_saved_is_the_inputs_out_and_lse(engine):
    q, k, v = (x.requires_grad_() for x in qkv(300, 400, torch.float32))
    _, saved = saved_by(lambda: flash_attn_func(q, k, v, dropout_p=0.5, **engine))
    numbers = sum(x.numel() for x in saved)
    assert numbers == q.numel() + k.numel() + v.numel() + q.numel() + 2 * 2 * 300 + 1


def test_inference_mode(engine):
    q, k, v = qkv()
    want = flash_attn_func(q, k, v, **engine)
    with torch.inference_mode():
        out, lse = flash_attn_func(q, k, v, return_lse=True, **engine)
        assert out.is_inference() and lse.is_inference()
    assert torch.equal(out, want)


def test_inputs_changed_in_place_before_the_backward_are_noticed():
    q, k, v = (x.requires_grad_() for x in qkv())
    scaled = k * 1.0
    out = flash_attn_func(q, scaled, v)
    scaled.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_backward_needs_retain_graph():
    q, k, v = (x.requires_grad_() for x in qkv())
    out = flash_attn_func(q, k, v)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_gradients_accumulate_over_calls(engine):
    q, k, v = (x.requires_grad_() for x in qkv())
    for _ in range(2):
        flash_attn_func(q, k, v, **engine).square().sum().backward()
    (once,) = torch.autograd.grad(flash_attn_func(q, k, v, **engine).square().sum(), q)
    torch.testing.assert_close(q.grad, 2 * once)


def test_lse_is_differentiable_by_itself(engine):
    q, k, v = (x.requires_grad_() for x in qkv())
    _, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, **engine)
    got = torch.autograd.grad(lse.cos().sum(), (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    hidden = torch.ones(9, 11, dtype=torch.bool).triu(3)
    plain = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    want = torch.autograd.grad(plain.cos().sum(), (q, k))
    for a, b in zip(got, want, strict=False):
        torch.testing.assert_close(a, b)
    assert (got[2] == 0).all()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_tensor_hooks", "reentrant"])
def test_checkpoint_redraws_the_same_dropout(use_reentrant, engine):
    def block(*x):
        return flash_attn_func(*x, dropout_p=0.5, **engine) * 2

    results = []
    for wrapped in (False, True):
        leaves = [x.requires_grad_() for x in qkv(40, 50)]
        torch.manual_seed(7)
        out = checkpoint(block, *leaves, use_reentrant=use_reentrant) if wrapped else block(*leaves)
        torch.manual_seed(99)  # what comes between must not matter
        out.square().sum().backward()
        results.append((out, *(x.grad for x in leaves)))
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_manual_seed_reproduces_dropout_and_calls_differ(engine):
    q, k, v = qkv(40, 50)
    torch.manual_seed(3)
    a, b = (flash_attn_func(q, k, v, dropout_p=0.5, **engine) for _ in range(2))
    torch.manual_seed(3)
    c = flash_attn_func(q, k, v, dropout_p=0.5, **engine)
    assert torch.equal(a, c) and not torch.equal(a, b)


def test_a_given_seed_does_not_touch_the_generator():
    q, k, v = qkv(40, 50)
    before = torch.get_rng_state()
    a = flash_attn_func(q, k, v, dropout_p=0.5, seed=11)
    b = flash_attn_func(q, k, v, dropout_p=0.5, seed=torch.tensor([11]))
    flash_attn_func(q, k, v)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(a, b)
    assert not torch.equal(a, flash_attn_func(q, k, v, dropout_p=0.5, seed=12))
    assert not torch.equal(a, flash_attn_func(q, k, v, dropout_p=0.5, seed=11 + 2**32))


def test_forward_and_backward_draw_one_mask(engine):
    q, k, v = qkv(40, 50)
    v.requires_grad_()
    out = flash_attn_func(q, k, v, dropout_p=0.5, **engine)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close((out * dout).sum(), (v * dv).sum())  # out is linear in v


def test_backends_draw_equal_dropout(engine):
    q, k, v = qkv(70, 300)
    want = flash_attn_func(q, k, v, dropout_p=0.5, seed=5, backend="reference")
    torch.testing.assert_close(flash_attn_func(q, k, v, dropout_p=0.5, seed=5, **engine), want)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_a_training_step_with_a_gradient_penalty(packed, engine):
    """Double backward through both, against attention written out in torch."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(8, 24, dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    cu = torch.tensor([0, 6])

    def by_package(q, k, v):
        if packed:
            return flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True, **engine)
        return flash_attn_func(q[None], k[None], v[None], causal=True, **engine)[0]

    def by_hand(q, k, v):
        scores = torch.einsum("ihd,jhd->hij", q, k) / 2
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    results = []
    for attention in (by_package, by_hand):
        out = attention(*linear(x).unflatten(-1, (3, 2, 4)).unbind(-3))
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        loss = out.sum() + (dx.norm() - 1).square()
        results.append(torch.autograd.grad(loss, tuple(linear.parameters())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_an_empty_row_has_no_second_derivative_either(engine):
    q, k, v = (x.requires_grad_() for x in qkv(5, 3))
    out = flash_attn_func(q, k, v, causal=True, **engine)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    found = torch.autograd.grad(dq.square().sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in found) and (found[0][:, :2] == 0).all()


def test_gradients_reach_broadcast_biases_in_their_shape(engine):
    q, k, v = qkv()
    for shape in ((11,), (9, 1), (2, 1, 1), (2, 1, 9, 11), (1, 1, 1, 1)):
        bias = draw(*shape, seed=6).requires_grad_()
        full = bias.detach().expand(2, 2, 9, 11).clone().requires_grad_()
        (got,) = torch.autograd.grad(
            flash_attn_func(q, k, v, attn_bias=bias, **engine).cos().sum(), bias
        )
        (want,) = torch.autograd.grad(
            flash_attn_func(q, k, v, attn_bias=full, **engine).cos().sum(), full
        )
        torch.testing.assert_close(got, want.sum_to_size(shape), rtol=1e-11, atol=1e-12)


def test_double_backward_on_the_meta_device():
    q, k, v = (torch.zeros(1, 5, 2, 8, device="meta", requires_grad=True) for _ in range(3))
    (g,) = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)
    (twice,) = torch.autograd.grad(g.sum(), k)
    assert twice.shape == k.shape


class Plain(torch.Tensor):
    """A subclass that asks for nothing."""


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_cotangent_may_be_of_a_subclass(create_graph):
    q, k, v = (torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 9, 2, 8)
    found = []
    for given in (dout, dout.as_subclass(Plain)):
        out = flash_attn_func(q, k, v)
        found.append(torch.autograd.grad(out, (q, k, v), given, create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
