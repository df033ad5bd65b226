"""What Gluon has no word for, in PTX: named barriers, warp votes, and fences against reordering.

Two compilers reorder what a pipeline has put in order. LLVM moves pure arithmetic between loop and
epilogue; asm that is not pure stays between the other asm of its kind (WGMMA, barriers). ptxas
moves a wait for WGMMA, which has no operands, above arithmetic of its basic block, so that softmax
and P V would follow one another; it does not move it across a branch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# One element for each thread of a partition of four warps: asm on it is emitted once.
_EACH_THREAD: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _bar(barrier, threads):
    return f"bar.sync {barrier}, {threads}; mov.u32 $0, $1;"


@gluon.jit
def bar_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrives at a named barrier and waits there for ``THREADS`` threads."""
    x = gl.arange(0, 128, layout=_EACH_THREAD)
    gl.inline_asm_elementwise(
        _bar(BARRIER, THREADS), "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def block_boundary(length):
    """Ends a basic block: a loop on ``length`` >= 0 that is never entered, and that ptxas cannot
    know is not."""
    x = gl.full([128], length, gl.int32, _EACH_THREAD)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, -12345; never: @p nanosleep.u32 20; "
        "@p bra.uni never; mov.u32 $0, $1; }",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def exp2(x):
    """2^x with a relative error of 2^-22 and subnormal results as 0: one instruction."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def exp2_subnormal(x):
    """2^x with subnormal results: a few instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(x):
    """log2 of x with an absolute error of 2^-22, subnormal x as 0: one instruction."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _rescale(n):
    # of a thread's n elements, two lie in its first row, two in its second, and so on
    asm = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; "
        f"setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra same; "
    )
    for i in range(n):
        asm += f"mul.f32 ${i}, ${i}, ${2 * n + i % 4 // 2 * 2}; "
    return asm + "same: }"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(o, alpha, WIDTH: gl.constexpr):
    """o * alpha[:, None] for a WGMMA accumulator of 64 rows; a warp whose factors are all 1 skips
    it."""
    N: gl.constexpr = WIDTH // 2  # elements of a thread
    return gl.inline_asm_elementwise(
        _rescale(N), _rescale_constraints(N), [o, alpha[:, None]],
        dtype=gl.float32, is_pure=False, pack=N,
    )  # fmt: skip


@gluon.constexpr_function
def _vote(register, exponent):
    limit = f"0f{127 + exponent << 23:08X}"  # a NaN counts as above it
    return (
        f".reg .b32 {register}; {{ .reg .pred p, q; setp.gtu.f32 p, $0, {limit}; "
        f"setp.gtu.f32 q, $1, {limit}; or.pred p, p, q; "
        f"vote.sync.ballot.b32 {register}, p, 0xffffffff; }}"
    )


@gluon.constexpr_function
def _read(register):
    return f"mov.b32 $0, {register};"


@gluon.jit
def any_above(x, EXPONENT: gl.constexpr, scalar, REGISTER: gl.constexpr):
    """x, (64, 4), unchanged, and whether a thread of the warp holds a value above 2^EXPONENT or a
    NaN.

    The second is a scalar that is equal in a warp and may differ between warps, on which code may
    branch that knows only its own warp. ``REGISTER`` names it, once in a kernel; ``scalar`` is any.
    """
    x = gl.inline_asm_elementwise(
        _vote(REGISTER, EXPONENT), "=f,=f,0,1", [x], dtype=gl.float32, is_pure=False, pack=2
    )
    found = gl.inline_asm_elementwise(
        _read(REGISTER), "=r,r", [scalar], dtype=gl.int32, is_pure=False, pack=1
    )
    return x, found


@gluon.jit
def opaque_zero(x):
    """0, which the compilers cannot know: added to an index of shared memory it keeps them from
    computing descriptors once and keeping them in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque(x):
    """x, a float32 number, which the compilers cannot know to be x: what one side of a branch
    computes with it is not computed before the branch because the other computes it with x."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )
