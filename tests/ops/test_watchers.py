"""Eager calls go past torch's dispatcher, unless someone there wants to see them."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import flash_attn_func
from tilewise.backends.triton import interpreted

NAMES = ["tilewise.flash_attn_fwd.default", "tilewise.flash_attn_bwd.default"]


def step():
    leaves = [torch.ones(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    return torch.autograd.grad(flash_attn_func(*leaves, causal=True).sum(), leaves)


@pytest.mark.parametrize("kind", [TorchDispatchMode, TorchFunctionMode])
def test_a_mode_sees_both_operators(kind):
    seen = []

    class Watcher(kind):
        def _note(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = __torch_function__ = _note

    want = step()
    with Watcher():
        got = step()
    ours = [name for name in seen if name.startswith("tilewise")]
    # a backward runs without the function modes of its forward
    assert ours == (NAMES if kind is TorchDispatchMode else NAMES[:1])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_profiler_sees_both_operators():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.name for event in profile.events()}
    assert {"tilewise::flash_attn_fwd", "tilewise::flash_attn_bwd"} <= names


def test_a_subclass_sees_the_operator():
    seen = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(1, 5, 2, 8).as_subclass(Mine)
    with torch.no_grad():
        flash_attn_func(x, x, x)
    assert NAMES[0] in seen


def test_a_lazy_negation_is_resolved():
    """A complex product's gradient comes with torch's negative bit: memory of the other sign."""
    x = [torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3)]
    w = torch.randn(1, 9, 2, 16, dtype=torch.complex64)
    signs = []

    def loss(backend):
        out = flash_attn_func(*x, **backend)
        out.register_hook(lambda g: signs.append(g.is_neg()))
        return (torch.complex(torch.zeros_like(out), out).conj() * w).real.sum()

    want = torch.autograd.grad(loss({"backend": "reference"}), x)
    for backend in ({"backend": "cpu"}, {"backend": "triton"}):
        if backend["backend"] == "triton" and not interpreted():
            continue
        for a, b in zip(torch.autograd.grad(loss(backend), x), want, strict=True):
            torch.testing.assert_close(a, b)
    assert any(signs)


def test_a_batch_of_gradients():
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    out = flash_attn_func(q, k, v)
    basis = torch.eye(80).view(80, 1, 5, 2, 8)
    (got,) = torch.autograd.grad(out, q, basis, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(out, q, e, retain_graph=True)[0] for e in basis]
    torch.testing.assert_close(got, torch.stack(want))


def test_gradients_of_nothing():
    x = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    out = flash_attn_func(*x)
    for g in torch.autograd.grad(out, x, torch._efficientzerotensor(out.shape)):
        assert (g == 0).all()


@pytest.mark.filterwarnings("ignore")
def test_a_traced_module_holds_one_operator():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    x = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    with torch.no_grad():
        traced = torch.jit.trace(Model(), tuple(x))
        assert str(traced.graph).count("tilewise::flash_attn_fwd") == 1
        larger = [60 * t for t in x]
        torch.testing.assert_close(traced(*larger), Model()(*larger))


def test_nobody_else_makes_a_call_pay_for_them(monkeypatch):
    from tilewise.ops import attention

    def refuse(*_):
        raise AssertionError("through the dispatcher")

    for name in ("flash_attn_fwd", "flash_attn_bwd"):
        monkeypatch.setattr(attention, name, refuse)
    step()
    with torch.no_grad(), pytest.raises(AssertionError, match="dispatcher"):
        flash_attn_func(*[torch.ones(1, 5, 2, 8, device="meta") for _ in range(3)])
