"""Eager calls go past torch's dispatcher, unless someone there wants to see them."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import flash_attn_func

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


def test_nobody_else_makes_a_call_pay_for_them(monkeypatch):
    from tilewise.ops import attention

    def refuse(*_):
        raise AssertionError("through the dispatcher")

    for name in ("flash_attn_fwd", "flash_attn_bwd"):
        monkeypatch.setattr(attention, name, refuse)
    step()
    with torch.no_grad(), pytest.raises(AssertionError, match="dispatcher"):
        flash_attn_func(*[torch.ones(1, 5, 2, 8, device="meta") for _ in range(3)])
