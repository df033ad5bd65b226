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
_TURNS = "{ .reg .b32 two, one; mov.b32 two, 0x40004000; mov.b32 one, "
_TURNS_F16: tl.constexpr = tl.constexpr(_TURNS + "0xBC00BC00; fma.rn.f16x2 $0, $1, two, one; }")
_TURNS_BF16: tl.constexpr = tl.constexpr(_TURNS + "0xBF80BF80; fma.rn.bf16x2 $0, $1, two, one; }")
# Bit 13 of a half is 1 in a factor of 1, in both dtypes: p | ~(factor moved up) & the sign's bit.
_MARKED: tl.constexpr = tl.constexpr(
    "{ .reg .b32 y; shl.b32 y, $4, 18; lop3.b32 $0, $2, y, 0x80000000, 0xF2; "
    "shl.b32 y, $4, 2; lop3.b32 $1, $3, y, 0x80000000, 0xF2; }"
)
_TURNS = "{ .reg .b32 two, one; mov.b32 two, 0x40004000; mov.b32 one, "
_TURNS_F16: tl.constexpr = tl.constexpr(_TURNS + "0xBC00BC00; fma.rn.f16x2 $0, $1, two, one; }")
_TURNS_BF16: tl.constexpr = tl.constexpr(_TURNS + "0xBF80BF80; fma.rn.bf16x2 $0, $1, two, one; }")
_NONZERO = "{ .reg .b32 zero; mov.b32 zero, 0; set.neu."
_NONZERO_F16: tl.constexpr = tl.constexpr(_NONZERO + "f16x2.f16x2 $0, $1, zero; }")
_NONZERO_BF16: tl.constexpr = tl.constexpr(_NONZERO + "bf16x2.bf16x2 $0, $1, zero; }")


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
def turns(factor):
    """1 where factor is 1, -1 where it is 0."""
    return tl.inline_asm_elementwise(
        _TURNS_F16 if factor.dtype == tl.float16 else _TURNS_BF16,
        "=r,r", [factor], dtype=factor.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def marked(p, factor):
    """p >= 0 in float32, with a minus where factor is 0: P and what dropout leaves of it in the
    registers of P."""
    return tl.inline_asm_elementwise(
        _MARKED, "=&f,=&f,f,f,r", [p, factor], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def positive(p, dtype: tl.constexpr):
    """p, float32, rounded to ``dtype``, and 0 where it is negative."""
    return tl.inline_asm_elementwise(
        "cvt.rn.relu.f16x2.f32 $0, $2, $1;" if dtype == tl.float16
        else "cvt.rn.relu.bf16x2.f32 $0, $2, $1;",
        "=r,f,f", [p], dtype=tl.float16 if dtype == tl.float16 else tl.bfloat16, is_pure=True,
        pack=2,
    )  # fmt: skip
