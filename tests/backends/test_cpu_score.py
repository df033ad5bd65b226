"""When the CPU backend proves scores bounded, and when it takes the slow form against garbage."""

import math

import pytest
import torch

from tilewise.arguments import Options, dense_call
from tilewise.backends.cpu.score import BOUND_LOG2, BOUNDED_VALUES, Scores, largest_norm
from tilewise.backends.cpu.tiles import Scratch, make_chunk, slots
from tilewise.core.units import LOG2E
from tilewise.ops.schema import describe


def scores(q, k, v, dout=None, **options):
    tensors, scalars = dense_call(q, k, v, Options(**options))
    problem = describe(tensors, scalars, needs_grad=False)
    (slot,) = slots(problem, tensors, 1)
    return Scores(make_chunk(problem, tensors, slot, Scratch(torch.float32)), dout)


def rows(norm_q, norm_k, norm_v=1.0, n=5):
    """q, k and v whose longest rows have these norms."""
    q, k, v = (torch.zeros(1, n, 1, 4) for _ in range(3))
    q[0, 2, 0, 1], k[0, 1, 0, 3], v[0, 3, 0, 0] = norm_q, norm_k, norm_v
    return q, k, v


def test_norm_of_the_longest_row():
    x = torch.zeros(2, 3, 1, 4)
    x[1, 2, 0] = torch.tensor([1.0, 2.0, 2.0, 4.0])
    assert largest_norm(x, Scratch(torch.float32)) == 5.0
    assert largest_norm(x[:, :0], Scratch(torch.float32)) == 0.0
    assert math.isnan(
        largest_norm(x.index_fill(1, torch.tensor(0), torch.nan), Scratch(torch.float32))
    )
    assert largest_norm(x.half() * 60000, Scratch(torch.float32)) > 65504


def test_cauchy_schwarz_decides_bounded_at_its_limit():
    edge = BOUND_LOG2 / LOG2E
    assert scores(*rows(edge * 0.999, 1.0), softmax_scale=1.0).bounded
    assert scores(*rows(1.0, edge * 0.999), softmax_scale=-1.0).bounded
    assert not scores(*rows(edge * 1.001, 1.0), softmax_scale=1.0).bounded
    assert not scores(*rows(edge, 1.0), softmax_scale=-1.01).bounded
    assert scores(*rows(edge * 0.999, 1e6), softmax_scale=1e-6).bounded


def test_softcap_bounds_large_scores():
    assert scores(*rows(1e6, 1e6), softcap=20.0).bounded
    assert not scores(*rows(1e6, 1e6), softcap=25.0).bounded


def test_bias_slopes_and_large_values_are_not_bounded():
    q, k, v = rows(1.0, 1.0)
    assert scores(q, k, v).bounded
    assert scores(q, k, v, attn_bias=torch.ones(5, 5, dtype=torch.bool)).bounded
    assert scores(q, k, v, sink=torch.zeros(1)).bounded
    assert not scores(q, k, v, attn_bias=torch.zeros(5, 5)).bounded
    assert not scores(q, k, v, alibi_slopes=torch.ones(1)).bounded
    assert not scores(*rows(1.0, 1.0, BOUNDED_VALUES[1] * 1.01)).bounded


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_garbage_anywhere_takes_the_slow_form(which, garbage):
    tensors = dict(
        zip(("q", "k", "v", "dout"), (*rows(1.0, 1.0), torch.ones(1, 5, 1, 4)), strict=False)
    )
    assert scores(**tensors).tame
    tensors[which] = tensors[which].index_fill(1, torch.tensor(4), garbage)
    found = scores(**tensors)
    assert not found.tame and not found.bounded


def test_bias_takes_the_slow_form_when_it_can_overflow_upwards():
    q, k, v = rows(1.0, 1.0)
    for fill, tame in (
        (-torch.inf, True),
        (torch.finfo().min, True),
        (3e38, False),
        (torch.nan, False),
    ):
        bias = torch.zeros(5, 5)
        bias[2, 3] = fill
        assert scores(q, k, v, attn_bias=bias).tame == tame, fill


@pytest.mark.parametrize("natural", [False, True], ids=["base2", "natural"])
@pytest.mark.parametrize("m", [0.0, 3.25, 987.6, -4321.0, 70000.0])
def test_lse_survives_the_way_to_the_backward(m, natural):
    bias = torch.zeros(5, 5) if natural else None
    sc = scores(*rows(1.0, 1.0), attn_bias=bias)
    reference = torch.tensor([m]) * sc.unit
    lse = sc.to_lse(reference, torch.tensor([3.0]))
    assert lse.dtype == torch.float64
    back, correction = sc.from_lse(lse)
    # exp(score - lse) of a score equal to m is 1 / 3
    p = sc.exp_(reference - back) * correction
    torch.testing.assert_close(p, torch.tensor([1 / 3]), rtol=1e-6, atol=0)
    empty, factor = sc.from_lse(torch.tensor([-torch.inf], dtype=torch.float64))
    assert empty.item() == 0.0 and factor.item() == 1.0
