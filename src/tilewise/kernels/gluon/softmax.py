"""Online softmax whose reference moves late.

Any reference m serves: p = exp(s - m) and l = sum p carry the same factor, which O / l loses again.
FlashAttention moves m to the running maximum with every tile. Here it stays until some p would
leave a safe range, and O is rescaled only then: see docs/math/online-softmax.md.

m is in base 2. l is kept as the partial sums of each thread, (64, 4): a thread holds the columns
8 n + 2 t and 8 n + 2 t + 1 of its rows, t being its place among four.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton import score as triton_score
from .ptx import any_above, exp2, exp2_subnormal, log2, opaque
from .twins import twin

NEG_INF: gl.constexpr = gl.constexpr(float("-inf"))
to_m = twin(triton_score.to_m)


@gluon.constexpr_function
def _range(dtype):
    """In powers of two: how large p may grow, and how far above the maximum the reference is put at
    most. float16 has no small numbers to spare for that. The two together stay far below 149:
    beyond it alpha is 0, and what it scales must not be visible any more."""
    return (14, 0) if dtype == gl.float16 else (60, 50)


@gluon.jit
def hide(s, i, j, MASK):
    """s of rows i and keys j, which broadcast to it, -inf where the window or the keys' end hides
    it."""
    seqlen_q, seqlen_k, window_left, window_right = MASK
    d = i + (seqlen_k - seqlen_q)
    last = seqlen_k - 1
    if window_right is not None:
        last = gl.minimum(d + window_right, last)  # one comparison for both ends of the keys
    s = gl.where(j <= last, s, NEG_INF)
    if window_left is not None:
        s = gl.where(j >= d - window_left, s, NEG_INF)
    return s


@gluon.jit
def partial_sums(p, BLOCK_N: gl.constexpr):
    """Sums over the columns that a thread owns: (64, BLOCK_N) to (64, 4)."""
    return gl.sum(gl.sum(gl.reshape(p, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _maxima(s, BLOCK_N: gl.constexpr):
    """Maxima over the columns that a thread owns, (64, 4), by a tree of short chains."""
    if BLOCK_N >= 64:
        t = gl.max(gl.reshape(s, [64, BLOCK_N // 32, 4, 4, 2]), 4)
        return gl.max(gl.max(t, 2), 1)
    else:
        return gl.max(gl.max(gl.reshape(s, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _with_maximum(s, m_i, seen, least, SCORE, BLOCK_N: gl.constexpr, dtype: gl.constexpr):
    """p, m and alpha. The reference of a row moves if its maximum, of s and of ``seen``, (64, 4) or
    None, is above ``least``: past the maximum, which leaves room for larger ones to come, by as
    much as lse keeps its digits."""
    ROOM: gl.constexpr = _range(dtype)[1]
    rows: gl.constexpr = m_i.type.layout
    top = to_m(_maxima(s, BLOCK_N), SCORE)
    if seen is not None:
        columns: gl.constexpr = top.type.layout
        top = gl.maximum(top, gl.convert_layout(seen, columns, assert_trivial=True))
    top = gl.convert_layout(gl.max(top, 1), rows, assert_trivial=True)
    past = gl.maximum(m_i, top + gl.minimum(gl.abs(top), ROOM))
    m_new = gl.where(top > least, past, m_i)
    # rows that have seen no key: exp(-inf - 0) is 0, exp(-inf + inf) is not
    reference = gl.where(m_new == NEG_INF, 0.0, m_new)
    alpha = exp2_subnormal(m_i - reference)
    p = exp2(to_m(s, SCORE) - reference[:, None])
    return p, m_new, alpha


@gluon.jit
def first_softmax(s, SCORE, BLOCK_N: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr):
    """p, m_i and l_i of a row's first tile, which may be masked."""
    m_i = gl.full([64], NEG_INF, gl.float32, layout)
    p, m_i, _ = _with_maximum(s, m_i, None, m_i, SCORE, BLOCK_N, dtype)
    return p, m_i, partial_sums(p, BLOCK_N)


@gluon.jit
def softmax(
    s, m_i, l_i, wild, SCORE, scalar, BLOCK_N: gl.constexpr, REGISTER: gl.constexpr,
    dtype: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """One step: p, m, l and alpha; p will be rounded to ``dtype``.

    No maximum is taken: p is computed against the old reference, and the partial sums, needed
    anyway, tell whether it grew too large, or is NaN since the row has seen no key so far. Then
    the warp takes the maximum and p once more; a ``wild`` warp does so at once. With ``TOGETHER``
    the other rows of such a warp move too, to have as much room from then on.
    """
    LIMIT: gl.constexpr = _range(dtype)[0]
    rows: gl.constexpr = m_i.type.layout
    p, m_new, sums, large = s, m_i, l_i, wild
    alpha = gl.full([64], 1.0, gl.float32, rows)
    if wild == 0:
        p = exp2(to_m(s, SCORE) - m_i[:, None])
        sums, large = any_above(partial_sums(p, BLOCK_N), LIMIT, scalar, REGISTER)
    if large != 0:  # in one place, since a loop of fewer instructions is faster
        seen, least = None, m_i
        if TOGETHER:  # a thread's sum so far is its maximum so far, but for a few units
            columns: gl.constexpr = l_i.type.layout
            m = gl.convert_layout(m_i, gl.SliceLayout(1, columns), assert_trivial=True)
            seen = m[:, None] + log2(l_i)
            least = gl.where(wild != 0, m_i, NEG_INF)
        # products of its own, else both sides' are computed before the branch, and not fused
        apart = (
            opaque(SCORE[0]), None if SCORE[1] is None else opaque(SCORE[1]), SCORE[2], SCORE[3],
            SCORE[4], SCORE[5], SCORE[6], SCORE[7],
        )  # fmt: skip
        p, m_new, alpha = _with_maximum(s, m_i, seen, least, apart, BLOCK_N, dtype)
        sums = partial_sums(p, BLOCK_N)
    return p, m_new, _add(l_i, alpha, sums), alpha


@gluon.jit
def is_wild(m_i, l_i, scalar, REGISTER: gl.constexpr):
    """Whether a row of the warp has a first reference beyond +-2^7: scores so large may well grow
    by more than a reference has room for, and that again and again."""
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    top = gl.abs(gl.where(m_i == NEG_INF, 0.0, m_i))
    top = gl.convert_layout(top, rows, assert_trivial=True)[:, None]
    _, wild = any_above(gl.broadcast(top, l_i)[0], 7, scalar, REGISTER)
    return wild


@gluon.jit
def _add(l_i, alpha, sums):
    rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return l_i * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + sums
