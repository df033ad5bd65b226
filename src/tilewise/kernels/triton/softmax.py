"""Online softmax (Milakov and Gimelshein 2018; Dao 2023, Algorithm 1)."""

import triton
import triton.language as tl

from .score import NEG_INF, exp_m, exp_scores, from_natural, to_m


@triton.jit
def initial_state(sink, head, SCORE, BLOCK_M: tl.constexpr):
    """m_i and l_i, (BLOCK_M,) each, before any key; a sink is a key without a value."""
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sink is not None:
        logit = from_natural(tl.load(sink + head).to(tl.float32), SCORE)
        m_i = tl.zeros([BLOCK_M], tl.float32) + logit
        l_i += tl.where(logit == NEG_INF, 0.0, 1.0)
    return m_i, l_i


@triton.jit
def online_softmax(s, m_i, l_i, SCORE, GUARD: tl.constexpr):
    """One step: p = exp(s - m), alpha = exp(m_i - m), and m_i, l_i with this tile.

    GUARD: rows may have seen no key yet, and then m is taken as 0.
    """
    m_new = tl.maximum(m_i, to_m(tl.max(s, 1), SCORE))
    reference = m_new
    if GUARD:
        reference = tl.where(m_new == NEG_INF, 0.0, m_new)
    alpha = exp_m(m_i - reference, SCORE)
    p = exp_scores(s, reference[:, None], SCORE)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)
