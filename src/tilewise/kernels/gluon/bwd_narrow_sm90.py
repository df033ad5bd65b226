"""The one-pass backward of heads up to 64 wide: a block of rows, and a tile's beginning and end.

They leave registers for K and V as operands and for dQ of the block before, whose dS is in shared
memory, so that no warpgroup waits for the other.

STATE (x, dk, dv, st, parity, bit, dq_row, left): S^T in flight and the accumulators, where in the
      ring the next block of rows is, which of two it is for dS, where dQ of the block before goes,
      how many blocks are left
HALF  (k, v): the warpgroup's keys as operands in registers

The rest is as ``bwd_steps_sm90`` says.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton import pairs
from .bwd_steps_sm90 import (
    ROWS,
    dq_of,
    in_register_order,
    issue_s,
    kept_by_dropout,
    next_stage,
    place_of_dq,
    rows_of_stage,
    start_of_dp,
    weights,
)
from .gradient import statistics
from .ptx import opaque_zero
from .tma import async_add, store_wait
from .twins import twin

times = twin(pairs.times)


@gluon.jit
def narrow_begin(
    x, dk, dv, st, parity, bit, m_start, left, GIVEN, PLACE, CONSUMER: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """A tile's first block of rows, of which S^T is in flight: the first step adds zeros to it in
    place of dQ of a block before."""
    plain: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = 0
    if GIVEN[0][6] is not None:
        nothing = gl.full([64, ROWS], 0.0, GIVEN[0][0].dtype, plain)
        GIVEN[1][6].index(bit * 2 + CONSUMER).store(nothing)
        fence_async_shared()
        mbarrier.arrive(GIVEN[2][5], count=1)
        bit ^= 1
        row = place_of_dq(PLACE, m_start, GIVEN, CONSUMER, TILE)
    return x, dk, dv, st, parity, bit, row, left


@gluon.jit
def narrow_step(
    STATE, m_start, HALF, GIVEN, PLACE, CUT: gl.constexpr, CONSUMER: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """One block of rows."""
    x, dk, dv, st, parity, bit, dq_row, left = STATE
    TENSORS, BUFFERS, BARRIERS = GIVEN[0:3]
    BLOCK_D: gl.constexpr = TILE[0]
    DQ: gl.constexpr = TENSORS[6] is not None
    DROPOUT: gl.constexpr = GIVEN[5][5] is not None
    dtype: gl.constexpr = TENSORS[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    ds_s, dq_s = BUFFERS[6], BUFFERS[7]
    q_full, dout_full, empty, ds_full = BARRIERS[2], BARRIERS[3], BARRIERS[4], BARRIERS[5]
    after, after_parity = next_stage(st, parity, TILE[1])
    q, do = rows_of_stage(BUFFERS, st, BLOCK_D)
    delta = BUFFERS[5].index(st)

    mbarrier.wait(dout_full.index(st), parity)
    start = start_of_dp(delta, GIVEN, s_layout)
    lse = statistics(BUFFERS[4].index(st), ROWS, s_layout)
    if DROPOUT:
        z = kept_by_dropout(m_start, GIVEN, PLACE, s_layout)
    x = warpgroup_mma_wait(0, deps=[x])
    dp = warpgroup_mma(HALF[1], do.permute([1, 0]), start, use_acc=not DROPOUT, is_async=True)
    if DQ:
        mbarrier.wait(ds_full, bit)
        dq = dq_of(ds_s, BUFFERS[2], PLACE[4], bit ^ 1, opaque_zero(st), CONSUMER, BLOCK_D)
    p, dcap = weights(x, lse, m_start, GIVEN, PLACE, CUT, TILE[2])
    kept = p.to(dtype)
    if DROPOUT:
        kept = times(kept, z)
    p_a = gl.convert_layout(kept, a_layout, assert_trivial=True)
    dv = warpgroup_mma(p_a, do, dv, is_async=True)
    if DQ:
        dp, dq = warpgroup_mma_wait(1, deps=[dp, dq])
    else:
        dp = warpgroup_mma_wait(1, deps=[dp])
    if DROPOUT:
        dp = dp * z.to(gl.float32) + statistics(delta, ROWS, s_layout)
    ds = (p * dp * dcap).to(dtype)
    if DQ:
        store_wait(0)
        dq_s.index(CONSUMER).store(in_register_order(dq, BLOCK_D // 2))
        ds_s.index(bit * 2 + CONSUMER).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full, count=1)
        async_add(TENSORS[6], [dq_row, 0], dq_s.index(CONSUMER))
        dq_row = place_of_dq(PLACE, m_start, GIVEN, CONSUMER, TILE)
    ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
    dk = warpgroup_mma(ds_a, q, dk, is_async=True)
    mbarrier.wait(q_full.index(after), after_parity, pred=left > 1)
    dv = warpgroup_mma_wait(1, deps=[dv])
    # after the last block: a product of what is left there, which nobody reads
    x = issue_s(HALF[0], after, GIVEN, TILE)
    dk = warpgroup_mma_wait(1, deps=[dk])
    mbarrier.arrive(empty.index(st), count=1)
    return x, dk, dv, after, after_parity, bit ^ 1, dq_row, left - 1


@gluon.jit
def narrow_end(STATE, GIVEN, PLACE, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """dQ of the last block of rows."""
    x, dk, dv, st, parity, bit, dq_row, _left = STATE
    BUFFERS = GIVEN[1]
    x, dk = warpgroup_mma_wait(0, deps=[x, dk])
    if GIVEN[0][6] is not None:
        mbarrier.wait(GIVEN[2][5], bit)
        dq = dq_of(
            BUFFERS[6], BUFFERS[2], PLACE[4], bit ^ 1, opaque_zero(st), CONSUMER, TILE[0]
        )  # fmt: skip
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_wait(0)
        BUFFERS[7].index(CONSUMER).store(in_register_order(dq, TILE[0] // 2))
        fence_async_shared()
        async_add(GIVEN[0][6], [dq_row, 0], BUFFERS[7].index(CONSUMER))
    return dk, dv, st, parity, bit
