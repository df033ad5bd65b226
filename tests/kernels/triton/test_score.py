"""The score pipeline and its units, tile by tile, against the formulas in float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.score import _tanh, exp_scores, hides_keys, scores, to_lse, to_m

N = 32


@triton.jit
def tanh_kernel(x, out, N: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + offs, _tanh(tl.load(x + offs), False))


def test_tanh_to_the_precision_of_float32():
    near = torch.linspace(-1, 1, 2**14)
    far = torch.cat([torch.logspace(-38, 38, 2**13), -torch.logspace(-38, 38, 2**13)])
    x = torch.cat([near, far])
    got = torch.empty_like(x)
    tanh_kernel[(8,)](x, got, len(x) // 8)
    want = torch.tanh(x.double())
    relative = (got.double() - want).abs() / want.abs().clamp_min(1e-45)
    assert float(relative.max()) < 4 * torch.finfo(torch.float32).eps
    assert (got.abs() <= 1).all()


def test_tanh_at_zero_and_at_the_infinities():
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 20.0, -1e30])
    got = torch.empty_like(x)
    tanh_kernel[(1,)](x, got, 8)
    assert got[:4].tolist() == [0.0, 0.0, 1.0, -1.0] and got[4].isnan()
    torch.testing.assert_close(got[5:], torch.tanh(x[5:]))


@triton.jit
def scores_kernel(
    x, out, dcap, lse, hidden, bias, mask, slope, softmax_scale, softcap, sq, sk, left, right,
    natural, MASKED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    place = i * N + j
    MASK = sq, sk, left, right
    SCORE = softmax_scale, softcap, slope, bias, mask, N, 1, natural
    s, d = scores(tl.load(x + place), i, j, SCORE, MASK, MASKED, False)
    m = to_m(tl.max(s, 1), SCORE)
    safe = tl.where(m == float("-inf"), 0.0, m)
    p = exp_scores(s, safe[:, None], SCORE)
    tl.store(out + place, p)
    tl.store(dcap + place, d + tl.zeros([N, N], tl.float32))
    tl.store(lse + tl.arange(0, N), to_lse(safe, tl.sum(p, 1), SCORE))
    tl.store(hidden + tl.arange(0, N), hides_keys(s).to(tl.int8))


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "alibi": {"slope": 0.3},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "window": {"left": 5, "right": 2},
    "softcap_alibi": {"softcap": 1.5, "slope": 0.3},
    "softcap_bias_window": {"softcap": 1.5, "bias": True, "left": 5, "right": 2},
    "alibi_bias": {"slope": 0.3, "bias": True},
    "all": {"softcap": 1.5, "slope": 0.3, "mask": True, "left": 9, "right": 0},
}


@pytest.mark.parametrize("unit", ["base2", "natural"])
@pytest.mark.parametrize("sizes", [(N, N), (20, 27), (27, 20)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_probabilities_lse_and_derivative_follow_the_formulas(option, sizes, unit):
    if "bias" in OPTIONS[option]:
        unit = "natural"  # the only one beside a bias
    given, (sq, sk) = OPTIONS[option], sizes
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(N, N, generator=gen) * 4
    bias = torch.randn(N, N, generator=gen) * 3 if "bias" in given else None
    mask = torch.rand(N, N, generator=gen) > 0.3 if "mask" in given else None
    scale, cap, slope = 0.5, given.get("softcap"), given.get("slope")
    p, dcap, lse = torch.empty(N, N), torch.empty(N, N), torch.empty(N)
    hidden = torch.empty(N, dtype=torch.int8)
    sides = given.get("left"), given.get("right")
    scores_kernel[(1,)](
        x, p, dcap, lse, hidden, bias, mask, slope, scale, cap, sq, sk, *sides,
        1 if unit == "natural" else None, True, N,
    )  # fmt: skip

    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    d = i + sk - sq
    s = x.double() * scale
    slope_of_cap = torch.ones_like(s)
    if cap is not None:
        tanh = torch.tanh(s / cap)
        s, slope_of_cap = cap * tanh, 1 - tanh**2
    if slope is not None:
        s = s - slope * (d - j).abs()
    if bias is not None:
        s = s + bias.double()
    seen = (j < sk).expand(N, N)
    if sides[0] is not None:
        seen = seen & (j >= d - sides[0])
    if sides[1] is not None:
        seen = seen & (j <= d + sides[1])
    if mask is not None:
        seen = seen & mask
    s = s.masked_fill(~seen, -torch.inf)
    rows = slice(0, sq)
    top = s.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).min)
    torch.testing.assert_close(p[rows].double(), (s - top).exp()[rows], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(dcap[rows].double(), slope_of_cap[rows], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[rows].double(), s.logsumexp(-1)[rows], rtol=1e-5, atol=1e-5)
    assert (p[~seen] == 0).all()
    if bias is not None:  # a row that does not exist sees nothing, whatever a key holds
        assert (p[sq:] == 0).all()
    if sq == N:
        assert torch.equal(hidden.bool(), ~seen.any(0))


def test_the_largest_negative_bias_does_not_overflow():
    """finfo.min times log2(e) would be -inf: beside a bias the unit is natural."""
    least = torch.finfo(torch.float32).min
    bias = torch.full((N, N), least)
    x, p, dcap, lse = torch.zeros(N, N), torch.empty(N, N), torch.empty(N, N), torch.empty(N)
    hidden = torch.empty(N, dtype=torch.int8)
    scores_kernel[(1,)](
        x, p, dcap, lse, hidden, bias, None, None, 1.0, None, N, N, None, None, 1, False, N
    )
    assert (p == 1).all() and not hidden.any()
    assert (lse == least + math.log(N)).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_hidden_key_weighs_nothing_whatever_it_holds(garbage, kind):
    sees = torch.ones(N, N, dtype=torch.bool)
    sees[:, 5], sees[3] = False, False
    bias = torch.zeros(N, N).masked_fill(~sees, -torch.inf) if kind == "float" else None
    x = torch.randn(N, N)
    x[:, 5] = garbage
    p, dcap, lse = torch.empty(N, N), torch.empty(N, N), torch.empty(N)
    hidden = torch.empty(N, dtype=torch.int8)
    scores_kernel[(1,)](
        x, p, dcap, lse, hidden, bias, None if bias is not None else sees, None, 1.0, None, 20, N,
        None, None, 1, True, N,
    )  # fmt: skip
    assert (p[:20, 5] == 0).all() and (p[3] == 0).all() and hidden[5] == 1
    assert torch.isfinite(p).all() and lse[3] == -torch.inf
