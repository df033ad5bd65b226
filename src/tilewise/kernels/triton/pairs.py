"""Numbers in half precision two at a time, in PTX: for Hopper GPUs and later ones.

A thread's neighbouring elements in a row lie in one register. Triton computes them one by one.
"""

import triton
import triton.language as tl

# Of two lanes at once: min(max(lane, a) + b, 1) is 1 or 0; that times the bits of 1.0 is a factor.
_FACTORS = (
    "{ .reg .b32 keep, one; mov.b32 one, 0x10001; max.u16x2 keep, $1, $3; "
    "add.u16x2 keep, keep, $5; min.u16x2 keep, keep, one; mul.lo.u32 $0, keep, "
)
_FACTORS_F16: tl.constexpr = tl.constexpr(_FACTORS + "0x3C00; }")
_FACTORS_BF16: tl.constexpr = tl.constexpr(_FACTORS + "0x3F80; }")


@triton.jit
def factors(p, words, DROPOUT):
    """1 where dropout keeps an element, else 0, in p's dtype.

    Args:
        p: a tile in half precision, of which only the dtype counts.
        words: of each element the 32 bits drawn for it and its neighbour; the first of the two has
            the lower half.
        DROPOUT: as in ``dropout``.
    """
    t = DROPOUT[1].to(tl.int32)
    # lane >= t is max(lane, t - 1) - (t - 1) >= 1, and beside a threshold of 0 max(lane, 1) >= 1
    a = tl.abs(t - 1)
    b = tl.minimum(1 - t, 0)
    a, b = a * 0x10001, (b & 0xFFFF) * 0x10001
    return tl.inline_asm_elementwise(
        _FACTORS_F16 if p.dtype == tl.float16 else _FACTORS_BF16,
        "=r,r,r,r,r,r,r", [words, a, b], dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def times(p, factor):
    """p * factor."""
    return tl.inline_asm_elementwise(
        "mul.f16x2 $0, $1, $2;" if p.dtype == tl.float16 else "mul.bf16x2 $0, $1, $2;",
        "=r,r,r", [p, factor], dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def positive(p, dtype: tl.constexpr):
    """p, float32, rounded to ``dtype``; 0 where it is negative."""
    return tl.inline_asm_elementwise(
        "cvt.rn.relu.f16x2.f32 $0, $2, $1;" if dtype == tl.float16
        else "cvt.rn.relu.bf16x2.f32 $0, $2, $1;",
        "=r,f,f", [p], dtype=tl.float16 if dtype == tl.float16 else tl.bfloat16, is_pure=True,
        pack=2,
    )  # fmt: skip
