"""The backward for Hopper in one pass: dK, dV and dQ from one recomputation of P; without dQ the
first of two passes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from ..triton import tiles
from .barriers import retire
from .bwd_narrow_sm90 import narrow_begin, narrow_end, narrow_step
from .bwd_steps_sm90 import KEYS, ROWS, issue_s, keys_of_warpgroup, slope_at
from .bwd_wide_sm90 import wide_begin, wide_end, wide_step
from .gradient import block_of_keys, statistics_place
from .ptx import bar_sync
from .rows import clear_slack, load_clear, load_with_statistic, store_tile
from .schedule import announce, step_tile, told
from .tma import async_load, store_wait
from .twins import twin

keys_of = twin(tiles.keys_of)
rows_of = twin(tiles.rows_of)

# TENSORS, BUFFERS and the like are as ``bwd_steps_sm90`` says.
LEAD: gl.constexpr = gl.constexpr(4)  # blocks of rows to go when the next tile is chosen


@gluon.constexpr_function
def _value_stages(block_d):
    """Of how many tiles shared memory has room for V."""
    return 2 if block_d == 64 else 1


# ------------------------------------------------------------------------------- producer


@gluon.jit
def _next_tile(tile, SIZES, PACKED, counter, num_tiles, FIRST: gl.constexpr):
    """The program's next block of keys that there is, or num_tiles."""
    if not FIRST:
        tile = step_tile(tile, counter, num_tiles)
    if PACKED[1] is not None:
        empty = tile < num_tiles
        while empty:
            found = block_of_keys(tile, SIZES, PACKED, ROWS, KEYS)
            empty = found[2] >= found[6]
            if empty:
                tile = step_tile(tile, counter, num_tiles)
                empty = tile < num_tiles
    return gl.minimum(tile, num_tiles)


@gluon.jit
def _produce(GIVEN, counter, num_tiles, TILE: gl.constexpr):
    """One warp: chooses tiles and loads them."""
    BUFFERS, BARRIERS, SIZES, PACKED = GIVEN[1], GIVEN[2], GIVEN[3], GIVEN[4]
    it = 0  # blocks of rows so far
    turn = 0  # tiles so far
    cleared = 0  # tiles with rows zeroed so far
    tile = _next_tile(gl.program_id(0), SIZES, PACKED, counter, num_tiles, True)
    while tile < num_tiles:
        announce(tile, BUFFERS[8], BARRIERS[8], BARRIERS[9], turn)
        tile, it, cleared = _load_tile(GIVEN, tile, counter, num_tiles, it, turn, cleared, TILE)
        turn += 1
    announce(num_tiles, BUFFERS[8], BARRIERS[8], BARRIERS[9], turn)


@gluon.jit
def _load_tile(GIVEN, tile, counter, num_tiles, it, turn, cleared, TILE: gl.constexpr):
    """Q, dO and their statistics, block by block; K and V after the first one, each as soon as the
    tile before has left room for it. Some blocks before the end the next tile is chosen: late, so
    that it goes to a program that has time, and early enough not to be waited for."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN[0:5]
    BLOCK_D: gl.constexpr = TILE[0]
    VALUE_STAGES: gl.constexpr = _value_stages(BLOCK_D)
    k_full, v_full, clear = BARRIERS[0], BARRIERS[1], BARRIERS[6]
    k_empty, v_empty = BARRIERS[7], BARRIERS[10]
    FOUND = block_of_keys(tile, SIZES, PACKED, ROWS, KEYS)
    batch_id, head_kv, n_start, _start_q, used_q, start_k, _length_k, used_k, m0, _m1, _m2, m3 = (
        FOUND
    )
    entry_k = batch_id
    if PACKED[1] is not None:
        entry_k = 0
    MASK = used_q, used_k, SIZES[9], SIZES[10]
    MAY_CLEAR: gl.constexpr = (
        PACKED[0] is not None
        or PACKED[2] is not None
        or (PACKED[3] is not None or SIZES[9] is not None or SIZES[10] is not None)
    )
    first, stop = keys_of(0, used_q, MASK)
    if PACKED[1] is None and PACKED[3] is None:  # past a dense tensor's end TMA fills with 0
        stop = gl.maximum(stop, n_start + KEYS)
    slot = turn % 2
    value_slot = turn % VALUE_STAGES
    begin = _begin(n_start, m3 - m0, TILE)
    blocks = (m3 - m0) // ROWS
    steps = blocks * SIZES[2]
    chosen = gl.minimum(gl.maximum(steps - LEAD, 1), steps)  # how many blocks before the next tile
    if steps > 0:
        cleared = _load_blocks(GIVEN, FOUND, begin, 0, 1, it, cleared, MAY_CLEAR, TILE)
    mbarrier.wait(k_empty.index(slot), turn // 2 & 1 ^ 1)
    if steps > 0:
        cleared = _load_keys(
            TENSORS[1], entry_k, start_k, head_kv, n_start, BUFFERS[2], slot, k_full.index(slot),
            clear, cleared, first, stop, MAY_CLEAR, BLOCK_D,
        )  # fmt: skip
    mbarrier.wait(v_empty.index(value_slot), turn // VALUE_STAGES & 1 ^ 1)
    if steps > 0:
        cleared = _load_keys(
            TENSORS[2], entry_k, start_k, head_kv, n_start, BUFFERS[3], value_slot,
            v_full.index(value_slot), clear, cleared, first, stop, MAY_CLEAR, BLOCK_D,
        )  # fmt: skip
    else:  # the gradients are 0
        mbarrier.arrive(k_full.index(slot), count=1)
        mbarrier.arrive(v_full.index(value_slot), count=1)
    cleared = _load_blocks(GIVEN, FOUND, begin, 1, chosen, it, cleared, MAY_CLEAR, TILE)
    tile = _next_tile(tile, SIZES, PACKED, counter, num_tiles, False)
    cleared = _load_blocks(GIVEN, FOUND, begin, chosen, steps, it, cleared, MAY_CLEAR, TILE)
    return tile, it + gl.maximum(steps, 0), cleared


@gluon.jit
def _load_blocks(
    GIVEN, FOUND, begin, n_from, n_to, it, cleared, MAY_CLEAR: gl.constexpr, TILE: gl.constexpr
):
    """A tile's blocks of rows [n_from, n_to), counted over the heads of its group."""
    GROUP = GIVEN[3][2]
    head_kv, m0, m3 = FOUND[1], FOUND[8], FOUND[11]
    blocks = (m3 - m0) // ROWS
    for n in range(n_from, n_to):
        m_start = _turned(m0 + n % blocks * ROWS, begin, m0, m3, TILE)
        cleared = _load_rows(
            GIVEN, FOUND, head_kv * GROUP + n // blocks, m_start, it + n, cleared, MAY_CLEAR, TILE
        )
    return cleared


@gluon.jit
def _load_rows(
    GIVEN, FOUND, head, m_start, it, cleared, MAY_CLEAR: gl.constexpr, TILE: gl.constexpr
):
    """One block of rows, the program's number ``it``."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED = GIVEN[0:5]
    BLOCK_D: gl.constexpr = TILE[0]
    STAGES: gl.constexpr = TILE[1]
    q_full, dout_full, empty, clear = BARRIERS[2], BARRIERS[3], BARRIERS[4], BARRIERS[6]
    batch_id, start_q, used_q, used_k, m3 = FOUND[0], FOUND[3], FOUND[4], FOUND[7], FOUND[11]
    entry = batch_id
    if PACKED[0] is not None:
        entry = 0
    first_q, stop_q = rows_of(0, used_k, (used_q, used_k, SIZES[9], SIZES[10]))
    if PACKED[0] is None and PACKED[2] is None:  # past a dense tensor's end TMA fills with 0
        stop_q = gl.maximum(stop_q, m3)
    line, first, _columns = statistics_place(batch_id, head, start_q, SIZES, PACKED)
    st = it % STAGES
    mbarrier.wait(empty.index(st), it // STAGES & 1 ^ 1)
    cleared = load_with_statistic(
        TENSORS[0], TENSORS[4], entry, start_q + m_start, head, line, first + m_start,
        BUFFERS[0].index(st), BUFFERS[4].index(st), q_full.index(st), clear, cleared, m_start,
        first_q, stop_q, MAY_CLEAR, ROWS, BLOCK_D,
    )  # fmt: skip
    return load_with_statistic(
        TENSORS[3], TENSORS[5], entry, start_q + m_start, head, line, first + m_start,
        BUFFERS[1].index(st), BUFFERS[5].index(st), dout_full.index(st), clear, cleared, m_start,
        first_q, stop_q, MAY_CLEAR, ROWS, BLOCK_D,
    )  # fmt: skip


@gluon.jit
def _load_keys(
    desc, entry, start, head, n_start, halves, slot, full, clear, cleared, first, stop,
    MAY_CLEAR: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """K or V of the block. Keys that no row sees may hold anything, and 0 times NaN is NaN."""
    if MAY_CLEAR:
        whole = (n_start >= first) & (n_start + KEYS <= stop)
    else:
        whole: gl.constexpr = True
    if whole:
        mbarrier.expect(full, KEYS * BLOCK_D * 2)
        for w in gl.static_range(2):
            row = start + n_start + w * 64
            async_load(desc, [entry, row, head, 0], full, halves.index(slot * 2 + w))
    elif MAY_CLEAR:
        for w in gl.static_range(2):
            row = start + n_start + w * 64
            load_clear(
                desc, entry, row, head, halves.index(slot * 2 + w), clear, cleared + w,
                n_start + w * 64, first, stop, 64, BLOCK_D,
            )  # fmt: skip
        mbarrier.arrive(full, count=1)
        cleared += 2
    return cleared


@gluon.constexpr_function
def _order(block_d, left, right, softcap, without_dq):
    """In which order a tile's blocks of rows follow: as they stand (0), from one of its own and
    round (1), from the last one (2)."""
    if block_d == 64:
        return 0 if left or right or without_dq else 1
    return 2 if right and not (left or softcap) else 0  # softcap spills too much


@gluon.jit
def _begin(n_start, rows, TILE: gl.constexpr):
    """How far into its rows a tile begins, to go round once where TILE says so. Without a mask all
    programs of a head add to the same rows of dQ at the same time, which narrow heads wait for."""
    if TILE[3] == 1:
        return n_start % gl.maximum(rows, ROWS)
    else:
        return 0


@gluon.jit
def _turned(m_start, begin, m_from, m_to, TILE: gl.constexpr):
    """The rows in m_start's place of those of [m_from, m_to), which are begun at ``begin``, or at
    the end."""
    if TILE[3] == 1:
        m_start += begin
        m_start = gl.where(m_start < m_to, m_start, m_start - (m_to - m_from))
    elif TILE[3] == 2:
        m_start = m_to - ROWS - (m_start - m_from)
    return m_start


# ------------------------------------------------------------------------------- consumers


@gluon.jit
def _visit(
    STATE, m_from, m_to, skip, HALF, GIVEN, PLACE, CUT: gl.constexpr, CONSUMER: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """A step for each block of rows of [m_from, m_to), without ``skip`` rows. A loop with a branch
    for those that are cut would be slower: ptxas orders nothing across a branch."""
    state = STATE
    for m in range(m_from + skip, m_to, ROWS):
        m_start = _turned(m, PLACE[5], m_from, m_to, TILE)
        if TILE[0] == 64:
            state = narrow_step(state, m_start, HALF, GIVEN, PLACE, CUT, CONSUMER, TILE)
        else:
            state = wide_step(state, m_start, GIVEN, PLACE, True, CUT, CONSUMER, TILE)
    return state


@gluon.jit
def _free_tile_before(GIVEN, turn, TILE: gl.constexpr):
    """Gives the producer the memory through which dK and dV of the tile before have left."""
    store_wait(0)
    mbarrier.arrive(GIVEN[2][7].index(turn % 2 ^ 1), count=1, pred=turn > 0)
    if TILE[0] == 64:
        mbarrier.arrive(GIVEN[2][10].index(turn % 2 ^ 1), count=1, pred=turn > 0)


@gluon.jit
def _columns(x, HALF: gl.constexpr, layout: gl.constexpr):
    """Columns 64 HALF to 64 HALF + 63 of a tile of 128."""
    halves = gl.split(gl.permute(gl.reshape(x, [64, 2, 64]), [0, 2, 1]))
    return gl.convert_layout(halves[HALF], layout, assert_trivial=True)


@gluon.jit
def _consume(GIVEN, RESULTS, num_tiles, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup: 64 keys of each tile."""
    TENSORS, BUFFERS, BARRIERS, SIZES, PACKED, OPERANDS = GIVEN
    BLOCK_D: gl.constexpr = TILE[0]
    NARROW: gl.constexpr = BLOCK_D == 64
    dtype: gl.constexpr = TENSORS[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    dk_rows, dv_rows, dk_strides, dv_strides = RESULTS
    k_s, v_s, ds_s = BUFFERS[2], BUFFERS[3], BUFFERS[6]
    k_full, v_full, v_empty = BARRIERS[0], BARRIERS[1], BARRIERS[10]
    VALUE_STAGES: gl.constexpr = _value_stages(BLOCK_D)
    CUT_ON_THE_RIGHT: gl.constexpr = 2 if TILE[3] == 2 else 0  # where in a tile such blocks are
    st, parity, bit = 0, 0, 0
    if NARROW:
        bit = 1
    turn = 0
    tile = told(BUFFERS[8], BARRIERS[8], BARRIERS[9], turn)
    while tile < num_tiles:
        (
            batch_id, head_kv, n_block, start_q, used_q, start_k, length_k, used_k, m0, m1, m2, m3,
        ) = block_of_keys(tile, SIZES, PACKED, ROWS, KEYS)  # fmt: skip
        n_start = n_block + CONSUMER * 64
        MASK = used_q, used_k, SIZES[9], SIZES[10]
        begin = _begin(n_block, m3 - m0, TILE)
        slot = turn % 2
        keys = slot * 2
        value_slot = turn % VALUE_STAGES
        value_phase = turn // VALUE_STAGES & 1
        dk = gl.full([64, BLOCK_D], 0.0, gl.float32, d_layout)
        dv = gl.full([64, BLOCK_D], 0.0, gl.float32, d_layout)
        mbarrier.wait(k_full.index(slot), turn // 2 & 1)
        if NARROW:
            mbarrier.wait(v_full.index(value_slot), value_phase)
        if m0 < m3:
            first = head_kv * SIZES[2]
            FIRST = (
                batch_id, first, start_q, n_start, keys, begin,
                slope_at(OPERANDS, batch_id, first), MASK,
            )  # fmt: skip
            m_start = _turned(m0, begin, m0, m3, TILE)
            whole = m3
            if SIZES[9] is not None:
                whole = m2
            mbarrier.wait(BARRIERS[2].index(st), parity)
            k = keys_of_warpgroup(keys, GIVEN, CONSUMER, TILE)
            x = issue_s(k, st, GIVEN, TILE)
            _free_tile_before(GIVEN, turn, TILE)
            HALF = None
            if NARROW:
                v = v_s.index(keys + CONSUMER).reshape([64, BLOCK_D])
                HALF = k.load(a_layout), v.load(a_layout)
                left = (m3 - m0) // ROWS * SIZES[2]
                state = narrow_begin(
                    x, dk, dv, st, parity, bit, m_start, left, GIVEN, FIRST, CONSUMER, TILE
                )
            else:
                cut = (m_start < m1) | (m_start >= whole)
                state = wide_begin(
                    x, dk, dv, st, parity, bit, m_start, cut, GIVEN, FIRST, CONSUMER, TILE
                )
                mbarrier.wait(v_full.index(0), value_phase)
            for head in range(first, first + SIZES[2]):
                PLACE = (
                    batch_id, head, start_q, n_start, keys, begin,
                    slope_at(OPERANDS, batch_id, head), MASK,
                )  # fmt: skip
                # wide heads: P^T of a tile's first block is there, and the end takes a step more
                skip = 0 if NARROW else gl.where(head == first, ROWS, 0)
                for part in gl.static_range(3):
                    if part == 1:
                        m_from, m_to = m1, whole
                    elif part == CUT_ON_THE_RIGHT:
                        m_from, m_to = m0, m1
                    else:
                        m_from, m_to = whole, m3
                    if part == 1 or part == CUT_ON_THE_RIGHT or SIZES[9] is not None:
                        state = _visit(
                            state, m_from, m_to, skip, HALF, GIVEN, PLACE, part != 1, CONSUMER,
                            TILE,
                        )  # fmt: skip
                        skip = 0 if NARROW else gl.where(m_from < m_to, 0, skip)
            if NARROW:
                dk, dv, st, parity, bit = narrow_end(state, GIVEN, FIRST, CONSUMER, TILE)
            else:
                dk, dv, st, parity, bit = wide_end(state, GIVEN, FIRST, CONSUMER, TILE)
                mbarrier.arrive(v_empty.index(0), count=1)
        else:
            _free_tile_before(GIVEN, turn, TILE)
            if not NARROW:
                mbarrier.wait(v_full.index(0), value_phase)
                mbarrier.arrive(v_empty.index(0), count=1)
        dk = dk * OPERANDS[1]
        if OPERANDS[5] is not None:
            dv = dv * OPERANDS[7]
        VARLEN: gl.constexpr = PACKED[1] is not None
        bar_sync(9, 256)  # the other warpgroup has read K and dS too
        if NARROW:  # dV leaves through this warpgroup's half of V, which no other reads
            store_tile(
                TENSORS[8], dv_rows, dv_strides, dv.to(dtype), v_s.index(keys + CONSUMER), batch_id,
                start_k, n_start, length_k, head_kv, VARLEN,
            )  # fmt: skip
        else:  # V's memory is the next tile's by now: through dS
            for half in gl.static_range(2):
                store_tile(
                    TENSORS[8], dv_rows, dv_strides, _columns(dv.to(dtype), half, s_layout),
                    ds_s.index(half * 2 + CONSUMER).reshape([1, 64, 1, 64]), batch_id, start_k,
                    n_start, length_k, head_kv, VARLEN, half * 64,
                )  # fmt: skip
        store_tile(
            TENSORS[7], dk_rows, dk_strides, dk.to(dtype), k_s.index(keys + CONSUMER), batch_id,
            start_k, n_start, length_k, head_kv, VARLEN,
        )  # fmt: skip
        turn += 1
        tile = told(BUFFERS[8], BARRIERS[8], BARRIERS[9], turn)
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
        "num_tiles",
        "section",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def flash_bwd_sm90_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    dk,
    dv,
    counter,
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
    num_tiles,
    section,
    softmax_scale,
    grad_scale,
    softcap,
    window_left,
    window_right,
    dropout_threshold,
    keep_scale,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    APPROX_TANH: gl.constexpr,
):
    """Gradients of keys and values and, where ``dq`` is given, of queries in float32.

    Computes: dV = (P Z)^T dO, dK = grad_scale dS^T Q and dQ = dS K, with P = exp(s - lse), Z the
        dropout mask over 1 - dropout_p and dS = P (dO V^T Z - delta), each tile recomputed once for
        all three. dS is made with a mask of 0 and 1 and a delta times 1 - dropout_p: grad_scale
        makes up for it.
    Grid: a program for each multiprocessor, which takes tiles: 128 keys of a key head of a
        sequence, 64 for each of two warpgroups, with the query heads of its group and their blocks
        of rows, which a producer warp loads by TMA.
    Numerics: float32 accumulators; P and dS in the inputs' dtype. dQ is added to float32 memory,
        zero before, by TMA in the order of arrival: its last bits differ from run to run.
    Source: Shah and others 2024, "FlashAttention-3", Algorithm 3; dQ by TMA reduction as there.
    """
    ORDER: gl.constexpr = _order(
        BLOCK_D, window_left is not None, window_right is not None, softcap is not None, dq is None
    )
    TILE: gl.constexpr = (BLOCK_D, STAGES, APPROX_TANH, ORDER)
    VALUE_STAGES: gl.constexpr = _value_stages(BLOCK_D)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROWS], q.dtype)
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, ROWS, 1, BLOCK_D], q.layout)
    do_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, ROWS, 1, BLOCK_D], dout.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [4, 1, 64, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [2 * VALUE_STAGES, 1, 64, 1, BLOCK_D], v.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], delta.layout)
    ds_s = gl.allocate_shared_memory(q.dtype, [4, 64, ROWS], ds_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    clear = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    told_s = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(clear, count=1)
    mbarrier.init(tile_full, count=1)
    mbarrier.init(tile_empty, count=2)
    for slot in gl.static_range(2):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
    for slot in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    mbarrier.init(ds_full, count=2)
    for st in gl.static_range(STAGES):
        mbarrier.init(q_full.index(st), count=1)
        mbarrier.init(dout_full.index(st), count=1)
        mbarrier.init(empty.index(st), count=2)
    fence_async_shared()

    if cu_seqlens_k is not None:
        nheads_kv = nheads // group
        clear_slack(dk_rows, dk_strides, cu_seqlens_k, batch, total_k, nheads_kv, dk_strides[2])
        clear_slack(dv_rows, dv_strides, cu_seqlens_k, batch, total_k, nheads_kv, dv_strides[2])

    TENSORS = q, k, v, dout, lse, delta, dq, dk, dv
    BUFFERS = (
        q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s,
        None if dq is None
        else gl.allocate_shared_memory(gl.float32, [2, BLOCK_D, 32], dq.layout),
        told_s,
    )  # fmt: skip
    BARRIERS = (
        k_full, v_full, q_full, dout_full, empty, ds_full, clear, k_empty, tile_full, tile_empty,
        v_empty,
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
    given = TENSORS, BUFFERS, BARRIERS, SIZES, PACKED, OPERANDS
    gl.warp_specialize(
        [
            (_consume, (given, RESULTS, num_tiles, 0, TILE)),
            (_consume, (given, RESULTS, num_tiles, 1, TILE)),
            (_produce, (given, counter, num_tiles, TILE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    retire(BARRIERS)
