"""The one-pass backward of heads wider than 64: a block of rows, and a tile's beginning and end.

A step computes P^T of the next block of rows, so that exponentials run beside dK and the other
warpgroup has until dQ to write its half of dS. dQ is in flight when a step ends.

STATE (p, kept, dq, dk, dv, st, parity, bit, dq_row, row): P^T of the block of rows, with softcap
      times its factor, and P^T in half precision where that is not the same number; dQ of the block
      before, in flight; the accumulators; where in the ring the block is, which of two it is for
      dS; where dQ of the block before goes, and where the block's own will go

The rest is as ``bwd_steps_sm90`` says.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .bwd_steps_sm90 import (
    ROWS,
    dq_of,
    in_register_order,
    issue_s,
    kept_by_dropout,
    keys_of_warpgroup,
    next_stage,
    place_of_dq,
    rows_of_stage,
    start_of_dp,
    weights,
)
from .dropout import ds_of_marked, marked, positive
from .gradient import statistics
from .ptx import block_boundary, opaque_zero
from .tma import async_add, store_wait


@gluon.jit
def _begun(x, lse, m_start, GIVEN, PLACE, cut, TILE: gl.constexpr):
    """What a step begins with: p and kept."""
    p, dcap = weights(x, lse, m_start, GIVEN, PLACE, cut, TILE[2])
    if GIVEN[5][5] is not None:
        layout: gl.constexpr = x.type.layout
        p = marked(p, kept_by_dropout(m_start, GIVEN, PLACE, layout))
    kept = 0
    if GIVEN[5][2] is not None:
        kept = _rounded(p, GIVEN)
    return p * dcap, kept


@gluon.jit
def _rounded(p, GIVEN):
    """What dropout leaves of P, in the inputs' dtype."""
    dtype: gl.constexpr = GIVEN[0][0].dtype
    if GIVEN[5][5] is None:
        kept = p.to(dtype)
    else:
        kept = positive(p, dtype)
    return kept


@gluon.jit
def wide_begin(
    x, dk, dv, st, parity, bit, m_start, cut, GIVEN, PLACE, CONSUMER: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """A tile's first block of rows, of which S^T is in flight: the first step adds zeros to it in
    place of dQ of a block before."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE[0] // 2, 16])
    lse = statistics(GIVEN[1][4].index(st), ROWS, s_layout)
    dq = 0
    row = 0
    if GIVEN[0][6] is not None:
        dq = warpgroup_mma_init(gl.full([64, TILE[0] // 2], 0.0, gl.float32, dq_layout))
        row = place_of_dq(PLACE, m_start, GIVEN, CONSUMER, TILE)
    x = warpgroup_mma_wait(0, deps=[x])
    p, kept = _begun(x, lse, m_start, GIVEN, PLACE, cut, TILE)
    return p, kept, dq, dk, dv, st, parity, bit, row, row


@gluon.jit
def wide_step(
    STATE, m_next, GIVEN, PLACE, MORE: gl.constexpr, CUT: gl.constexpr, CONSUMER: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """One block of rows and, where there are MORE, P^T of the next one, at ``m_next``."""
    p, kept, dq, dk, dv, st, parity, bit, dq_row, row = STATE
    TENSORS, BUFFERS, BARRIERS = GIVEN[0:3]
    BLOCK_D: gl.constexpr = TILE[0]
    DQ: gl.constexpr = TENSORS[6] is not None
    DROPOUT: gl.constexpr = GIVEN[5][5] is not None
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    v_s, ds_s, dq_s = BUFFERS[3], BUFFERS[6], BUFFERS[7]
    q_full, dout_full, empty, ds_full = BARRIERS[2], BARRIERS[3], BARRIERS[4], BARRIERS[5]
    after, after_parity = next_stage(st, parity, TILE[1])
    q, do = rows_of_stage(BUFFERS, st, BLOCK_D)
    delta = BUFFERS[5].index(st)
    zero = opaque_zero(st)

    mbarrier.wait(dout_full.index(st), parity)
    if DQ:
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_wait(0)
        # before dP takes registers
        dq_s.index(CONSUMER).store(in_register_order(dq, BLOCK_D // 2))
    start = start_of_dp(delta, GIVEN, s_layout)
    v = v_s.index(CONSUMER + zero).reshape([64, BLOCK_D])
    dp = warpgroup_mma(v, do.permute([1, 0]), start, use_acc=not DROPOUT, is_async=True)
    p_half = kept
    if GIVEN[5][2] is None:
        p_half = _rounded(p, GIVEN)
    p_a = gl.convert_layout(p_half, a_layout, assert_trivial=True)
    dv = warpgroup_mma(p_a, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if DROPOUT:
        ds = ds_of_marked(p, dp, statistics(delta, ROWS, s_layout))
    else:
        ds = p * dp
    ds = ds.to(TENSORS[0].dtype)
    if DQ:
        ds_s.index(bit * 2 + CONSUMER).store(ds)
        fence_async_shared()  # for dS, and for dQ of the block before
        mbarrier.arrive(ds_full, count=1)  # or ptxas moves the wait for dV above dS
    ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
    dv = warpgroup_mma_wait(0, deps=[dv])  # its operand P leaves its registers
    if MORE:
        mbarrier.wait(q_full.index(after), after_parity)
        k = keys_of_warpgroup(PLACE[4] + zero, GIVEN, CONSUMER, TILE)
        x = issue_s(k, after, GIVEN, TILE)
    dk = warpgroup_mma(ds_a, q, dk, is_async=True)
    if DQ:
        async_add(TENSORS[6], [dq_row, 0], dq_s.index(CONSUMER))
        dq_row = row
    if MORE:
        lse = statistics(BUFFERS[4].index(after), ROWS, s_layout)
        x = warpgroup_mma_wait(1, deps=[x])
        p, kept = _begun(x, lse, m_next, GIVEN, PLACE, CUT, TILE)
    if DQ:
        if MORE:
            row = place_of_dq(PLACE, m_next, GIVEN, CONSUMER, TILE)
        mbarrier.wait(ds_full, bit)  # a branch, which keeps the exponentials above it
        dq = dq_of(ds_s, BUFFERS[2], PLACE[4], bit, zero, CONSUMER, BLOCK_D)
        dk = warpgroup_mma_wait(2, deps=[dk])
    else:
        block_boundary(st)
        dk = warpgroup_mma_wait(0, deps=[dk])
    mbarrier.arrive(empty.index(st), count=1)
    return p, kept, dq, dk, dv, after, after_parity, bit ^ 1, dq_row, row


@gluon.jit
def wide_end(STATE, GIVEN, PLACE, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """The last block of rows, and its dQ."""
    STATE = wide_step(STATE, 0, GIVEN, PLACE, False, False, CONSUMER, TILE)
    _p, _kept, dq, dk, dv, st, parity, bit, dq_row, _row = STATE
    if GIVEN[0][6] is not None:
        dq_s = GIVEN[1][7].index(CONSUMER)
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_wait(0)
        dq_s.store(in_register_order(dq, TILE[0] // 2))
        fence_async_shared()
        async_add(GIVEN[0][6], [dq_row, 0], dq_s)
    return dk, dv, st, parity, bit
