"""What the backward kernels share: P and dS of one tile, recomputed.

P = exp(s - lse)       Z = keep / (1 - dropout_p)
dP = (dO V^T) Z        dS = P (dP - delta) dcap, dcap = d s / d (softmax_scale x)
"""

import triton
import triton.language as tl

from .score import NEG_INF, exp_scores, scores
from .tiles import load_statistics


@triton.jit
def load_lse(LSE, m_start, SCORE, BLOCK_M: tl.constexpr, USE_TMA: tl.constexpr):
    """lse of rows m_start, ..., (BLOCK_M,); in natural units also what float32 leaves of it."""
    high_i = load_statistics(LSE, m_start, BLOCK_M, USE_TMA)
    low_i = high_i
    if SCORE[7] is not None:
        low_i = load_statistics(LSE, m_start, BLOCK_M, USE_TMA, 1)
    return high_i, low_i


@triton.jit
def clear_empty(x, lse_i):
    """Rows of x, with 0 for those that see no key: whatever stands there reaches no gradient."""
    return tl.where((lse_i == -NEG_INF)[:, None], 0.0, x)


@triton.jit
def probabilities(
    x,
    i,
    j,
    lse_i,
    low_i,
    SCORE,
    MASK,
    MASKED: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """P and d s / d (softmax_scale x) from x = q k^T.

    lse_i broadcasts to the tile. In natural units lse is lse_i + low_i: beside a large score one
    float32 has no digits left for the logarithm of the sum.
    """
    s, dcap = scores(x, i, j, SCORE, MASK, MASKED, APPROX_TANH)
    if SCORE[7] is not None:
        return exp_scores(s - lse_i, low_i, SCORE), dcap
    else:
        return exp_scores(s, lse_i, SCORE), dcap


@triton.jit
def score_gradient(p, dp, delta_i, dcap, SCORE):
    """dS = P (dP - delta) dcap; exactly 0 where a bias or mask hides the key, whatever it holds."""
    ds = p * (dp - delta_i) * dcap
    if SCORE[3] is not None or SCORE[4] is not None:
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds
