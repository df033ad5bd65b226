"""FlashAttention's forward, the first paper's: keys outside, queries inside."""

import triton
import triton.language as tl

from .dropout import dropped
from .score import bias_of, hides_keys, scores, slope_of, to_lse
from .scratch import load_flat, load_scratch, scratch_of, scratch_row, store_scratch, tile_of
from .softmax import initial_state, online_softmax
from .tiles import (
    clear_slack,
    keys_of,
    load_rows,
    row_blocks,
    rows_of_sequence,
    source,
    statistics_of,
    store_rows,
)


@triton.jit
def _visit_rows(
    k,
    v,
    Q,
    O_i,
    M_i,
    L_i,
    n_start,
    m_from,
    m_to,
    m_0,
    l_0,
    SCORE,
    MASK,
    DROPOUT,
    FIRST: tl.constexpr,
    MASKED: tl.constexpr,
    CHECK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """Algorithm 2's inner loop, lines 8 to 17, over the row tiles of [m_from, m_to).

    FIRST says that these rows have seen no key yet: O is 0, m and l are m_0 and l_0.
    """
    used_q = MASK[0]
    j = (n_start + tl.arange(0, BLOCK_N))[None, :]
    for m_start in tl.range(m_from, m_to, BLOCK_M):
        offs_m = m_start + tl.arange(0, BLOCK_M)
        q = load_rows(Q, m_start, 0, used_q, BLOCK_M, HEAD_DIM, BLOCK_D, USE_TMA, CHECK)  # 9
        m_i, l_i = m_0, l_0  # (BLOCK_M,)
        if not FIRST:
            m_i = tl.load(M_i + offs_m)
            l_i = tl.load(L_i + offs_m)
            # on its way while the scores are made
            flat = load_flat(O_i, m_start, BLOCK_M, BLOCK_DV)
        s = tl.dot(q, k.T, input_precision=PRECISION)  # 10: (BLOCK_M, BLOCK_N)
        s, _ = scores(s, offs_m[:, None], j, SCORE, MASK, MASKED, APPROX_TANH)  # 11
        GUARD: tl.constexpr = MASKED or SCORE[3] is not None or SCORE[4] is not None
        p, alpha, m_new, l_new = online_softmax(s, m_i, l_i, SCORE, GUARD)  # 12, 13
        if DROPOUT[0] is not None:
            p = dropped(p, DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N, v.dtype)  # 14
        # an O of 0 and an l of 0, in rows without keys, stay so
        inverse = 1.0 / tl.where(l_new == 0.0, 1.0, l_new)
        v_i = v
        if SCORE[3] is not None or SCORE[4] is not None:
            v_i = tl.where(hides_keys(s)[:, None], 0.0, v)  # 0 times NaN is NaN
        pv = tl.dot(p.to(v.dtype), v_i, input_precision=PRECISION)
        o = pv * inverse[:, None]
        if not FIRST:
            o += tile_of(flat, BLOCK_M, BLOCK_DV) * (alpha * l_i * inverse)[:, None]
        store_scratch(O_i, m_start, o, BLOCK_M, BLOCK_DV)  # 15
        tl.store(M_i + offs_m, m_new)  # 16
        tl.store(L_i + offs_m, l_new)


@triton.jit
def _begin_rows(
    O_i, M_i, L_i, m_from, m_to, m_0, l_0, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Writes down the row tiles of [m_from, m_to) as they are before any key."""
    nothing = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for m_start in range(m_from, m_to, BLOCK_M):
        offs_m = m_start + tl.arange(0, BLOCK_M)
        store_scratch(O_i, m_start, nothing, BLOCK_M, BLOCK_DV)
        tl.store(M_i + offs_m, m_0)
        tl.store(L_i + offs_m, l_0)


@triton.jit
def _visit_block(
    K,
    V,
    Q,
    O_i,
    M_i,
    L_i,
    n_start,
    n_first,
    n_stop,
    m_0,
    l_0,
    SCORE,
    MASK,
    DROPOUT,
    FIRST: tl.constexpr,
    CUT_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """Algorithm 2's outer loop, lines 7 to 17, for one block of keys: cut tiles of rows apart from
    whole ones."""
    used_k = MASK[1]
    # 7
    k = load_rows(K, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM, BLOCK_D, False, True)
    v = load_rows(V, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False, True)
    m0, m1, m2, m3 = row_blocks(n_start, tl.minimum(n_start + BLOCK_N, used_k), MASK, BLOCK_M)
    if n_start + BLOCK_N > used_k:
        m2 = m1  # the end of the keys cuts every tile
    if MASK[3] is not None:
        _visit_rows(
            k, v, Q, O_i, M_i, L_i, n_start, m0, m1, m_0, l_0, SCORE, MASK, DROPOUT, FIRST, True,
            CUT_Q, HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
        )  # fmt: skip
    _visit_rows(
        k, v, Q, O_i, M_i, L_i, n_start, m1, m2, m_0, l_0, SCORE, MASK, DROPOUT, FIRST, False,
        False, HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
    )  # fmt: skip
    _visit_rows(
        k, v, Q, O_i, M_i, L_i, n_start, m2, m3, m_0, l_0, SCORE, MASK, DROPOUT, FIRST, True,
        CUT_Q, HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "batch",
        "nheads",
        "group",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
        "scratch_rows",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def fa1_fwd_kernel(
    q,
    k,
    v,
    out,
    lse,
    o_scratch,
    m_scratch,
    l_scratch,
    attn_bias,
    attn_mask,
    alibi_slopes,
    sink,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    bias_strides,
    slope_strides,
    batch,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    scratch_rows,
    softmax_scale,
    softcap,
    natural,
    window_left,
    window_right,
    dropout_threshold,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """Attention's output and log-sum-exp by the first paper's schedule.

    Computes: O = softmax(s(Q K^T)) V and lse = log sum_j exp(s_ij), with s as in ``score.py``.
        Between key blocks the running O (normalised), m and l of every row lie in device memory;
        the comments' numbers are Algorithm 2's lines.
    Grid: heads and sequences; a program owns one head, takes its blocks of BLOCK_N keys one after
        the other (outer loop, held on chip) and, for each, the tiles of BLOCK_M rows that see it
        (inner loop), cut ones apart from whole ones. Tiles outside the window are skipped.
    Numerics: scores, m and l in float32; base 2 (natural beside a floating bias); P in V's dtype.
        The running O is float32 in scratch memory, as the paper's single rounding to the output's
        dtype at every visit would accumulate, and 1 / (1 - dropout_p) joins at the end. Line 12's
        P~ is relative to the row's new maximum m_new at once, exp(m~ - m_new) P~, which saves
        lines 13 and 15 a factor. A row without keys gets O = 0 and lse = -inf.
    Source: Dao, Fu, Ermon, Rudra, Re 2022, "FlashAttention", Algorithm 2.
    """
    head_id = tl.program_id(0)
    batch_id = head_id // nheads
    head = head_id % nheads
    start_q, length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, _, used_k = rows_of_sequence(batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k)
    clear_slack(
        out, out_strides, batch_id, batch, head, 0, 1, cu_seqlens_q, total_q,
        BLOCK_M, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip

    MASK = used_q, used_k, window_left, window_right
    SCORE = (
        softmax_scale,
        softcap,
        None if alibi_slopes is None else slope_of(alibi_slopes, slope_strides, batch_id, head),
        None if attn_bias is None else bias_of(attn_bias, bias_strides, batch_id, head, start_q),
        None if attn_mask is None else bias_of(attn_mask, bias_strides, batch_id, head, start_q),
        bias_strides[2],
        bias_strides[3],
        natural,
    )
    DROPOUT = seed, dropout_threshold, head, batch_id
    Q = source(q, q_strides, batch_id, start_q, head, cu_seqlens_q, USE_TMA)
    K = source(k, k_strides, batch_id, start_k, head // group, cu_seqlens_k, False)
    V = source(v, v_strides, batch_id, start_k, head // group, cu_seqlens_k, False)
    first = scratch_row(batch_id, start_q, seqlen_q, cu_seqlens_q, BLOCK_M)
    O_i = scratch_of(o_scratch, head, scratch_rows, first, BLOCK_DV)
    M_i = scratch_of(m_scratch, head, scratch_rows, first, 1)
    L_i = scratch_of(l_scratch, head, scratch_rows, first, 1)
    CUT_Q: tl.constexpr = not USE_TMA or cu_seqlens_q is not None

    # 3: O = 0, and m and l of no key but the sink
    m_0, l_0 = initial_state(sink, head, SCORE, BLOCK_M)
    # 6; keys that no row sees stay unread, whatever stands in memory there
    n_first, n_stop = keys_of(0, used_q, MASK)
    n_start = n_first // BLOCK_N * BLOCK_N
    m_first, m_stop = length_q, length_q
    # without a left side of the window all rows that see a key see the first block, which finds
    # them as they begin; others are written down
    FROM_FIRST: tl.constexpr = window_left is None
    if FROM_FIRST and n_start < n_stop:
        last = tl.minimum(n_start + BLOCK_N, used_k)
        m_first, _, _, m_stop = row_blocks(n_start, last, MASK, BLOCK_M)
    _begin_rows(O_i, M_i, L_i, 0, m_first, m_0, l_0, BLOCK_M, BLOCK_DV)
    _begin_rows(O_i, M_i, L_i, m_stop, length_q, m_0, l_0, BLOCK_M, BLOCK_DV)
    if FROM_FIRST and n_start < n_stop:
        _visit_block(
            K, V, Q, O_i, M_i, L_i, n_start, n_first, n_stop, m_0, l_0, SCORE, MASK, DROPOUT, True,
            CUT_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION,
            APPROX_TANH,
        )  # fmt: skip
        n_start += BLOCK_N
    for n in range(n_start, n_stop, BLOCK_N):
        # what this program wrote before is read by other threads of it
        tl.debug_barrier()
        _visit_block(
            K, V, Q, O_i, M_i, L_i, n, n_first, n_stop, m_0, l_0, SCORE, MASK, DROPOUT, False,
            CUT_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION,
            APPROX_TANH,
        )  # fmt: skip

    # 19: O in its own dtype, and lse
    tl.debug_barrier()
    O = source(out, out_strides, batch_id, start_q, head, cu_seqlens_q, False)
    lse = statistics_of(lse, batch_id, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q)
    for m_start in range(0, length_q, BLOCK_M):
        offs_m = m_start + tl.arange(0, BLOCK_M)
        # rows past seqused: no output, lse -inf
        used = offs_m < used_q
        o = load_scratch(O_i, m_start, BLOCK_M, BLOCK_DV) * keep_scale
        o = tl.where(used[:, None], o, 0.0)
        store_rows(O, m_start, length_q, o, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
        lse_i = to_lse(tl.load(M_i + offs_m), tl.load(L_i + offs_m), SCORE)
        lse_i = tl.where(used, lse_i, float("-inf"))
        tl.store(lse + offs_m, lse_i, mask=offs_m < length_q)
