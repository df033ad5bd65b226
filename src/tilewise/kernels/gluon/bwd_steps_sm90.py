"""A block of rows in the one-pass backward, by a warpgroup: its share of dK, dV and dQ.

TENSORS  (q, k, v, dout, lse, delta, dq, dk, dv): TMA descriptors; lse, delta and dq are the
         backward's own, in the orders that ``statistics`` and ``in_register_order`` say. delta
         is over dropout's scale, which dQ and dK take in the end. Without
         dq, which is None then, a step has dK and dV alone, and no warpgroup waits for the other
BUFFERS  (q, dout, k, v, lse, delta, ds, dq, tile): shared memory; q, dout, lse and delta are
         rings of blocks of rows, k two halves of 64 keys of two tiles, v of two (narrow heads) or
         one, ds the halves of two blocks of rows
BARRIERS (k_full, v_full, q_full, dout_full, empty, ds_full, clear, k_empty, tile_full,
          tile_empty, v_empty)
SIZES and PACKED are as in ``gradient``.
TILE     (BLOCK_D, STAGES, BY_MBARRIER, ORDER)
PLACE    (batch_id, head, start_q, n_start, keys, begin): where a warpgroup's tiles lie, K's
         halves in shared memory, and how far into its rows a tile begins
STATE    (x, dk, dv, st, parity, bit, dq_row, left): S^T in flight and the accumulators, where
         in the ring the next block of rows is, which of two it is for dS, where the latest dQ
         goes, how many blocks are left
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
from .dropout import keep_factors_transposed
from .gradient import statistics, statistics_place
from .ptx import bar_sync, exp2, opaque_zero
from .score import scores
from .softmax import hide, to_m
from .tma import async_add, store_wait
from .twins import twin

nonzero = twin(pairs.nonzero)
times = twin(pairs.times)

ROWS: gl.constexpr = gl.constexpr(64)
KEYS: gl.constexpr = gl.constexpr(128)


@gluon.jit
def place_of_dq(PLACE, m_start, GIVEN, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """Where a block's share of dQ begins in rows of 32."""
    line, first, columns = statistics_place(PLACE[0], PLACE[1], PLACE[2], GIVEN[3], GIVEN[4])
    return (line * columns + first + m_start) * (TILE[0] // 32) + CONSUMER * TILE[0]


@gluon.jit
def in_register_order(dq, WIDTH: gl.constexpr):
    """A WGMMA accumulator (64, WIDTH) as (2 WIDTH, 32): the same registers, named so that each
    thread has runs of 16 bytes and eight threads 128 of them; ``bwd_convert`` undoes it."""
    x = gl.reshape(
        dq, [4, 2, 8, WIDTH // 8, 4, 2]
    )  # warp, half, row, block of columns, pair, parity
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [2 * WIDTH, 32])


@gluon.jit
def _next(st, parity, STAGES: gl.constexpr):
    """The next place of the ring. The loop carries them: of a count there would be an index for
    each shared address."""
    if STAGES == 2:
        return st ^ 1, parity ^ st
    else:
        last = st == STAGES - 1
        return gl.where(last, 0, st + 1), gl.where(last, parity ^ 1, parity)


@gluon.jit
def rows_of_stage(BUFFERS, st, BLOCK_D: gl.constexpr):
    """Q and dO of a place of the ring."""
    q = BUFFERS[0].index(st).reshape([ROWS, BLOCK_D])
    return q, BUFFERS[1].index(st).reshape([ROWS, BLOCK_D])


@gluon.jit
def _start_of_dp(delta, DROPOUT, layout: gl.constexpr):
    """dP starts at -delta, unless a factor comes between them."""
    start = gl.full([64, ROWS], 0.0, gl.float32, layout)
    if DROPOUT[0] is None:
        start = gl.broadcast(statistics(delta, ROWS, layout), start)[0]
    return start


@gluon.jit
def _weights(
    x, lse, m_start, n_start, SCORE, MASK, CUT: gl.constexpr, layout: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """P^T and the factor of softcap."""
    s, dcap = scores(x, m_start, n_start, SCORE, MASK, True, APPROX_TANH)
    if CUT:
        i = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        j = n_start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        s = hide(s, i[None, :], j[:, None], MASK)
    return exp2(to_m(s, SCORE) - lse), dcap


@gluon.jit
def _kept(m_start, n_start, DROPOUT, layout: gl.constexpr, dtype: gl.constexpr):
    """Z^T: 1 where dropout keeps a weight, else 0; it needs no scores and is ready before them."""
    return keep_factors_transposed(
        gl.full([64, ROWS], 0.0, dtype, layout), DROPOUT, m_start, n_start
    )


@gluon.jit
def _ds(p, dp, dcap, delta, z, layout: gl.constexpr):
    """dS^T = P^T (Z^T dP^T - delta), times the factor of softcap."""
    if z is not None:
        dp = dp * z.to(gl.float32) + statistics(delta, ROWS, layout)
    return p * dp * dcap


@gluon.jit
def dq_of(ds_s, k_s, keys, bit, zero, CONSUMER: gl.constexpr, BLOCK_D: gl.constexpr):
    """dS K over both halves of the keys, in flight: half of dQ's columns for each warpgroup."""
    WIDTH: gl.constexpr = BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    k0 = k_s.index(keys + zero).reshape([64, BLOCK_D]).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    k1 = k_s.index(keys + 1 + zero).reshape([64, BLOCK_D]).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    nothing = gl.full([64, WIDTH], 0.0, gl.float32, layout)
    ds0 = ds_s.index(bit * 2).permute([1, 0])
    dq = warpgroup_mma(ds0, k0, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(ds_s.index(bit * 2 + 1).permute([1, 0]), k1, dq, is_async=True)


@gluon.jit
def wide_step(
    STATE, dq_next, m_start, GIVEN, PLACE, SCORE, MASK, DROPOUT, CUT: gl.constexpr,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """One block of rows, heads of more than 64. dQ of the block before is in shared memory."""
    x, dk, dv, st, parity, bit, dq_row, left = STATE
    TENSORS, BUFFERS, BARRIERS, _SIZES, _PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    DQ: gl.constexpr = TENSORS[6] is not None
    BY_MBARRIER: gl.constexpr = TILE[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    k_s, v_s, ds_s, dq_s = BUFFERS[2], BUFFERS[3], BUFFERS[6], BUFFERS[7]
    q_full, dout_full, empty, ds_full = BARRIERS[2], BARRIERS[3], BARRIERS[4], BARRIERS[5]
    dtype: gl.constexpr = TENSORS[0].dtype
    after, after_parity = _next(st, parity, TILE[1])
    q, do = rows_of_stage(BUFFERS, st, BLOCK_D)
    delta = BUFFERS[5].index(st)
    zero = opaque_zero(st)

    mbarrier.wait(dout_full.index(st), parity)
    start = _start_of_dp(delta, DROPOUT, s_layout)
    lse = statistics(BUFFERS[4].index(st), ROWS, s_layout)
    z = None
    if DROPOUT[0] is not None:
        z = _kept(m_start, PLACE[3], DROPOUT, s_layout, dtype)
    x = warpgroup_mma_wait(0, deps=[x])
    v = v_s.index(CONSUMER + zero).reshape([64, BLOCK_D])
    dp = warpgroup_mma(v, do.permute([1, 0]), start, use_acc=DROPOUT[0] is None, is_async=True)
    p, dcap = _weights(x, lse, m_start, PLACE[3], SCORE, MASK, CUT, s_layout, APPROX_TANH)
    kept = p.to(dtype)
    if z is not None:
        kept = times(kept, z)
    pz = gl.convert_layout(kept, a_layout, assert_trivial=True)
    dv = warpgroup_mma(pz, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if z is not None:
        z = nonzero(kept)  # what rounding made 0 counts as dropped, and would add next to nothing
    ds = _ds(p, dp, dcap, delta, z, s_layout).to(dtype)
    if DQ:
        ds_s.index(bit * 2 + CONSUMER).store(ds)
        fence_async_shared()  # for dS, and for dQ of the block before
        if BY_MBARRIER:
            mbarrier.arrive(ds_full, count=1)
            mbarrier.wait(ds_full, bit)
        else:
            bar_sync(8, 256)
        dq = dq_of(ds_s, k_s, PLACE[4], bit, zero, CONSUMER, BLOCK_D)
    ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
    dk = warpgroup_mma(ds_a, q, dk, is_async=True)
    if DQ:
        async_add(TENSORS[6], [dq_row, 0], dq_s.index(CONSUMER))
    # retires dV, whose operand P is in registers, before the next product is issued
    dv = warpgroup_mma_wait(3 if DQ else 1, deps=[dv])
    mbarrier.wait(q_full.index(after), after_parity, pred=left > 1)
    # after the last block: a product of what is left there, which nobody reads
    k = k_s.index(PLACE[4] + CONSUMER + zero).reshape([64, BLOCK_D])
    q_after, _do = rows_of_stage(BUFFERS, after, BLOCK_D)
    nothing = gl.full([64, ROWS], 0.0, gl.float32, s_layout)
    x = warpgroup_mma(k, q_after.permute([1, 0]), nothing, use_acc=False, is_async=True)
    if DQ:
        dk, dq = warpgroup_mma_wait(1, deps=[dk, dq])
        store_wait(0)
    else:
        dk = warpgroup_mma_wait(1, deps=[dk])
    mbarrier.arrive(empty.index(st), count=1)
    if DQ:
        dq_s.index(CONSUMER).store(in_register_order(dq, BLOCK_D // 2))
    return x, dk, dv, after, after_parity, bit ^ 1, dq_next, left - 1


@gluon.jit
def narrow_step(
    STATE, k_a, v_a, dq_next, m_start, GIVEN, PLACE, SCORE, MASK, DROPOUT,
    CUT: gl.constexpr, CONSUMER: gl.constexpr, TILE: gl.constexpr, APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """One block of rows, heads up to 64, which leave registers for K and V as operands and for dQ
    of the block before: its dS is in shared memory, so that no warpgroup waits for the other."""
    x, dk, dv, st, parity, bit, dq_row, left = STATE
    TENSORS, BUFFERS, BARRIERS, _SIZES, _PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    DQ: gl.constexpr = TENSORS[6] is not None
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    ds_s, dq_s = BUFFERS[6], BUFFERS[7]
    q_full, dout_full, empty, ds_full = BARRIERS[2], BARRIERS[3], BARRIERS[4], BARRIERS[5]
    dtype: gl.constexpr = TENSORS[0].dtype
    after, after_parity = _next(st, parity, TILE[1])
    q, do = rows_of_stage(BUFFERS, st, BLOCK_D)
    delta = BUFFERS[5].index(st)

    mbarrier.wait(dout_full.index(st), parity)
    start = _start_of_dp(delta, DROPOUT, s_layout)
    lse = statistics(BUFFERS[4].index(st), ROWS, s_layout)
    z = None
    if DROPOUT[0] is not None:
        z = _kept(m_start, PLACE[3], DROPOUT, s_layout, dtype)
    x = warpgroup_mma_wait(0, deps=[x])
    dp = warpgroup_mma(v_a, do.permute([1, 0]), start, use_acc=DROPOUT[0] is None, is_async=True)
    if DQ:
        mbarrier.wait(ds_full, bit)
        dq = dq_of(ds_s, BUFFERS[2], PLACE[4], bit ^ 1, opaque_zero(st), CONSUMER, BLOCK_D)
    p, dcap = _weights(x, lse, m_start, PLACE[3], SCORE, MASK, CUT, s_layout, APPROX_TANH)
    kept = p.to(dtype)
    if z is not None:
        kept = times(kept, z)
    pz = gl.convert_layout(kept, a_layout, assert_trivial=True)
    dv = warpgroup_mma(pz, do, dv, is_async=True)
    if DQ:
        dp, dq = warpgroup_mma_wait(1, deps=[dp, dq])
    else:
        dp = warpgroup_mma_wait(1, deps=[dp])
    ds = _ds(p, dp, dcap, delta, z, s_layout).to(dtype)
    if DQ:
        store_wait(0)
        dq_s.index(CONSUMER).store(in_register_order(dq, BLOCK_D // 2))
        ds_s.index(bit * 2 + CONSUMER).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full, count=1)
        async_add(TENSORS[6], [dq_row, 0], dq_s.index(CONSUMER))
    ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
    dk = warpgroup_mma(ds_a, q, dk, is_async=True)
    mbarrier.wait(q_full.index(after), after_parity, pred=left > 1)
    dv = warpgroup_mma_wait(1, deps=[dv])
    # after the last block: a product of what is left there, which nobody reads
    q_after, _do = rows_of_stage(BUFFERS, after, BLOCK_D)
    nothing = gl.full([64, ROWS], 0.0, gl.float32, s_layout)
    x = warpgroup_mma(k_a, q_after.permute([1, 0]), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma_wait(1, deps=[dk])
    mbarrier.arrive(empty.index(st), count=1)
    return x, dk, dv, after, after_parity, bit ^ 1, dq_next, left - 1
