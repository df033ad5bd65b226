"""The backward for Hopper in two passes, the first: gradients of keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton import pairs, score, tiles
from .barriers import retire
from .dropout import ds_of_marked, keep_factors_transposed
from .gradient import block_of_keys, statistics, statistics_place
from .ptx import bar_sync, exp2, opaque_zero
from .rows import clear_slack, load_seen, load_with_statistic, store_tile
from .score import scores
from .softmax import hide, to_m
from .tma import store_wait
from .twins import twin

keys_of = twin(tiles.keys_of)
rows_of = twin(tiles.rows_of)
slope_of = twin(score.slope_of)
times = twin(pairs.times)
turns = twin(pairs.turns)

# TENSORS  (q, k, v, dout, lse, delta, dk, dv): TMA descriptors; lse and delta are the backward's
#          own, in the order that ``statistics`` says
# BUFFERS  (q, dout, k, v, lse, delta, p): shared memory; all but k and v are rings of two blocks
# BARRIERS (k_full, v_full, q_full, q_empty, dout_full, dout_empty, p_full, p_empty, clear)
# SIZES and PACKED are as in ``gradient``.
# TILE     (BLOCK_D, BLOCK_DV)
KEYS: gl.constexpr = gl.constexpr(64)
ROWS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _next_block(m_start, head, m0, m3):
    """The block of rows after this one: of this head, or the first of the next."""
    m_start += ROWS
    if m_start == m3:
        m_start = m0
        head += 1
    return m_start, head


# ------------------------------------------------------------------------------- producer


@gluon.jit
def _produce(GIVEN, TILE: gl.constexpr):
    """One warp: K and V once, then Q and dO with their statistics, block by block."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    k_full, v_full, q_full, q_empty, dout_full, dout_empty = BARRIERS[0:6]
    clear = BARRIERS[8]
    (
        batch_id, head_kv, n_start, start_q, used_q, start_k, length_k, used_k, m0, _m1, _m2, m3,
    ) = block_of_keys(gl.program_id(0), SIZES, PACKED, ROWS, KEYS)  # fmt: skip
    if (n_start < length_k) & (m0 < m3):
        entry_q = batch_id
        entry_k = batch_id
        if PACKED[0] is not None:  # a packed tensor is one batch entry
            entry_q = 0
        if PACKED[1] is not None:
            entry_k = 0
        MASK = used_q, used_k, SIZES[9], SIZES[10]
        WINDOW: gl.constexpr = SIZES[9] is not None or SIZES[10] is not None
        CLEAR_K: gl.constexpr = PACKED[1] is not None or PACKED[3] is not None or WINDOW
        CLEAR_Q: gl.constexpr = PACKED[0] is not None or PACKED[2] is not None or WINDOW
        first_k, stop_k = keys_of(0, used_q, MASK)
        first_q, stop_q = rows_of(0, used_k, MASK)
        if PACKED[1] is None and PACKED[3] is None:  # past a dense tensor's end TMA fills with 0
            stop_k = gl.maximum(stop_k, n_start + KEYS)
        if PACKED[0] is None and PACKED[2] is None:
            stop_q = gl.maximum(stop_q, m3)
        cleared = 0
        cleared = load_seen(
            TENSORS[1], entry_k, start_k + n_start, head_kv, BUFFERS[2].index(0), k_full, clear,
            cleared, n_start, first_k, stop_k, CLEAR_K, KEYS, BLOCK_D,
        )  # fmt: skip
        cleared = load_seen(
            TENSORS[2], entry_k, start_k + n_start, head_kv, BUFFERS[3].index(0), v_full, clear,
            cleared, n_start, first_k, stop_k, CLEAR_K, KEYS, BLOCK_DV,
        )  # fmt: skip
        m_start = m0
        head = head_kv * SIZES[2]
        for it in range(0, (m3 - m0) // ROWS * SIZES[2]):
            line, first, _columns = statistics_place(batch_id, head, start_q, SIZES, PACKED)
            st = it % 2
            parity = it // 2 & 1
            mbarrier.wait(q_empty.index(st), parity ^ 1)
            cleared = load_with_statistic(
                TENSORS[0], TENSORS[4], entry_q, start_q + m_start, head, line, first + m_start,
                BUFFERS[0].index(st), BUFFERS[4].index(st), q_full.index(st), clear, cleared,
                m_start, first_q, stop_q, CLEAR_Q, ROWS, BLOCK_D,
            )  # fmt: skip
            mbarrier.wait(dout_empty.index(st), parity ^ 1)
            cleared = load_with_statistic(
                TENSORS[3], TENSORS[5], entry_q, start_q + m_start, head, line, first + m_start,
                BUFFERS[1].index(st), BUFFERS[5].index(st), dout_full.index(st), clear, cleared,
                m_start, first_q, stop_q, CLEAR_Q, ROWS, BLOCK_DV,
            )  # fmt: skip
            m_start, head = _next_block(m_start, head, m0, m3)


# ------------------------------------------------------------------------------- consumers


@gluon.jit
def _values_step(
    x, dv, st, parity, more, cut, m_start, n_start, BUFFERS, BARRIERS, SCORE, MASK, DROPOUT,
    TILE: gl.constexpr, dtype: gl.constexpr, APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """One block of rows, of which x = K Q^T is in flight: P, and dV += P^T dO."""
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    q_full, q_empty, dout_full, dout_empty, p_full, p_empty = BARRIERS[2:8]
    # bits that the loop carries: an index of `it` would be kept for each shared address
    other = st ^ 1
    other_parity = parity ^ st
    zero = opaque_zero(st)
    mbarrier.wait(p_empty.index(st), parity ^ 1)
    lse = statistics(BUFFERS[4].index(st), ROWS, s_layout)
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(q_empty.index(st), count=1)
    i = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(0, s_layout))
    j = n_start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
    s, dcap = scores(x, m_start, n_start, SCORE, MASK, True, APPROX_TANH)
    if cut:
        s = hide(s, i[None, :], j[:, None], MASK)
    p = exp2(to_m(s, SCORE) - lse)
    pz = p.to(dtype)
    g = (p * dcap).to(dtype)
    if DROPOUT[0] is not None:
        z = keep_factors_transposed(pz, DROPOUT, m_start, n_start)
        pz = times(pz, z)
        g = times(g, turns(z))
    # what dS needs: P times the softcap's derivative; what is dropped has a minus
    BUFFERS[6].index(st).store(g)
    mbarrier.arrive(p_full.index(st), count=1)

    mbarrier.wait(dout_full.index(st), parity)
    do = BUFFERS[1].index(st).reshape([ROWS, BLOCK_DV])
    pz = gl.convert_layout(pz, a_layout, assert_trivial=True)
    dv = warpgroup_mma(pz, do, dv, is_async=True)
    # after the last block: a product of what is left there, which nobody reads
    mbarrier.wait(q_full.index(other), other_parity, pred=more)
    k = BUFFERS[2].index(zero).reshape([KEYS, BLOCK_D])
    q = BUFFERS[0].index(other).reshape([ROWS, BLOCK_D])
    tile = gl.full([KEYS, ROWS], 0.0, gl.float32, s_layout)
    x = warpgroup_mma(k, q.permute([1, 0]), tile, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv])
    mbarrier.arrive(dout_empty.index(st), count=1)
    return x, dv, other, other_parity


@gluon.jit
def _values(GIVEN, OPERANDS, RESULTS, TILE: gl.constexpr, APPROX_TANH: gl.constexpr):
    """The first warpgroup: P, for both, and dV = P^T dO."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    dtype: gl.constexpr = TENSORS[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    softmax_scale, _, softcap, alibi_slopes, slope_strides = OPERANDS[0:5]
    seed, dropout_threshold, keep_scale = OPERANDS[5:8]
    (
        batch_id, head_kv, n_start, _start_q, used_q, start_k, length_k, used_k, m0, m1, m2, m3,
    ) = block_of_keys(gl.program_id(0), SIZES, PACKED, ROWS, KEYS)  # fmt: skip
    if n_start < length_k:
        dv = gl.full([KEYS, BLOCK_DV], 0.0, gl.float32, d_layout)
        if m0 < m3:
            MASK = used_q, used_k, SIZES[9], SIZES[10]
            blocks = (m3 - m0) // ROWS * SIZES[2]
            mbarrier.wait(BARRIERS[0], 0)
            mbarrier.wait(BARRIERS[2].index(0), 0)
            k = BUFFERS[2].index(0).reshape([KEYS, BLOCK_D])
            q = BUFFERS[0].index(0).reshape([ROWS, BLOCK_D])
            tile = gl.full([KEYS, ROWS], 0.0, gl.float32, s_layout)
            x = warpgroup_mma(k, q.permute([1, 0]), tile, use_acc=False, is_async=True)
            st = m0 * 0
            parity = m0 * 0
            m_start = m0
            head = head_kv * SIZES[2]
            for it in range(0, blocks):
                SCORE = (
                    softmax_scale,
                    softcap,
                    None
                    if alibi_slopes is None
                    else slope_of(alibi_slopes, slope_strides, batch_id, head),
                    None,
                    None,
                    0,
                    0,
                    None,
                )
                DROPOUT = seed, dropout_threshold, head, batch_id
                x, dv, st, parity = _values_step(
                    x, dv, st, parity, it + 1 < blocks, (m_start < m1) | (m_start >= m2), m_start,
                    n_start, BUFFERS, BARRIERS, SCORE, MASK, DROPOUT, TILE, dtype, APPROX_TANH,
                )  # fmt: skip
                m_start, head = _next_block(m_start, head, m0, m3)
            x = warpgroup_mma_wait(0, deps=[x])
        if seed is not None:
            dv = dv * keep_scale
        bar_sync(8, 256)  # the other warpgroup has read V
        store_tile(
            TENSORS[7], RESULTS[1], RESULTS[3], dv.to(dtype), BUFFERS[3].index(0), batch_id,
            start_k, n_start, length_k, head_kv, PACKED[1] is not None,
        )  # fmt: skip
        store_wait(0)


@gluon.jit
def _keys_step(
    dp, dk, st, parity, more, BUFFERS, BARRIERS, DROPOUT: gl.constexpr, TILE: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """One block of rows, of which dp = V dO^T is in flight: dS, and dK += dS^T Q."""
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    q_empty, dout_full, dout_empty, p_full, p_empty = BARRIERS[3:8]
    other = st ^ 1
    other_parity = parity ^ st
    zero = opaque_zero(st)
    if DROPOUT:
        minus_delta = statistics(BUFFERS[5].index(st), ROWS, s_layout)
    mbarrier.wait(p_full.index(st), parity)
    g = BUFFERS[6].index(st).load(s_layout).to(gl.float32)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(dout_empty.index(st), count=1)
    mbarrier.arrive(p_empty.index(st), count=1)
    if DROPOUT:  # the sign says what is dropped
        ds = ds_of_marked(g, dp, minus_delta)
    else:
        ds = g * dp
    ds = gl.convert_layout(ds.to(dtype), a_layout, assert_trivial=True)
    q = BUFFERS[0].index(st).reshape([ROWS, BLOCK_D])
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    mbarrier.wait(dout_full.index(other), other_parity, pred=more)
    dp = _issue_dp(BUFFERS, other, zero, DROPOUT, BLOCK_DV)
    dk = warpgroup_mma_wait(1, deps=[dk])
    mbarrier.arrive(q_empty.index(st), count=1)
    return dp, dk, other, other_parity


@gluon.jit
def _issue_dp(BUFFERS, st, zero, DROPOUT: gl.constexpr, BLOCK_DV: gl.constexpr):
    """V dO^T of one block, from -delta on, unless a factor comes between them."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    v = BUFFERS[3].index(zero).reshape([KEYS, BLOCK_DV])
    do = BUFFERS[1].index(st).reshape([ROWS, BLOCK_DV])
    tile = gl.full([KEYS, ROWS], 0.0, gl.float32, s_layout)
    if not DROPOUT:
        tile = statistics(BUFFERS[5].index(st), ROWS, s_layout) + tile
    return warpgroup_mma(v, do.permute([1, 0]), tile, use_acc=not DROPOUT, is_async=True)


@gluon.jit
def _keys(GIVEN, OPERANDS, RESULTS, TILE: gl.constexpr):
    """The second warpgroup: dS, and dK = grad_scale dS^T Q."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    dtype: gl.constexpr = TENSORS[0].dtype
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    grad_scale = OPERANDS[1]
    DROPOUT: gl.constexpr = OPERANDS[5] is not None
    (
        batch_id, head_kv, n_start, _start_q, _used_q, start_k, length_k, _used_k, m0, _m1, _m2, m3,
    ) = block_of_keys(gl.program_id(0), SIZES, PACKED, ROWS, KEYS)  # fmt: skip
    if n_start < length_k:
        dk = gl.full([KEYS, BLOCK_D], 0.0, gl.float32, d_layout)
        if m0 < m3:
            blocks = (m3 - m0) // ROWS * SIZES[2]
            mbarrier.wait(BARRIERS[1], 0)
            mbarrier.wait(BARRIERS[4].index(0), 0)
            st = m0 * 0
            parity = m0 * 0
            dp = _issue_dp(BUFFERS, st, st, DROPOUT, BLOCK_DV)
            for it in range(0, blocks):
                dp, dk, st, parity = _keys_step(
                    dp, dk, st, parity, it + 1 < blocks, BUFFERS, BARRIERS, DROPOUT, TILE,
                    dtype,
                )  # fmt: skip
            dp = warpgroup_mma_wait(0, deps=[dp])
        bar_sync(8, 256)  # the other warpgroup has read K
        dk = (dk * grad_scale).to(dtype)
        store_tile(
            TENSORS[6], RESULTS[0], RESULTS[2], dk, BUFFERS[2].index(0), batch_id, start_k, n_start,
            length_k, head_kv, PACKED[1] is not None,
        )  # fmt: skip
        store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "batch",
        "nheads",
        "group",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
        "num_n_blocks",
        "section",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def flash_bwd_dkdv_sm90_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    dk_rows,
    dv_rows,
    alibi_slopes,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    dk_strides,
    dv_strides,
    slope_strides,
    batch,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_n_blocks,
    section,
    softmax_scale,
    grad_scale,
    softcap,
    window_left,
    window_right,
    dropout_threshold,
    keep_scale,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):
    """Gradients of keys and values.

    Computes: dV = (P Z)^T dO and dK = grad_scale dS^T Q, with P = exp(s - lse), Z = keep /
        (1 - dropout_p), dS = P (dO V^T Z - delta) dcap, on transposed tiles.
    Grid: flat over blocks of 64 keys, key heads and sequences; a program takes the query heads of
        its group and their blocks of 64 rows, which a producer warp loads by TMA. Of two warpgroups
        one has S, P and dV, the other dP, dS and dK, so that each has one accumulator; P goes from
        one to the other through shared memory.
    Numerics: float32 accumulators; P and dS in the inputs' dtype, and dS from that P. All is added
        in one order.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, its loops apart; the warpgroups' jobs are
        ours, after Shah and others 2024, "FlashAttention-3".
    """
    TILE: gl.constexpr = (BLOCK_D, BLOCK_DV)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q.dtype)
    q_s = gl.allocate_shared_memory(q.dtype, [2, 1, ROWS, 1, BLOCK_D], q.layout)
    do_s = gl.allocate_shared_memory(q.dtype, [2, 1, ROWS, 1, BLOCK_DV], dout.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [1, 1, KEYS, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [1, 1, KEYS, 1, BLOCK_DV], v.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, 1, ROWS], lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, 1, ROWS], delta.layout)
    p_s = gl.allocate_shared_memory(q.dtype, [2, KEYS, ROWS], p_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    clear = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dout_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(clear, count=1)
    for st in gl.static_range(2):
        mbarrier.init(q_full.index(st), count=1)
        mbarrier.init(q_empty.index(st), count=2)
        mbarrier.init(dout_full.index(st), count=1)
        mbarrier.init(dout_empty.index(st), count=2)
        mbarrier.init(p_full.index(st), count=1)
        mbarrier.init(p_empty.index(st), count=1)
    fence_async_shared()
    if cu_seqlens_k is not None:
        nheads_kv = nheads // group
        clear_slack(dk_rows, dk_strides, cu_seqlens_k, batch, total_k, nheads_kv, dk_strides[2])
        clear_slack(dv_rows, dv_strides, cu_seqlens_k, batch, total_k, nheads_kv, dv_strides[2])

    TENSORS = q, k, v, dout, lse, delta, dk, dv
    BUFFERS = q_s, do_s, k_s, v_s, lse_s, delta_s, p_s
    BARRIERS = (
        k_full, v_full, q_full, q_empty, dout_full, dout_empty, p_full, p_empty, clear,
    )  # fmt: skip
    SIZES = (
        batch, nheads, group, seqlen_q, seqlen_k, total_q, total_k, num_n_blocks, section,
        window_left, window_right,
    )  # fmt: skip
    PACKED = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    OPERANDS = (
        softmax_scale, grad_scale, softcap, alibi_slopes, slope_strides, seed, dropout_threshold,
        keep_scale,
    )  # fmt: skip
    RESULTS = dk_rows, dv_rows, dk_strides, dv_strides
    given = TENSORS, BUFFERS, BARRIERS, SIZES, PACKED
    gl.warp_specialize(
        [
            (_values, (given, OPERANDS, RESULTS, TILE, APPROX_TANH)),
            (_keys, (given, OPERANDS, RESULTS, TILE)),
            (_produce, (given, TILE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    retire(BARRIERS)
