"""The score pipeline: scale, softcap, ALiBi, bias, mask; each step's derivative beside it.

    x = q k^T
    s = softmax_scale x                        or  softcap tanh(softmax_scale x / softcap)
    s -= slope |i + seqlen_k - seqlen_q - j|   (ALiBi)
    s += attn_bias                             (floating), or -inf where it is False (bool)
    s = -inf                                   outside the window

SCORE is (softmax_scale, softcap, slope, bias, mask, row stride, column stride, natural), with None
for what is absent; the strides are those of the bias (floating) or the mask (bool), of which a call
has one.

``scores`` gives s up to a factor, its *unit*, which the exponential folds in for nothing:
p = exp2(s unit - m), where m is in base 2. With ``natural``, s and m are in natural units: beside a
floating bias, whose finfo.min would overflow in base 2, and in float32, where the unit's rounding
would count.
"""

import triton
import triton.language as tl

from .tiles import visible

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def slope_of(alibi_slopes, slope_strides, batch_id, head):
    """The ALiBi slope of one head."""
    slope = alibi_slopes + tl.cast(batch_id, tl.int64) * slope_strides[0]
    return tl.load(slope + tl.cast(head, tl.int64) * slope_strides[1]).to(tl.float32)


@triton.jit
def bias_of(x, strides, batch_id, head, start):
    """Where the bias or mask of one head begins; start is the sequence's first row."""
    x += tl.cast(batch_id, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return x + start * strides[2]


@triton.jit
def load_scores(x, stride_m, stride_n, i, j, MASK, OUTSIDE: tl.constexpr):
    """Elements (i, j) of a bias or mask, OUTSIDE what is outside of the sequence."""
    inside = (i < MASK[0]) & (j < MASK[1])
    pointers = x + tl.cast(i, tl.int64) * stride_m + tl.cast(j, tl.int64) * stride_n
    return tl.load(pointers, mask=inside, other=OUTSIDE)


@triton.jit
def _tanh(x, APPROX: tl.constexpr):
    """tanh: one instruction with a relative error of 2^-11, or to float32's precision."""
    if APPROX:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        # Near 0, where 1 - 2 / (1 + exp(2 x)) would cancel: an odd polynomial with the least
        # maximum of the relative error on x^2 < 0.3025 (1e-9; fitted by iterated least squares).
        x2 = x * x
        poly = -0.05385230942829571 + x2 * (0.02107167729077405 - x2 * 0.006274237259455269)
        poly = x2 * (-0.3333331755947762 + x2 * (0.13332586133152335 + x2 * poly))
        bounded = tl.minimum(tl.abs(x), 20.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(bounded * (2.0 * LOG2E))
        far = 1.0 - 2.0 / (1.0 + e)
        far = tl.where(x < 0, -far, far)
        return tl.where(x2 < 0.3025, x + x * poly, far)


@triton.jit
def scores_at(x, distance, SCORE, APPROX_TANH: tl.constexpr):
    """``scores`` without bias, mask and window; distance, |i + seqlen_k - seqlen_q - j| in float32,
    is of use where a slope is."""
    softmax_scale, softcap, slope, _, _, _, _, natural = SCORE
    dcap = 1.0
    s = x
    factor = softmax_scale
    if softcap is not None:
        s = _tanh(x * (softmax_scale / softcap), APPROX_TANH)
        dcap = 1.0 - s * s
        factor = softcap
    if natural is not None:
        s = s * factor
    elif slope is not None:
        s = s * (factor * LOG2E)
    if slope is not None:
        if natural is not None:
            s -= slope * distance
        else:
            s -= (slope * LOG2E) * distance
    return s, dcap


@triton.jit
def scores(x, i, j, SCORE, MASK, MASKED: tl.constexpr, APPROX_TANH: tl.constexpr):
    """s over its unit, and d s / d (softmax_scale x), from x = q k^T.

    Args:
        x: a tile of q k^T, float32.
        i, j: rows and keys, int32 tensors that broadcast to the tile (which may be transposed).
        SCORE, MASK: as in this file and in ``tiles``.
        MASKED: whether the window or the end of the keys cuts the tile.
        APPROX_TANH: see ``_tanh``.
    """
    _, _, slope, bias, mask, stride_m, stride_n, _ = SCORE
    distance = None
    if slope is not None:
        distance = tl.abs(i + (MASK[1] - MASK[0]) - j).to(tl.float32)
    s, dcap = scores_at(x, distance, SCORE, APPROX_TANH)
    if bias is not None:
        # where it hides, a key may be NaN: there, and in rows that do not exist, nothing is added
        added = load_scores(bias, stride_m, stride_n, i, j, MASK, NEG_INF).to(tl.float32)
        s = tl.where(added == NEG_INF, NEG_INF, s + added)
    if mask is not None:
        s = tl.where(load_scores(mask, stride_m, stride_n, i, j, MASK, 0) != 0, s, NEG_INF)
    if MASKED:
        s = tl.where(visible(i, j, MASK), s, NEG_INF)
    return s, dcap


@triton.jit
def to_m(s, SCORE):
    """A (maximum of) s in the unit of m."""
    if SCORE[7] is not None:
        return s
    elif SCORE[2] is not None:
        return s
    elif SCORE[1] is not None:
        return s * (SCORE[1] * LOG2E)
    else:
        return s * (SCORE[0] * LOG2E)


@triton.jit
def exp_scores(s, m, SCORE):
    """exp of a score over a reference m: p."""
    if SCORE[7] is not None:
        return tl.exp2((s - m) * LOG2E)
    else:
        return tl.exp2(to_m(s, SCORE) - m)


@triton.jit
def exp_m(difference, SCORE):
    """exp of a difference of two m."""
    if SCORE[7] is not None:
        return tl.exp2(difference * LOG2E)
    else:
        return tl.exp2(difference)


@triton.jit
def from_natural(x, SCORE):
    """A natural logarithm (lse, a sink) in the unit of m."""
    if SCORE[7] is not None:
        return x
    else:
        return x * LOG2E


@triton.jit
def last_place(m):
    """The unit in which ``to_lse`` adds a logarithm to m, float64: 1 up to 2^31."""
    return tl.maximum(tl.abs(m.to(tl.float64)) * 2.0**-31, 1.0)


@triton.jit
def to_lse(m, total, SCORE):
    """log-sum-exp, natural, from a reference m and the sum relative to it.

    In natural units float64, so that a large m leaves room for the logarithm. Beside one that even
    float64 leaves none (finfo.min as a mask), the logarithm, at most 2^5, counts digits behind
    float32's last: less than half of m's last place, so that float32 of the result is m.
    """
    if SCORE[7] is not None:
        # float32's approximate logarithm would be wrong by several of its last digits
        return m.to(tl.float64) + tl.log(total.to(tl.float64)) * last_place(m)
    else:
        return (m + tl.log2(total)) * LN2


@triton.jit
def hides_keys(s):
    """Columns of a tile of scores that no row sees, (BLOCK_N,)."""
    return tl.max(s, 0) == NEG_INF
