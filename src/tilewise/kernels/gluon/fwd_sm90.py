"""FlashAttention-3's forward for Hopper."""

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
from .dropout import keep_factors
from .ptx import block_boundary, exp2, rescale
from .rows import clear_slack, load_seen
from .schedule import announce, step_tile, told
from .score import scores
from .softmax import NEG_INF, first_softmax, hide, is_wild, softmax
from .tma import async_load, async_store, store_wait
from .twins import twin

key_blocks = twin(tiles.key_blocks)
keys_of = twin(tiles.keys_of)
rows_of_sequence = twin(tiles.rows_of_sequence)
statistics_of = twin(tiles.statistics_of)
tile_of_program = twin(tiles.tile_of_program)
slope_of = twin(score.slope_of)
from_natural = twin(score.from_natural)
to_lse = twin(score.to_lse)
times = twin(pairs.times)


# TENSORS  (q, k, v, out): TMA descriptors of (batch, seqlen, heads, head_dim)
# BUFFERS  (q, k, v, o, tile): shared memory; K and V are rings of STAGES tiles
# BARRIERS (q_full, q_empty, k_full, k_empty, v_full, v_empty, clear, tile_full, tile_empty)
# SIZES    (batch, nheads, group, seqlen_q, seqlen_k, total_q, total_k, num_m_blocks, section,
#           window_left, window_right, sectioned)
# PACKED   (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
# TILE     (CONSUMERS, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, SHARED_OUT, ONE_MASKED, PAIRED); PAIRED:
#          K and V of a block share their mbarriers, v_full is k_full and k_empty is v_empty


@gluon.jit
def _tile(tile, SIZES, PACKED, BLOCK_M: gl.constexpr):
    """What tile number ``tile`` is: batch_id, head, m_start; rows and keys of its sequence."""
    batch, nheads, _, seqlen_q, seqlen_k, total_q, total_k, num_m_blocks, section = SIZES[0:9]
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = PACKED
    LONGEST_LAST: gl.constexpr = SIZES[10] is not None
    m_block, head_id = tile_of_program(
        tile, num_m_blocks, batch * nheads, section, LONGEST_LAST, SIZES[11]
    )
    batch_id = head_id // nheads
    start_q, length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, _, used_k = rows_of_sequence(batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k)
    return (
        batch_id, head_id % nheads, m_block * BLOCK_M,
        start_q.to(gl.int32), length_q, used_q, start_k.to(gl.int32), used_k,
    )  # fmt: skip


@gluon.jit
def _range_of_tile(m_start, MASK, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Keys [n0, n3), whole blocks, at least one, that a tile's rows see."""
    n0, _, _, n3 = key_blocks(m_start, gl.minimum(m_start + BLOCK_M, MASK[0]), MASK, BLOCK_N)
    return n0, gl.maximum(n3, n0 + BLOCK_N)


@gluon.jit
def _stage(it, STAGES: gl.constexpr):
    """The ring's slot of the block number ``it``, and the parity of its turn there."""
    if STAGES & (STAGES - 1) == 0:  # bits, where signed division would take more
        return it & (STAGES - 1), (it & STAGES) // STAGES
    else:
        return it % STAGES, it // STAGES & 1


# ------------------------------------------------------------------------------- producer


@gluon.jit
def _next(tile, SIZES, PACKED, counter, num_tiles, FIRST: gl.constexpr, TILE: gl.constexpr):
    """The program's next tile that has rows, or num_tiles."""
    BLOCK_M: gl.constexpr = TILE[0] * 64
    if not FIRST:
        tile = step_tile(tile, counter, num_tiles)
    if PACKED[0] is not None:
        empty = tile < num_tiles
        while empty:
            found = _tile(tile, SIZES, PACKED, BLOCK_M)
            empty = found[2] >= found[4]
            if empty:
                tile = step_tile(tile, counter, num_tiles)
                empty = tile < num_tiles
    return gl.minimum(tile, num_tiles)


@gluon.jit
def _load(desc, batch_id, row, head, full, ring, st, BYTES: gl.constexpr):
    mbarrier.expect(full.index(st), BYTES)
    async_load(desc, [batch_id, row, head, 0], full.index(st), ring.index(st))


@gluon.jit
def _load_values(
    TENSORS, BUFFERS, BARRIERS, batch_id, head, start_k, n_start, it, cleared, first, stop,
    MAY_CLEAR: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """V of one block; keys that no row of the sequence sees may hold anything, and 0 times NaN is
    NaN, so that their rows are zeroed before the consumers are told."""
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_DV: gl.constexpr = TILE[3]
    st, parity = _stage(it, TILE[4])
    v_full, v_empty = BARRIERS[4], BARRIERS[5]
    mbarrier.wait(v_empty.index(st), parity ^ 1)
    return load_seen(
        TENSORS[2], batch_id, start_k + n_start, head, BUFFERS[2].index(st), v_full.index(st),
        BARRIERS[6], cleared, n_start, first, stop, MAY_CLEAR, BLOCK_N, BLOCK_DV,
    )  # fmt: skip


@gluon.jit
def _load_tile(GIVEN, tile, counter, num_tiles, it, turn, cleared, TILE: gl.constexpr):
    """Q of one tile and all K and V that its rows see, from the last block to the first:
    K_n, Q, K_n-1, V_n, K_n-2, V_n-1, ..., or, in pairs, K_n, Q, V_n, K_n-1, V_n-1, ... Before the
    last of them the next tile is chosen: late, so that it goes to a program that has time, and
    early enough not to be waited for."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    CONSUMERS: gl.constexpr = TILE[0]
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_D: gl.constexpr = TILE[2]
    BLOCK_M: gl.constexpr = CONSUMERS * 64
    STAGES: gl.constexpr = TILE[4]
    PAIRED: gl.constexpr = TILE[7]
    K_BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    q_full, q_empty, k_full, k_empty = BARRIERS[0], BARRIERS[1], BARRIERS[2], BARRIERS[3]
    batch_id, head, m_start, start_q, _length_q, used_q, start_k, used_k = _tile(
        tile, SIZES, PACKED, BLOCK_M
    )
    MASK = used_q, used_k, SIZES[9], SIZES[10]
    n0, n3 = _range_of_tile(m_start, MASK, BLOCK_M, BLOCK_N)
    # rows that are not the sequence's would have a say in when references of a warp's rows move
    OTHERS: gl.constexpr = PACKED[0] is not None or PACKED[2] is not None
    first, stop = keys_of(0, used_q, MASK)
    # past a dense tensor's end TMA fills with zeros by itself
    MAY_CLEAR: gl.constexpr = PACKED[1] is not None or PACKED[3] is not None or SIZES[9] is not None
    if PACKED[1] is None and PACKED[3] is None:
        stop = gl.maximum(stop, n3)
    entry_q = batch_id
    entry_k = batch_id
    if PACKED[0] is not None:  # a packed tensor is one batch entry
        entry_q = 0
    if PACKED[1] is not None:
        entry_k = 0
    head_kv = head // SIZES[2]

    st, parity = _stage(it, STAGES)
    mbarrier.wait(k_empty.index(st), parity ^ 1)
    _load(TENSORS[1], entry_k, start_k + n3 - BLOCK_N, head_kv, k_full, BUFFERS[1], st, K_BYTES)
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(w), turn & 1 ^ 1)
        row = m_start + w * 64
        cleared = load_seen(
            TENSORS[0], entry_q, start_q + row, head, BUFFERS[0].index(w), q_full.index(w),
            BARRIERS[6], cleared, row, 0, used_q, OTHERS, 64, BLOCK_D,
        )  # fmt: skip
    for n_start in range(n3 - 2 * BLOCK_N, n0 - BLOCK_N, -BLOCK_N):
        if PAIRED:
            cleared = _load_values(
                TENSORS, BUFFERS, BARRIERS, entry_k, head_kv, start_k, n_start + BLOCK_N, it,
                cleared, first, stop, MAY_CLEAR, TILE,
            )  # fmt: skip
        st, parity = _stage(it + 1, STAGES)
        mbarrier.wait(k_empty.index(st), parity ^ 1)
        _load(TENSORS[1], entry_k, start_k + n_start, head_kv, k_full, BUFFERS[1], st, K_BYTES)
        if not PAIRED:
            cleared = _load_values(
                TENSORS, BUFFERS, BARRIERS, entry_k, head_kv, start_k, n_start + BLOCK_N, it,
                cleared, first, stop, MAY_CLEAR, TILE,
            )  # fmt: skip
        it += 1
    tile = _next(tile, SIZES, PACKED, counter, num_tiles, False, TILE)
    cleared = _load_values(
        TENSORS, BUFFERS, BARRIERS, entry_k, head_kv, start_k, n0, it, cleared, first, stop,
        MAY_CLEAR, TILE,
    )  # fmt: skip
    return tile, it + 1, cleared


@gluon.jit
def _produce(GIVEN, counter, num_tiles, TILE: gl.constexpr):
    """One warp: chooses tiles and loads them."""
    BUFFERS, BARRIERS, SIZES, PACKED = GIVEN[1], GIVEN[2], GIVEN[3], GIVEN[4]
    it = 0  # blocks of keys so far
    turn = 0  # tiles so far
    cleared = 0  # blocks of values with rows zeroed so far
    tile = _next(gl.program_id(0), SIZES, PACKED, counter, num_tiles, True, TILE)
    while tile < num_tiles:
        announce(tile, BUFFERS[4], BARRIERS[7], BARRIERS[8], turn)
        tile, it, cleared = _load_tile(GIVEN, tile, counter, num_tiles, it, turn, cleared, TILE)
        turn += 1
    announce(num_tiles, BUFFERS[4], BARRIERS[7], BARRIERS[8], turn)


# ------------------------------------------------------------------------------- consumers


@gluon.jit
def _hand_back(BARRIERS, it, blocks, TILE: gl.constexpr):
    """Passes over ``blocks`` blocks that other rows of the tile see."""
    STAGES: gl.constexpr = TILE[4]
    for _ in range(0, blocks):
        st, parity = _stage(it, STAGES)
        mbarrier.wait(BARRIERS[2].index(st), parity)
        if not TILE[7]:
            mbarrier.arrive(BARRIERS[3].index(st), count=1)
        mbarrier.wait(BARRIERS[4].index(st), parity)
        mbarrier.arrive(BARRIERS[5].index(st), count=1)
        it += 1
    return it


@gluon.jit
def _hide(s, m_start, n_start, MASK):
    """s, -inf where the window or the end of the keys hides it."""
    layout: gl.constexpr = s.type.layout
    i = m_start + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout))
    j = n_start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    return hide(s, i[:, None], j[None, :], MASK)


@gluon.jit
def _step(
    q, BUFFERS, BARRIERS, p, o, alpha, m_i, l_i, wild, it, m_start, n_start, more, cut, SCORE, MASK,
    DROPOUT, MAY_CUT: gl.constexpr, CONSUMER: gl.constexpr, TILE: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """Algorithm 2 of FlashAttention-3 for one block: its Q K^T and softmax, and P V of the block
    before.

    What a warpgroup waits for is Q K^T, softmax, P in half precision, the next Q K^T; whatever else
    there is stands where one of its products runs.
    """
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_D: gl.constexpr = TILE[2]
    BLOCK_DV: gl.constexpr = TILE[3]
    STAGES: gl.constexpr = TILE[4]
    PAIRED: gl.constexpr = TILE[7]
    k_full, k_empty, v_full, v_empty = BARRIERS[2], BARRIERS[3], BARRIERS[4], BARRIERS[5]
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = o.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    st, _ = _stage(it, STAGES)
    before, before_parity = _stage(it - 1, STAGES)
    k = BUFFERS[1].index(st).reshape([BLOCK_N, BLOCK_D])  # waited for in the step before
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
    x = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    if not PAIRED:
        mbarrier.wait(v_full.index(before), before_parity)
    o = rescale(
        o, gl.convert_layout(alpha, gl.SliceLayout(1, o_layout), assert_trivial=True), BLOCK_DV
    )
    v = BUFFERS[2].index(before).reshape([BLOCK_N, BLOCK_DV])
    o = warpgroup_mma(p, v, o, is_async=True)
    after, after_parity = _stage(it + 1, STAGES)
    mbarrier.wait(k_full.index(after), after_parity, pred=more)
    x = warpgroup_mma_wait(1, deps=[x])
    if not PAIRED:
        mbarrier.arrive(k_empty.index(st), count=1)
    s, _ = scores(x, m_start, n_start, SCORE, MASK, False, APPROX_TANH)
    if MAY_CUT:
        if cut:
            s = _hide(s, m_start, n_start, MASK)
    p32, m_i, l_i, alpha = softmax(
        s, m_i, l_i, wild, SCORE, MASK[0], BLOCK_N, _register("large", CONSUMER), dtype,
        BLOCK_D > 64 and dtype != gl.float16,
    )  # fmt: skip
    p = p32.to(dtype)
    if DROPOUT[0] is not None:
        keep = keep_factors(p, DROPOUT, m_start, n_start)
    block_boundary(MASK[0])
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(before), count=1)
    if DROPOUT[0] is not None:
        p = times(p, keep)
    p = gl.convert_layout(p, p_layout, assert_trivial=True)
    return p, o, alpha, m_i, l_i


@gluon.constexpr_function
def _register(name, consumer):
    return f"{name}_{consumer}"


@gluon.jit
def _consume(
    GIVEN, OPERANDS, RESULTS, num_tiles,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, APPROX_TANH: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_D: gl.constexpr = TILE[2]
    BLOCK_DV: gl.constexpr = TILE[3]
    BLOCK_M: gl.constexpr = TILE[0] * 64
    STAGES: gl.constexpr = TILE[4]
    SHARED_OUT: gl.constexpr = TILE[5]
    ONE_MASKED: gl.constexpr = TILE[6]
    PAIRED: gl.constexpr = TILE[7]
    q_full, q_empty, k_full, k_empty = BARRIERS[0], BARRIERS[1], BARRIERS[2], BARRIERS[3]
    v_full, v_empty = BARRIERS[4], BARRIERS[5]
    dtype: gl.constexpr = TENSORS[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    softmax_scale, softcap, alibi_slopes, slope_strides, sink = OPERANDS[0:5]
    seed, dropout_threshold, keep_scale = OPERANDS[5:8]
    out, out_strides, lse, nheads, seqlen_q, total_q = RESULTS
    q = BUFFERS[0].index(CONSUMER).reshape([64, BLOCK_D])
    it = 0
    turn = 0
    tile = told(BUFFERS[4], BARRIERS[7], BARRIERS[8], turn)
    while tile < num_tiles:
        batch_id, head, m_tile, start_q, length_q, used_q, _start_k, used_k = _tile(
            tile, SIZES, PACKED, BLOCK_M
        )
        MASK = used_q, used_k, SIZES[9], SIZES[10]
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
        m_start = m_tile + CONSUMER * 64
        tile_n0, tile_n3 = _range_of_tile(m_tile, MASK, BLOCK_M, BLOCK_N)
        n0, n1, n2, n3 = key_blocks(m_start, gl.minimum(m_start + 64, used_q), MASK, BLOCK_N)
        if (n3 <= n0) | (m_start >= used_q):  # no row sees a key: one block, hidden or not stored
            n0 = tile_n0
            n1, n2, n3 = n0, n0, n0 + BLOCK_N
        it = _hand_back(BARRIERS, it, (tile_n3 - n3) // BLOCK_N, TILE)

        # the last block, masked or not; O is still 0
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        st, parity = _stage(it, STAGES)
        mbarrier.wait(k_full.index(st), parity)
        k = BUFFERS[1].index(st).reshape([BLOCK_N, BLOCK_D])
        zero = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
        x = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        if not PAIRED:
            mbarrier.arrive(k_empty.index(st), count=1)
        n_start = n3 - BLOCK_N
        s, _ = scores(x, m_start, n_start, SCORE, MASK, False, APPROX_TANH)
        if (n_start < n1) | (n_start >= n2):
            s = _hide(s, m_start, n_start, MASK)
        p32, m_i, l_i = first_softmax(s, SCORE, BLOCK_N, rows, dtype)
        p = p32.to(dtype)
        if seed is not None:
            p = times(p, keep_factors(p, DROPOUT, m_start, n_start))
        wild = 0  # narrow heads pay 1 % for the branch, and gain nothing
        if BLOCK_D >= 128:
            wild = is_wild(m_i, l_i, MASK[0], _register("wild", CONSUMER))
        p = gl.convert_layout(p, p_layout, assert_trivial=True)
        o = gl.full([64, BLOCK_DV], 0.0, gl.float32, o_layout)
        alpha = gl.full([64], 1.0, gl.float32, rows)
        it += 1
        st, parity = _stage(it, STAGES)
        mbarrier.wait(k_full.index(st), parity, pred=n_start > n0)

        MAY_CUT: gl.constexpr = not ONE_MASKED or SIZES[9] is not None
        for n in range(n_start - BLOCK_N, n0 - BLOCK_N, -BLOCK_N):
            p, o, alpha, m_i, l_i = _step(
                q, BUFFERS, BARRIERS, p, o, alpha, m_i, l_i, wild, it, m_start, n, n > n0,
                (n < n1) | (n >= n2), SCORE, MASK, DROPOUT, MAY_CUT, CONSUMER, TILE, APPROX_TANH,
            )  # fmt: skip
            it += 1

        # P V of the first block
        if not SHARED_OUT:
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        st, parity = _stage(it - 1, STAGES)
        if not PAIRED:
            mbarrier.wait(v_full.index(st), parity)
        o = o * gl.convert_layout(alpha, o_rows, assert_trivial=True)[:, None]
        v = BUFFERS[2].index(st).reshape([BLOCK_N, BLOCK_DV])
        o = warpgroup_mma(p, v, o, is_async=True)
        l_i = gl.convert_layout(gl.sum(l_i, 1), rows)
        if sink is not None:  # a key without a value
            logit = from_natural(gl.load(sink + head).to(gl.float32), SCORE)
            top = gl.maximum(m_i, logit)
            reference = gl.where(top == NEG_INF, 0.0, top)
            share = exp2(m_i - reference)
            l_i = l_i * share + exp2(logit - reference)
            m_i = top
        else:
            share = gl.full([64], 1.0, gl.float32, rows)
        i = m_start + gl.arange(0, 64, layout=rows)
        dead = (l_i == 0.0) | (i >= used_q)
        lse_i = gl.where(i < used_q, to_lse(m_i, l_i, SCORE), NEG_INF)
        lse_h = statistics_of(lse, batch_id, head, nheads, seqlen_q, total_q, start_q, PACKED[0])
        gl.store(lse_h + i, lse_i, mask=i < length_q)
        factor = gl.convert_layout(share * keep_scale / gl.where(dead, 1.0, l_i), o_rows)
        gone = gl.convert_layout(dead, o_rows)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(st), count=1)
        o = (gl.where(gone[:, None], 0.0, o) * factor[:, None]).to(dtype)

        # O by TMA, which stops at a dense tensor's end; a packed sequence's last rows by pointers
        if PACKED[0] is None:
            _store_tile(TENSORS, BUFFERS, o, batch_id, m_start, head, CONSUMER, TILE)
        elif m_start + 64 <= length_q:
            _store_tile(TENSORS, BUFFERS, o, 0, start_q + m_start, head, CONSUMER, TILE)
        else:
            r = m_start + gl.arange(0, 64, layout=o_rows)
            c = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, o_layout))
            row = (start_q + r).to(gl.int64) * out_strides[1]
            pointers = out + head * out_strides[2] + row[:, None] + c[None, :]
            gl.store(pointers, o, mask=(r < length_q)[:, None] & (c < TENSORS[3].shape[3])[None, :])
        if SHARED_OUT:
            store_wait(0)
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        it = _hand_back(BARRIERS, it, (n0 - tile_n0) // BLOCK_N, TILE)
        turn += 1
        tile = told(BUFFERS[4], BARRIERS[7], BARRIERS[8], turn)
    store_wait(0)


@gluon.jit
def _store_tile(TENSORS, BUFFERS, o, entry, row, head, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    staged = BUFFERS[3].index(CONSUMER)
    if not TILE[5]:
        store_wait(0)
    staged.reshape([64, TILE[3]]).store(o)
    fence_async_shared()
    async_store(TENSORS[3], [entry, row, head, 0], staged)


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
        "num_tiles",
        "section",
        "sectioned",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def flash_fwd_sm90_kernel(
    q,
    k,
    v,
    out,
    out_rows,
    lse,
    counter,
    sink,
    alibi_slopes,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    out_strides,
    slope_strides,
    batch,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_m_blocks,
    num_tiles,
    section,
    sectioned,
    softmax_scale,
    softcap,
    window_left,
    window_right,
    dropout_threshold,
    keep_scale,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_OUT: gl.constexpr,
    ONE_MASKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):
    """O and lse, in half precision.

    Computes: O = softmax(s) V with s as in ``kernels.triton.score``, and lse = log sum exp s.
    Grid: one program for each multiprocessor; a program's producer warp takes tiles of
        64 * CONSUMERS rows of a head, longest first, until there are none, and loads Q and, block
        by block from the last to the first, K and V by TMA into a ring of STAGES blocks. Each
        consumer warpgroup has 64 rows of the tile.
    Numerics: float32 scores, statistics and accumulator; P in the inputs' dtype relative to a
        reference that moves late, see ``softmax.py``. A row without keys: O = 0, lse = -inf.
    Source: Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao 2024, "FlashAttention-3", Algorithms 1
        and 2; the late reference is ours, after FlashAttention-4's.
    """
    # narrow heads' blocks are short, so that every barrier of a block counts
    PAIRED: gl.constexpr = BLOCK_D <= 64 and BLOCK_DV <= 64
    TILE: gl.constexpr = (
        CONSUMERS, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, SHARED_OUT, ONE_MASKED, PAIRED,
    )  # fmt: skip
    q_s = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 64, 1, BLOCK_D], q.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, BLOCK_N, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, BLOCK_N, 1, BLOCK_DV], v.layout)
    if SHARED_OUT:  # O leaves through Q's buffer
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 64, 1, BLOCK_DV], out.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if PAIRED:
        k_empty, v_full = v_empty, k_full
    else:
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    clear = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for st in gl.static_range(STAGES):
        mbarrier.init(k_full.index(st), count=2 if PAIRED else 1)
        mbarrier.init(v_empty.index(st), count=CONSUMERS)
        if not PAIRED:
            mbarrier.init(k_empty.index(st), count=CONSUMERS)
            mbarrier.init(v_full.index(st), count=1)
    mbarrier.init(clear, count=1)
    mbarrier.init(tile_full, count=1)
    mbarrier.init(tile_empty, count=CONSUMERS)
    fence_async_shared()
    if cu_seqlens_q is not None:
        clear_slack(out_rows, out_strides, cu_seqlens_q, batch, total_q, nheads, out_strides[2])

    TENSORS = q, k, v, out
    BUFFERS = q_s, k_s, v_s, o_s, tile_s
    BARRIERS = (
        q_full, q_empty, k_full, k_empty, v_full, v_empty, clear, tile_full, tile_empty,
    )  # fmt: skip
    SIZES = (
        batch, nheads, group, seqlen_q, seqlen_k, total_q, total_k, num_m_blocks, section,
        window_left, window_right, sectioned,
    )  # fmt: skip
    PACKED = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    OPERANDS = (
        softmax_scale, softcap, alibi_slopes, slope_strides, sink, seed, dropout_threshold,
        keep_scale,
    )  # fmt: skip
    RESULTS = out_rows, out_strides, lse, nheads, seqlen_q, total_q
    given = (TENSORS, BUFFERS, BARRIERS, SIZES, PACKED)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, OPERANDS, RESULTS, num_tiles, 0, TILE, APPROX_TANH)),
                (_consume, (given, OPERANDS, RESULTS, num_tiles, 1, TILE, APPROX_TANH)),
                (_produce, (given, counter, num_tiles, TILE)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (given, OPERANDS, RESULTS, num_tiles, 0, TILE, APPROX_TANH)),
                (_consume, (given, OPERANDS, RESULTS, num_tiles, 1, TILE, APPROX_TANH)),
                (_consume, (given, OPERANDS, RESULTS, num_tiles, 2, TILE, APPROX_TANH)),
                (_produce, (given, counter, num_tiles, TILE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    retire((q_full, q_empty, k_full, v_empty, clear, tile_full, tile_empty))
    if not PAIRED:
        retire((k_empty, v_full))
