"""Online softmax over several tiles against the softmax of the whole row."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.score import to_lse
from tilewise.kernels.triton.softmax import initial_state, online_softmax

M, N = 16, 16


@triton.jit
def softmax_kernel(
    s, sink, out, lse, tiles, natural, M: tl.constexpr, N: tl.constexpr, GUARD: tl.constexpr
):
    """out: the sum of p times the number of its column, over the sum of p."""
    SCORE = 1.0, None, None, None, None, 0, 0, natural
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    m, l = initial_state(sink, 0, SCORE, M)
    acc = tl.zeros([M], tl.float32)
    for tile in range(0, tiles):
        column = tile * N + j
        x = tl.load(s + i * (tiles * N) + column)
        p, alpha, m, l = online_softmax(x, m, l, SCORE, GUARD)
        acc = acc * alpha + tl.sum(p * column, 1)
    tl.store(out + tl.arange(0, M), acc / tl.where(l == 0, 1.0, l))
    tl.store(lse + tl.arange(0, M), to_lse(m, l, SCORE))


def run(s, sink=None, natural=False):
    out, lse = torch.empty(M), torch.empty(M)
    unit = 1 if natural else None
    softmax_kernel[(1,)](s, sink, out, lse, s.shape[1] // N, unit, M, N, True)
    return out, lse


def whole_row(s, sink=None):
    s = s.double()
    every = s if sink is None else torch.cat([s, sink.double().expand(M, 1)], 1)
    lse = every.logsumexp(-1)
    p = torch.exp(s - lse[:, None]).nan_to_num(0.0)
    return p @ torch.arange(s.shape[1], dtype=torch.float64), lse


@pytest.mark.parametrize("natural", [False, True], ids=["base2", "natural"])
@pytest.mark.parametrize("order", ["mixed", "rising", "falling"])
@pytest.mark.parametrize("shift", [0.0, 3e4, -3e4])
def test_several_tiles_are_one_row(shift, order, natural):
    s = torch.randn(M, 5 * N, generator=torch.Generator().manual_seed(2)) * 10
    if order != "mixed":
        s = s.sort(1, descending=order == "falling").values
    s = s + shift
    out, lse = run(s, natural=natural)
    want, want_lse = whole_row(s)
    # scores of 3e4 have steps of 2^-9 and their logarithms to base 2 likewise
    loose = 1e-5 if shift == 0 else 2e-2
    torch.testing.assert_close(out.double(), want, rtol=loose, atol=loose)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


def test_tiles_without_a_key_anywhere_in_the_row():
    s = torch.randn(M, 4 * N, generator=torch.Generator().manual_seed(3))
    s[:4] = -torch.inf  # no key at all
    s[4:8, : 2 * N] = -torch.inf  # the first tiles hidden
    s[8:12, 2 * N :] = -torch.inf  # the last
    out, lse = run(s)
    want, want_lse = whole_row(s)
    assert (out[:4] == 0).all() and (lse[:4] == -torch.inf).all()
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 0.0, 3.0, 1e4])
def test_a_sink_is_a_key_without_a_value(sink):
    s = torch.randn(M, 2 * N, generator=torch.Generator().manual_seed(4))
    s[:4] = -torch.inf
    logit = torch.tensor([sink])
    out, lse = run(s, logit)
    want, want_lse = whole_row(s, logit)
    assert (out[:4] == 0).all() and (lse[:4] == logit).all()
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
