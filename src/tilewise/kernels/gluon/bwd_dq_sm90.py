"""The backward for Hopper in two passes, the second: gradients of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton import score, tiles
from .barriers import retire
from .dropout import kept
from .gradient import place_of_row, statistics_place
from .ptx import block_boundary, exp2, opaque_zero
from .rows import clear_slack, load_seen, store_tile
from .score import scores
from .softmax import hide, to_m
from .tma import async_load, store_wait
from .twins import twin

key_blocks = twin(tiles.key_blocks)
keys_of = twin(tiles.keys_of)
rows_of_sequence = twin(tiles.rows_of_sequence)
tile_of_program = twin(tiles.tile_of_program)
sees_a_key = twin(tiles.sees_a_key)
slope_of = twin(score.slope_of)

# TENSORS  (q, k, v, dout, dq): TMA descriptors of (batch, seqlen, heads, head_dim)
# BUFFERS  (q, dout, k, v): shared memory; q and dout hold 64 rows for each warpgroup, k is a ring
#          of two blocks, v of V_STAGES
# BARRIERS (q_full, dout_full, k_full, k_empty, v_full, v_empty, clear)
# SIZES and PACKED are as in ``gradient``.
# TILE     (BLOCK_D, BLOCK_DV, V_STAGES)
ROWS: gl.constexpr = gl.constexpr(64)  # of a warpgroup
KEYS: gl.constexpr = gl.constexpr(64)
BLOCK_M: gl.constexpr = gl.constexpr(128)


@gluon.jit
def _block(SIZES, PACKED):
    """The program's block of rows: head and sequence, and the keys [n0, n3) that it sees."""
    batch, nheads, _, seqlen_q, seqlen_k, total_q, total_k, num_m_blocks, section, left, right = (
        SIZES
    )
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = PACKED
    LONGEST_LAST: gl.constexpr = SIZES[10] is not None
    m_block, head_id = tile_of_program(
        gl.program_id(0), num_m_blocks, batch * nheads, section, LONGEST_LAST
    )
    batch_id = head_id // nheads
    start_q, length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, _, used_k = rows_of_sequence(batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k)
    m_start = m_block * BLOCK_M
    MASK = used_q, used_k, left, right
    n0, _, _, n3 = key_blocks(m_start, gl.minimum(m_start + BLOCK_M, used_q), MASK, KEYS)
    if m_start >= used_q:
        n3 = n0
    return (
        batch_id, head_id % nheads, m_start, start_q.to(gl.int32), length_q, used_q,
        start_k.to(gl.int32), used_k, n0, gl.maximum(n3, n0),
    )  # fmt: skip


@gluon.jit
def _values_of(ring, st, parity, V_STAGES: gl.constexpr):
    """The slot of V's ring, and the parity of its turn there, where K's are st and parity."""
    if V_STAGES == 2:
        return ring.index(st), parity
    else:
        return ring.index(st * 0), st


# ------------------------------------------------------------------------------- producer


@gluon.jit
def _produce(GIVEN, TILE: gl.constexpr):
    """One warp: Q and dO once, then K and V, block by block."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    V_STAGES: gl.constexpr = TILE[2]
    q_full, dout_full, k_full, k_empty, v_full, v_empty, clear = BARRIERS
    batch_id, head, m_start, start_q, _length_q, used_q, start_k, used_k, n0, n3 = _block(
        SIZES, PACKED
    )
    if n0 < n3:
        entry_q = batch_id
        entry_k = batch_id
        if PACKED[0] is not None:  # a packed tensor is one batch entry
            entry_q = 0
        if PACKED[1] is not None:
            entry_k = 0
        head_kv = head // SIZES[2]
        MASK = used_q, used_k, SIZES[9], SIZES[10]
        first, stop = keys_of(0, used_q, MASK)
        MAY_CLEAR: gl.constexpr = (
            PACKED[1] is not None or PACKED[3] is not None or SIZES[9] is not None
        )
        if PACKED[1] is None and PACKED[3] is None:  # past a dense tensor's end TMA fills with 0
            stop = gl.maximum(stop, n3)
        cleared = 0
        mbarrier.expect(q_full, BLOCK_M * BLOCK_D * 2)
        for w in gl.static_range(2):
            at = [entry_q, start_q + m_start + w * ROWS, head, 0]
            async_load(TENSORS[0], at, q_full, BUFFERS[0].index(w))
        cleared = load_seen(
            TENSORS[1], entry_k, start_k + n0, head_kv, BUFFERS[2].index(0), k_full.index(0), clear,
            cleared, n0, first, stop, MAY_CLEAR, KEYS, BLOCK_D,
        )  # fmt: skip
        mbarrier.expect(dout_full, BLOCK_M * BLOCK_DV * 2)
        for w in gl.static_range(2):
            at = [entry_q, start_q + m_start + w * ROWS, head, 0]
            async_load(TENSORS[3], at, dout_full, BUFFERS[1].index(w))
        it = 0
        for n_start in range(n0, n3, KEYS):
            vst = it % V_STAGES
            mbarrier.wait(v_empty.index(vst), it // V_STAGES & 1 ^ 1)
            cleared = load_seen(
                TENSORS[2], entry_k, start_k + n_start, head_kv, BUFFERS[3].index(vst),
                v_full.index(vst), clear, cleared, n_start, first, stop, MAY_CLEAR, KEYS, BLOCK_DV,
            )  # fmt: skip
            it += 1
            if n_start + KEYS < n3:
                st = it % 2
                mbarrier.wait(k_empty.index(st), it // 2 & 1 ^ 1)
                cleared = load_seen(
                    TENSORS[1], entry_k, start_k + n_start + KEYS, head_kv, BUFFERS[2].index(st),
                    k_full.index(st), clear, cleared, n_start + KEYS, first, stop, MAY_CLEAR, KEYS,
                    BLOCK_D,
                )  # fmt: skip


# ------------------------------------------------------------------------------- consumers


@gluon.jit
def _hand_back(BARRIERS, it, blocks, V_STAGES: gl.constexpr):
    """Passes over ``blocks`` blocks that only the other warpgroup's rows see."""
    k_full, k_empty, v_full, v_empty = BARRIERS[2:6]
    for _ in range(0, blocks):
        st = it & 1
        parity = it >> 1 & 1
        mbarrier.wait(k_full.index(st), parity)
        mbarrier.arrive(k_empty.index(st), count=1)
        full, v_parity = _values_of(v_full, st, parity, V_STAGES)
        empty, _ = _values_of(v_empty, st, parity, V_STAGES)
        mbarrier.wait(full, v_parity)
        mbarrier.arrive(empty, count=1)
        it += 1
    return it


@gluon.jit
def _step(
    x, dq, st, parity, more, cut, m_start, n_start, lse_i, minus_delta, BUFFERS, BARRIERS, SCORE,
    MASK, DROPOUT, CONSUMER: gl.constexpr, TILE: gl.constexpr, dtype: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """One block of keys, of which x = Q K^T is in flight: dS, and dQ += dS K."""
    BLOCK_D: gl.constexpr = TILE[0]
    BLOCK_DV: gl.constexpr = TILE[1]
    V_STAGES: gl.constexpr = TILE[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    k_full, k_empty, v_full, v_empty = BARRIERS[2:6]
    # bits that the loop carries: an index of `it` would be kept for each shared address
    other = st ^ 1
    other_parity = parity ^ st
    zero = opaque_zero(st)
    full, v_parity = _values_of(v_full, st, parity, V_STAGES)
    empty, _ = _values_of(v_empty, st, parity, V_STAGES)
    mbarrier.wait(full, v_parity)
    x = warpgroup_mma_wait(0, deps=[x])
    if V_STAGES == 2:
        v = BUFFERS[3].index(st).reshape([KEYS, BLOCK_DV])
    else:
        v = BUFFERS[3].index(zero).reshape([KEYS, BLOCK_DV])
    i = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    j = n_start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    s, dcap = scores(x, m_start, n_start, SCORE, MASK, False, APPROX_TANH)
    if cut:
        s = hide(s, i[:, None], j[None, :], MASK)
    # issued behind the branch: what follows is one basic block, where exponentials and this product
    # mix, and which the wait for it does not leave upwards
    do = BUFFERS[1].index(CONSUMER + zero).reshape([ROWS, BLOCK_DV])
    tile = gl.full([ROWS, KEYS], 0.0, gl.float32, s_layout)
    dp = warpgroup_mma(do, v.permute([1, 0]), tile, use_acc=False, is_async=True)
    p = exp2(to_m(s, SCORE) - lse_i[:, None]) * dcap
    block_boundary(MASK[1])
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(empty, count=1)
    if DROPOUT[0] is not None:
        dp = gl.where(kept(dp, DROPOUT, m_start, n_start), dp, 0.0)
    ds = (p * (dp + minus_delta[:, None])).to(dtype)
    ds = gl.convert_layout(ds, a_layout, assert_trivial=True)
    k = BUFFERS[2].index(st).reshape([KEYS, BLOCK_D])
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    # after the last block: a product of what is left there, which nobody reads
    mbarrier.wait(k_full.index(other), other_parity, pred=more)
    q = BUFFERS[0].index(CONSUMER + zero).reshape([ROWS, BLOCK_D])
    k_other = BUFFERS[2].index(other).reshape([KEYS, BLOCK_D])
    x = warpgroup_mma(q, k_other.permute([1, 0]), tile, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    mbarrier.arrive(k_empty.index(st), count=1)
    return x, dq, other, other_parity


@gluon.jit
def _consume(
    GIVEN, OPERANDS, RESULTS, CONSUMER: gl.constexpr, TILE: gl.constexpr, APPROX_TANH: gl.constexpr
):
    """A warpgroup: 64 rows of the block."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    V_STAGES: gl.constexpr = TILE[2]
    dtype: gl.constexpr = TENSORS[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    d_rows: gl.constexpr = gl.SliceLayout(1, d_layout)
    softmax_scale, grad_scale, softcap, alibi_slopes, slope_strides = OPERANDS[0:5]
    seed, dropout_threshold = OPERANDS[5:7]
    lse, delta, dq_rows, dq_strides = RESULTS
    batch_id, head, m_block, start_q, length_q, used_q, _start_k, used_k, first, stop = _block(
        SIZES, PACKED
    )
    m_start = m_block + CONSUMER * ROWS
    if m_block < length_q:
        MASK = used_q, used_k, SIZES[9], SIZES[10]
        n0, n1, n2, n3 = key_blocks(m_start, gl.minimum(m_start + ROWS, used_q), MASK, KEYS)
        if (n3 <= n0) | (m_start >= used_q):  # no row sees a key
            n0, n1, n2, n3 = stop, stop, stop, stop
        SCORE = (
            softmax_scale,
            softcap,
            None if alibi_slopes is None else slope_of(alibi_slopes, slope_strides, batch_id, head),
            None,
            None,
            0,
            0,
            None,
        )
        DROPOUT = seed, dropout_threshold, head, batch_id
        line, column, columns = statistics_place(batch_id, head, start_q, SIZES, PACKED)
        place = gl.cast(line, gl.int64) * columns + column + m_start
        r = place_of_row(gl.arange(0, ROWS, layout=rows))
        lse_i = gl.load(lse + place + r)
        minus_delta = gl.load(delta + place + r)
        dq = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, d_layout)
        if first < stop:
            it = _hand_back(BARRIERS, first * 0, (n0 - first) // KEYS, V_STAGES)
            if n0 < n3:
                st = it & 1
                parity = it >> 1 & 1
                mbarrier.wait(BARRIERS[0], 0)
                mbarrier.wait(BARRIERS[2].index(st), parity)
                q = BUFFERS[0].index(CONSUMER).reshape([ROWS, BLOCK_D])
                k = BUFFERS[2].index(st).reshape([KEYS, BLOCK_D])
                tile = gl.full([ROWS, KEYS], 0.0, gl.float32, s_layout)
                x = warpgroup_mma(q, k.permute([1, 0]), tile, use_acc=False, is_async=True)
                mbarrier.wait(BARRIERS[1], 0)
                for n_start in range(n0, n3, KEYS):
                    x, dq, st, parity = _step(
                        x, dq, st, parity, n_start + KEYS < n3, (n_start < n1) | (n_start >= n2),
                        m_start, n_start, lse_i, minus_delta, BUFFERS, BARRIERS, SCORE, MASK,
                        DROPOUT, CONSUMER, TILE, dtype, APPROX_TANH,
                    )  # fmt: skip
                x = warpgroup_mma_wait(0, deps=[x])
            _hand_back(BARRIERS, (n3 - first) // KEYS, (stop - n3) // KEYS, V_STAGES)
        # a row without keys may hold anything
        seen = sees_a_key(m_start + gl.arange(0, ROWS, layout=d_rows), MASK)
        dq = gl.where(seen[:, None], dq * grad_scale, 0.0).to(dtype)
        store_tile(
            TENSORS[4], dq_rows, dq_strides, dq, BUFFERS[0].index(CONSUMER), batch_id, start_q,
            m_start, length_q, head, PACKED[0] is not None,
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
        "num_m_blocks",
        "section",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def flash_bwd_dq_sm90_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    dq_rows,
    alibi_slopes,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    dq_strides,
    slope_strides,
    batch,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_m_blocks,
    section,
    softmax_scale,
    grad_scale,
    softcap,
    window_left,
    window_right,
    dropout_threshold,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):
    """Gradients of queries.

    Computes: dQ = grad_scale dS K, with dS as in ``bwd_dkdv_sm90``.
    Grid: flat over blocks of 128 rows, heads and sequences, longest first; a program has 64 rows
        for each of two warpgroups, and a producer warp that loads the keys they see by TMA, 64 at a
        time. dS stays in registers.
    Numerics: float32 accumulator; dS in the inputs' dtype. All is added in one order.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, its loops apart; warps specialised after
        Shah and others 2024, "FlashAttention-3".
    """
    TILE: gl.constexpr = (BLOCK_D, BLOCK_DV, V_STAGES)
    q_s = gl.allocate_shared_memory(q.dtype, [2, 1, ROWS, 1, BLOCK_D], q.layout)
    do_s = gl.allocate_shared_memory(q.dtype, [2, 1, ROWS, 1, BLOCK_DV], dout.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [2, 1, KEYS, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [V_STAGES, 1, KEYS, 1, BLOCK_DV], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    clear = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(dout_full, count=1)
    mbarrier.init(clear, count=1)
    for st in gl.static_range(2):
        mbarrier.init(k_full.index(st), count=1)
        mbarrier.init(k_empty.index(st), count=2)
    for st in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(st), count=1)
        mbarrier.init(v_empty.index(st), count=2)
    fence_async_shared()
    if cu_seqlens_q is not None:
        clear_slack(dq_rows, dq_strides, cu_seqlens_q, batch, total_q, nheads, dq_strides[2])

    TENSORS = q, k, v, dout, dq
    BUFFERS = q_s, do_s, k_s, v_s
    BARRIERS = q_full, dout_full, k_full, k_empty, v_full, v_empty, clear
    SIZES = (
        batch, nheads, group, seqlen_q, seqlen_k, total_q, total_k, num_m_blocks, section,
        window_left, window_right,
    )  # fmt: skip
    PACKED = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    OPERANDS = (
        softmax_scale, grad_scale, softcap, alibi_slopes, slope_strides, seed, dropout_threshold,
    )  # fmt: skip
    RESULTS = lse, delta, dq_rows, dq_strides
    given = TENSORS, BUFFERS, BARRIERS, SIZES, PACKED
    gl.warp_specialize(
        [
            (_consume, (given, OPERANDS, RESULTS, 0, TILE, APPROX_TANH)),
            (_consume, (given, OPERANDS, RESULTS, 1, TILE, APPROX_TANH)),
            (_produce, (given, TILE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    retire(BARRIERS)
