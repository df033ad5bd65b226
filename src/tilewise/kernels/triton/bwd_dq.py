"""FlashAttention-2's backward: dQ."""

import triton
import triton.language as tl

from .dropout import kept
from .gradient import clear_empty, load_lse, probabilities, score_gradient
from .score import bias_of, slope_of
from .tiles import (
    accumulate,
    clear_slack,
    key_blocks,
    keys_of,
    load_rows,
    load_statistics,
    padded_statistics_of,
    rows_of,
    rows_of_sequence,
    source,
    store_rows,
    tile_of_program,
)


@triton.jit
def _accumulate(
    dq,
    q,
    do,
    K,
    V,
    lse_i,
    low_i,
    delta_i,
    m_start,
    n_from,
    n_to,
    n_first,
    n_stop,
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
    """The loop over the key tiles of [n_from, n_to)."""
    i = (m_start + tl.arange(0, BLOCK_M))[:, None]
    for n_start in tl.range(n_from, n_to, BLOCK_N):
        k = load_rows(K, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM, BLOCK_D, USE_TMA, CHECK)
        v = load_rows(V, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM_V, BLOCK_DV, USE_TMA, CHECK)
        j = (n_start + tl.arange(0, BLOCK_N))[None, :]
        x = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        p, dcap = probabilities(
            x, i, j, lse_i[:, None], low_i[:, None], SCORE, MASK, MASKED, APPROX_TANH
        )
        dp = tl.dot(do, v.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if DROPOUT[0] is not None:
            keep = kept(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = score_gradient(p, dp, delta_i[:, None], dcap, SCORE)
        if SCORE[3] is not None or SCORE[4] is not None:
            k = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, k)  # 0 times NaN is NaN
        dq = accumulate(dq, ds.to(k.dtype), k, PRECISION)
    return dq


@triton.jit(
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
def flash_bwd_dq_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
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
    bias_strides,
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
    """Gradient of queries.

    Computes: dQ = grad_scale dS K, with dS as in ``gradient.py``.
    Grid: flat over blocks of BLOCK_M rows, heads and sequences; a program owns one block of rows of
        one head and loops over the key tiles that the rows see, in a fixed order.
    Numerics: float32 accumulator; dS in the inputs' dtype. A row without keys gets 0.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, with dQ in a pass of its own, which needs no
        atomic additions and recomputes S and dP once more.
    """
    m_block, head_id = tile_of_program(
        tl.program_id(0), num_m_blocks, batch * nheads, section, True
    )
    batch_id = head_id // nheads
    head = head_id % nheads
    start_q, length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, _, used_k = rows_of_sequence(batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k)
    clear_slack(
        dq, dq_strides, batch_id, batch, head, m_block, num_m_blocks, cu_seqlens_q, total_q,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    m_start = m_block * BLOCK_M
    if m_start >= length_q:
        return

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
    Q = source(q, q_strides, batch_id, start_q, head, cu_seqlens_q, False)
    dO = source(dout, dout_strides, batch_id, start_q, head, cu_seqlens_q, False)
    K = source(k, k_strides, batch_id, start_k, head // group, cu_seqlens_k, USE_TMA)
    V = source(v, v_strides, batch_id, start_k, head // group, cu_seqlens_k, USE_TMA)
    lse = padded_statistics_of(
        lse, batch_id, batch, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q, False
    )
    delta = padded_statistics_of(
        delta, batch_id, batch, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q, False
    )

    CUT_K: tl.constexpr = not USE_TMA or cu_seqlens_k is not None or window_left is not None
    first_q, stop_q = rows_of(0, used_k, MASK)  # rows without keys may hold anything
    q_tile = load_rows(Q, m_start, first_q, stop_q, BLOCK_M, HEAD_DIM, BLOCK_D, False, True)
    do_tile = load_rows(dO, m_start, first_q, stop_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False, True)
    lse_i, low_i = load_lse(lse, m_start, SCORE, BLOCK_M, False)
    if attn_bias is not None or attn_mask is not None:
        q_tile, do_tile = clear_empty(q_tile, lse_i), clear_empty(do_tile, lse_i)
    delta_i = load_statistics(delta, m_start, BLOCK_M, False)
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_stop = tl.minimum(m_start + BLOCK_M, used_q)
    n_first, n_stop = keys_of(m_start, m_stop, MASK)
    n0, n1, n2, n3 = key_blocks(m_start, m_stop, MASK, BLOCK_N)
    if m_start >= used_q:
        n0, n1, n2, n3 = 0, 0, 0, 0
    if window_left is not None:
        acc_dq = _accumulate(
            acc_dq, q_tile, do_tile, K, V, lse_i, low_i, delta_i, m_start, n0, n1, n_first, n_stop,
            keep_scale, SCORE, MASK, DROPOUT, True, CUT_K, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
            BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
        )  # fmt: skip
    acc_dq = _accumulate(
        acc_dq, q_tile, do_tile, K, V, lse_i, low_i, delta_i, m_start, n1, n2, n_first, n_stop,
        keep_scale, SCORE, MASK, DROPOUT, False, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
        BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
    )  # fmt: skip
    acc_dq = _accumulate(
        acc_dq, q_tile, do_tile, K, V, lse_i, low_i, delta_i, m_start, n2, n3, n_first, n_stop,
        keep_scale, SCORE, MASK, DROPOUT, True, CUT_K, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
        BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
    )  # fmt: skip
    dQ = source(dq, dq_strides, batch_id, start_q, head, cu_seqlens_q, False)
    used = ((m_start + tl.arange(0, BLOCK_M)) < used_q)[:, None]
    acc_dq = tl.where(used, acc_dq * grad_scale, 0.0)
    store_rows(dQ, m_start, length_q, acc_dq, BLOCK_M, HEAD_DIM, BLOCK_D)
