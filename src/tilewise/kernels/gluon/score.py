"""Scores of a WGMMA accumulator, (64, columns), in which a thread holds the columns 8 n + 2 t and
8 n + 2 t + 1 of its rows, t being its place among four."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton import score
from .twins import twin

scores_at = twin(score.scores_at)


@gluon.jit
def _distances(a, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """|a + r - c| of rows r and columns c = 0, 1, ... in float32; a is an integer.

    Per element that is one addition: a + r - 2 t is converted once a row, c - 2 t when compiling. A
    conversion takes as long as an exponential, on the same unit. r - 2 t stands first, as one
    number that a loop over blocks keeps.
    """
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    base = (r[:, None] - (c & 6)[None, :] + a).to(gl.float32)
    return gl.abs(base - (c & -7).to(gl.float32)[None, :])


@gluon.jit
def scores(x, m_start, n_start, SCORE, MASK, TRANSPOSED: gl.constexpr, APPROX_TANH: gl.constexpr):
    """s and its derivative, as ``triton.score.scores`` gives them, from x = Q K^T of rows m_start,
    ... and keys n_start, ...; or x = K Q^T where TRANSPOSED."""
    layout: gl.constexpr = x.type.layout
    distance = None
    if SCORE[2] is not None:
        a = m_start + (MASK[1] - MASK[0]) - n_start
        if TRANSPOSED:
            a = -a
        distance = _distances(a, x.shape[1], layout)
    return scores_at(x, distance, SCORE, APPROX_TANH)
