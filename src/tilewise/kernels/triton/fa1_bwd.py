"""FlashAttention's backward, the first paper's: keys outside, queries inside."""

import triton
import triton.language as tl

from .dropout import drop, kept
from .gradient import clear_empty, load_lse, probabilities, score_gradient
from .score import bias_of, slope_of
from .scratch import load_scratch, scratch_of, scratch_row, store_scratch
from .tiles import (
    accumulate,
    clear_slack,
    keys_of,
    load_rows,
    load_statistics,
    padded_statistics_of,
    row_blocks,
    rows_of,
    rows_of_sequence,
    source,
    store_rows,
)


@triton.jit
def _visit_rows(
    dk,
    dv,
    k,
    v,
    Q,
    dO,
    dQ_i,
    lse,
    delta,
    n_start,
    m_from,
    m_to,
    keep_scale,
    SCORE,
    MASK,
    DROPOUT,
    MASKED: tl.constexpr,
    CHECK: tl.constexpr,
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
    """Algorithm 4's inner loop, lines 9 to 23, over the row tiles of [m_from, m_to)."""
    # rows that the window leaves no key may hold anything
    first_q, used_q = rows_of(0, MASK[1], MASK)
    j = (n_start + tl.arange(0, BLOCK_N))[None, :]
    for m_start in tl.range(m_from, m_to, BLOCK_M):
        i = (m_start + tl.arange(0, BLOCK_M))[:, None]
        q = load_rows(Q, m_start, first_q, used_q, BLOCK_M, HEAD_DIM, BLOCK_D, USE_TMA, CHECK)  # 10
        do = load_rows(dO, m_start, first_q, used_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, USE_TMA, CHECK)
        lse_i, low_i = load_lse(lse, m_start, SCORE, BLOCK_M, USE_TMA)
        if SCORE[3] is not None or SCORE[4] is not None:
            q, do = clear_empty(q, lse_i), clear_empty(do, lse_i)
        x = tl.dot(q, k.T, input_precision=PRECISION)  # 11: (BLOCK_M, BLOCK_N)
        p, dcap = probabilities(
            x, i, j, lse_i[:, None], low_i[:, None], SCORE, MASK, MASKED, APPROX_TANH
        )  # 12, 13
        dp = tl.dot(do, v.T, input_precision=PRECISION)  # 17
        pz = p
        if DROPOUT[0] is not None:
            keep = kept(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)  # 14
            pz = drop(p, keep)  # 15
            dp = tl.where(keep, dp * keep_scale, 0.0)  # 18
        dv = accumulate(dv, pz.to(do.dtype).T, do, PRECISION)  # 16
        delta_i = load_statistics(delta, m_start, BLOCK_M, USE_TMA)  # 19, by ``bwd_preprocess.py``
        ds = score_gradient(p, dp, delta_i[:, None], dcap, SCORE)  # 20
        ds = ds.to(q.dtype)
        dk = accumulate(dk, ds.T, q, PRECISION)  # 22
        k_i = k
        if SCORE[3] is not None or SCORE[4] is not None:
            k_i = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, k)  # 0 times NaN is NaN
        dq = load_scratch(dQ_i, m_start, BLOCK_M, BLOCK_D)
        dq = accumulate(dq, ds, k_i, PRECISION)
        store_scratch(dQ_i, m_start, dq, BLOCK_M, BLOCK_D)  # 21
    return dk, dv


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
def fa1_bwd_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    dk,
    dv,
    dq_scratch,
    attn_bias,
    attn_mask,
    alibi_slopes,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dq_strides,
    dk_strides,
    dv_strides,
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
    grad_scale,
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
    """Gradients of queries, keys and values by the first paper's schedule.

    Computes: dV = (P Z)^T dO, dK = grad_scale dS^T Q and dQ = grad_scale dS K, with P, Z and dS as
        in ``gradient.py``, each tile recomputed once for all three. The comments' numbers are
        Algorithm 4's lines.
    Grid: key heads and sequences; a program owns one key head with the query heads that share it,
        takes its blocks of BLOCK_N keys one after the other (outer loop; dK and dV stay on chip)
        and, for each, the tiles of BLOCK_M rows that see it (inner loop). No addition is atomic.
    Numerics: float32 accumulators, dQ's in scratch memory; P and dS in the inputs' dtype. P comes
        from lse = m + log l, and the factor softmax_scale of lines 21 and 22 joins at the end.
        Dropout's mask is drawn again from the forward's seed. Rows and keys that see nothing get 0.
    Source: Dao, Fu, Ermon, Rudra, Re 2022, "FlashAttention", Algorithm 4; the sum over the query
        heads of a key head is ours.
    """
    nheads_kv = nheads // group
    head_id = tl.program_id(0)
    batch_id = head_id // nheads_kv
    head_kv = head_id % nheads_kv
    start_q, length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, length_k, used_k = rows_of_sequence(
        batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k
    )
    clear_slack(
        dk, dk_strides, batch_id, batch, head_kv, 0, 1, cu_seqlens_k, total_k,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    clear_slack(
        dv, dv_strides, batch_id, batch, head_kv, 0, 1, cu_seqlens_k, total_k,
        BLOCK_N, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip
    first = scratch_row(batch_id, start_q, seqlen_q, cu_seqlens_q, BLOCK_M)

    # 5: dQ = 0
    nothing = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for head in range(head_kv * group, (head_kv + 1) * group):
        clear_slack(
            dq, dq_strides, batch_id, batch, head, 0, 1, cu_seqlens_q, total_q,
            BLOCK_M, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        dQ_i = scratch_of(dq_scratch, head, scratch_rows, first, BLOCK_D)
        for m_start in range(0, length_q, BLOCK_M):
            store_scratch(dQ_i, m_start, nothing, BLOCK_M, BLOCK_D)

    MASK = used_q, used_k, window_left, window_right
    K = source(k, k_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
    V = source(v, v_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
    dK = source(dk, dk_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
    dV = source(dv, dv_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
    n_first, n_stop = keys_of(0, used_q, MASK)
    CUT_Q: tl.constexpr = not USE_TMA or cu_seqlens_q is not None
    for n_start in range(0, length_k, BLOCK_N):  # 6
        # what this program wrote before is read by other threads of it
        tl.debug_barrier()
        # 7; keys that no row sees stay unread, whatever stands in memory there
        k_tile = load_rows(K, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM, BLOCK_D, False, True)
        v_tile = load_rows(V, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False, True)
        acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # 8
        acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        m0, m1, m2, m3 = row_blocks(n_start, tl.minimum(n_start + BLOCK_N, used_k), MASK, BLOCK_M)
        if n_start + BLOCK_N > used_k:
            m2 = m1  # the end of the keys cuts every tile
        if n_start >= used_k:
            m0, m1, m2, m3 = 0, 0, 0, 0
        for head in range(head_kv * group, (head_kv + 1) * group):
            SCORE = (
                softmax_scale,
                softcap,
                None
                if alibi_slopes is None
                else slope_of(alibi_slopes, slope_strides, batch_id, head),
                None
                if attn_bias is None
                else bias_of(attn_bias, bias_strides, batch_id, head, start_q),
                None
                if attn_mask is None
                else bias_of(attn_mask, bias_strides, batch_id, head, start_q),
                bias_strides[2],
                bias_strides[3],
                natural,
            )
            DROPOUT = seed, dropout_threshold, head, batch_id
            Q = source(q, q_strides, batch_id, start_q, head, cu_seqlens_q, USE_TMA)
            dO = source(dout, dout_strides, batch_id, start_q, head, cu_seqlens_q, USE_TMA)
            dQ_i = scratch_of(dq_scratch, head, scratch_rows, first, BLOCK_D)
            lse_h = padded_statistics_of(
                lse,
                batch_id,
                batch,
                head,
                nheads,
                seqlen_q,
                total_q,
                start_q,
                cu_seqlens_q,
                USE_TMA,
            )
            delta_h = padded_statistics_of(
                delta,
                batch_id,
                batch,
                head,
                nheads,
                seqlen_q,
                total_q,
                start_q,
                cu_seqlens_q,
                USE_TMA,
            )
            if window_right is not None:
                acc_dk, acc_dv = _visit_rows(
                    acc_dk, acc_dv, k_tile, v_tile, Q, dO, dQ_i, lse_h, delta_h, n_start, m0, m1,
                    keep_scale, SCORE, MASK, DROPOUT, True, CUT_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                    BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
                )  # fmt: skip
            acc_dk, acc_dv = _visit_rows(
                acc_dk, acc_dv, k_tile, v_tile, Q, dO, dQ_i, lse_h, delta_h, n_start, m1, m2,
                keep_scale, SCORE, MASK, DROPOUT, False, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
            )  # fmt: skip
            acc_dk, acc_dv = _visit_rows(
                acc_dk, acc_dv, k_tile, v_tile, Q, dO, dQ_i, lse_h, delta_h, n_start, m2, m3,
                keep_scale, SCORE, MASK, DROPOUT, True, CUT_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
            )  # fmt: skip

        # 24; keys that exist but are not used get zeros
        used = ((n_start + tl.arange(0, BLOCK_N)) < used_k)[:, None]
        acc_dk = tl.where(used, acc_dk * grad_scale, 0.0)
        acc_dv = tl.where(used, acc_dv * keep_scale, 0.0)
        store_rows(dK, n_start, length_k, acc_dk, BLOCK_N, HEAD_DIM, BLOCK_D)
        store_rows(dV, n_start, length_k, acc_dv, BLOCK_N, HEAD_DIM_V, BLOCK_DV)

    # 26: dQ in its own dtype
    tl.debug_barrier()
    for head in range(head_kv * group, (head_kv + 1) * group):
        dQ_i = scratch_of(dq_scratch, head, scratch_rows, first, BLOCK_D)
        dQ = source(dq, dq_strides, batch_id, start_q, head, cu_seqlens_q, False)
        for m_start in range(0, length_q, BLOCK_M):
            used = ((m_start + tl.arange(0, BLOCK_M)) < used_q)[:, None]
            dq_i = load_scratch(dQ_i, m_start, BLOCK_M, BLOCK_D) * grad_scale
            dq_i = tl.where(used, dq_i, 0.0)
            store_rows(dQ, m_start, length_q, dq_i, BLOCK_M, HEAD_DIM, BLOCK_D)
