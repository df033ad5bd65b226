"""A call like one before launches what that one launched, to equal bits."""

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func, repeats
from tilewise.backends.triton.launch import Plan

from .tools import draw

OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "negative_scale": {"softmax_scale": -0.3},
    "sink": {"sink": draw(4, seed=5)[::2]},
    "bias": {"attn_bias": draw(1, 2, 9, 9, seed=6)},
    "bias_of_rows": {"attn_bias": draw(1, 2, 9, 1, seed=6)},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([3])},
    "varlen": {"causal": True},
    "no_rows": {},
}


@pytest.fixture
def made(monkeypatch):
    """The plans that were made."""
    found = []
    original = Plan.__init__

    def init(self, *arguments):
        found.append(self)
        original(self, *arguments)

    monkeypatch.setattr(Plan, "__init__", init)
    monkeypatch.setattr(repeats, "_known", {})
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_equal_bits_and_nothing_made_anew(name, made, triton_engine, small_tiles):
    options = dict(OPTIONS[name])
    cu = torch.tensor([0, 5, 9], dtype=torch.int32)

    def call():
        rows = 0 if name == "no_rows" else 9
        q, k, v = leaves = [draw(2, rows, 2, 16, seed=i).requires_grad_() for i in range(3)]
        more = {n: x.clone().requires_grad_() for n, x in options.items() if n == "sink"}
        if name == "varlen":
            found = flash_attn_varlen_func(
                q[0], k[0], v[0], cu, cu, 5, 5, **options, **triton_engine
            )
        else:
            found = flash_attn_func(q, k, v, **(options | more), **triton_engine)
        parts = found if isinstance(found, tuple) else (found,)
        grads = torch.autograd.grad(sum(x.cos().sum() for x in parts), [*leaves, *more.values()])
        return (*parts, *grads)

    first, number = call(), len(made)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))
    assert len(made) == number > 0
