"""First and second derivatives against finite differences, for every feature and every pair."""

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func
from tilewise.testing import CASES, Case, make_inputs

SMALL = [
    Case(c.features, batch=1, seqlen_q=3, seqlen_k=4, nheads=2, head_dim=3, seed=c.seed)
    for c in CASES
]
SINGLES = [c for c in SMALL if len(c.features) < 2]
PAIRS = [c for c in SMALL if len(c.features) == 2]
SECOND_ORDER_PAIRS = [
    c for c in PAIRS
    if set(c.features) in (
        {"causal", "softcap"}, {"causal", "sink"}, {"window", "alibi"}, {"softcap", "attn_bias"},
        {"softcap", "sink"}, {"attn_bias", "sink"}, {"attn_bias", "dropout"}, {"sink", "gqa"},
        {"bool_mask", "sink"}, {"dropout", "varlen"}, {"attn_bias", "varlen"}, {"sink", "varlen"},
        {"gqa", "head_dim_v"}, {"varlen", "seqused"}, {"softcap", "varlen"}, {"dropout", "gqa"},
    )
]  # fmt: skip


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    return request.param


def function_of(case, backend):
    """The call as a function of its differentiable tensors, and those tensors."""
    inputs = make_inputs(case, torch.float64)
    names = [
        n
        for n in ("q", "k", "v", "attn_bias", "sink")
        if n in inputs and inputs[n].is_floating_point()
    ]
    leaves = [inputs.pop(n).requires_grad_() for n in names]
    attention = flash_attn_varlen_func if "cu_seqlens_q" in inputs else flash_attn_func

    def call(*tensors):
        out, lse = attention(
            **dict(zip(names, tensors, strict=True)), **inputs, return_lse=True, backend=backend
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return call, leaves


@pytest.mark.parametrize("case", SINGLES, ids=lambda c: c.id)
def test_first_derivatives_of_every_feature(case, backend):
    assert torch.autograd.gradcheck(*function_of(case, backend))


@pytest.mark.parametrize("case", PAIRS, ids=lambda c: c.id)
def test_first_derivatives_of_every_pair(case, backend):
    assert torch.autograd.gradcheck(*function_of(case, backend), fast_mode=True)


@pytest.mark.parametrize("case", SINGLES, ids=lambda c: c.id)
def test_second_derivatives_of_every_feature(case, backend):
    call, leaves = function_of(case, backend)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("case", SECOND_ORDER_PAIRS, ids=lambda c: c.id)
def test_second_derivatives_of_pairs(case, backend):
    assert torch.autograd.gradgradcheck(*function_of(case, backend), fast_mode=True)


def test_the_pairs_of_second_order_are_all_there():
    assert len(SECOND_ORDER_PAIRS) == 16


@pytest.mark.parametrize("features", [(), ("causal", "sink"), ("attn_bias",)], ids=str)
def test_every_entry_of_the_second_derivative(features, backend):
    case = Case(features, batch=1, seqlen_q=2, seqlen_k=3, nheads=1, head_dim=2)
    assert torch.autograd.gradgradcheck(*function_of(case, backend))


@pytest.mark.parametrize("case", SINGLES, ids=lambda c: c.id)
def test_second_derivatives_of_both_backends_are_the_reference_s(case):
    results = []
    for backend in ("cpu", "reference"):
        call, leaves = function_of(case, backend)
        out, lse = call(*leaves)
        loss = (out * out.detach().cos()).sum() + (lse * lse.detach().sin()).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum((g * g).sum() for g in first)
        results.append(torch.autograd.grad(penalty, leaves))
    for cpu, reference in zip(*results, strict=True):
        torch.testing.assert_close(cpu, reference, rtol=1e-9, atol=1e-11)
