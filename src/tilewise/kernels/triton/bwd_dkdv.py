"""FlashAttention-2's backward: dK and dV."""

import triton
import triton.language as tl

from .dropout import drop, kept_transposed
from .gradient import clear_empty, load_lse, probabilities, score_gradient
from .score import bias_of, slope_of
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
    tile_of_program,
)


@triton.jit
def _accumulate(
    dk,
    dv,
    k,
    v,
    Q,
    dO,
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
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
):
    """Algorithm 2's inner loop over the row tiles of [m_from, m_to), on transposed tiles."""
    HIDDEN: tl.constexpr = SCORE[3] is not None or SCORE[4] is not None
    # rows that the window leaves no key may hold anything
    first_q, used_q = rows_of(0, MASK[1], MASK)
    j = (n_start + tl.arange(0, BLOCK_N))[:, None]
    for m_start in tl.range(m_from, m_to, BLOCK_M):
        q = load_rows(Q, m_start, first_q, used_q, BLOCK_M, HEAD_DIM, BLOCK_D, USE_TMA, CHECK)
        i = (m_start + tl.arange(0, BLOCK_M))[None, :]
        lse_i, low_i = load_lse(lse, m_start, SCORE, BLOCK_M, USE_TMA)
        if HIDDEN:
            q = clear_empty(q, lse_i)
        x = tl.dot(k, q.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        p, dcap = probabilities(
            x, i, j, lse_i[None, :], low_i[None, :], SCORE, MASK, MASKED, APPROX_TANH
        )
        do = load_rows(dO, m_start, first_q, used_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, USE_TMA, CHECK)
        if HIDDEN:
            do = clear_empty(do, lse_i)
        pz = p
        if DROPOUT[0] is not None:
            keep = kept_transposed(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)
            pz = drop(p, keep)
        if WANT_DK:
            dp = tl.dot(v, do.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
            if DROPOUT[0] is not None:
                dp = tl.where(keep, dp * keep_scale, 0.0)
        if WANT_DV:
            dv = accumulate(dv, pz.to(do.dtype), do, PRECISION)
        if WANT_DK:
            delta_i = load_statistics(delta, m_start, BLOCK_M, USE_TMA)
            ds = score_gradient(p, dp, delta_i[None, :], dcap, SCORE)
            dk = accumulate(dk, ds.to(q.dtype), q, PRECISION)
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
        "num_n_blocks",
        "section",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def flash_bwd_dkdv_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
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
    num_n_blocks,
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
    """Gradients of keys and values.

    Computes: dV = (P Z)^T dO and dK = grad_scale dS^T Q, with P and dS as in ``gradient.py``,
        summed over the query heads that share a key head. Either may be absent (None): two passes
        recompute P once more, but each has half the accumulators, which wide heads need.
    Grid: flat over blocks of BLOCK_N keys, key heads and sequences; a program owns one block of
        keys and loops over the query heads of its group and the row tiles that see the block, in
        a fixed order.
    Numerics: float32 accumulators; P and dS in the inputs' dtype. Keys that no row sees get 0.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2; dQ is ``bwd_dq.py``'s.
    """
    nheads_kv = nheads // group
    n_block, head_id = tile_of_program(
        tl.program_id(0), num_n_blocks, batch * nheads_kv, section, False
    )
    batch_id = head_id // nheads_kv
    head_kv = head_id % nheads_kv
    start_q, _, used_q = rows_of_sequence(batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q)
    start_k, length_k, used_k = rows_of_sequence(
        batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k
    )
    if dk is not None:
        clear_slack(
            dk, dk_strides, batch_id, batch, head_kv, n_block, num_n_blocks, cu_seqlens_k, total_k,
            BLOCK_N, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    if dv is not None:
        clear_slack(
            dv, dv_strides, batch_id, batch, head_kv, n_block, num_n_blocks, cu_seqlens_k, total_k,
            BLOCK_N, HEAD_DIM_V, BLOCK_DV,
        )  # fmt: skip
    n_start = n_block * BLOCK_N
    if n_start >= length_k:
        return

    MASK = used_q, used_k, window_left, window_right
    n_first, n_stop = keys_of(0, used_q, MASK)  # keys that no row sees may hold anything
    K = source(k, k_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
    V = source(v, v_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
    # TMA fills the end of a dense tensor with zeros by itself
    CUT_Q: tl.constexpr = not USE_TMA or cu_seqlens_q is not None
    k_tile = load_rows(K, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM, BLOCK_D, False, True)
    # what is not wanted is one number that nothing changes
    v_tile = tl.zeros((), tl.float32)
    acc_dk = tl.zeros((), tl.float32)
    acc_dv = tl.zeros((), tl.float32)
    if dk is not None:
        v_tile = load_rows(V, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False, True)
        acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if dv is not None:
        acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    m0, m1, m2, m3 = row_blocks(n_start, tl.minimum(n_start + BLOCK_N, used_k), MASK, BLOCK_M)
    if n_start >= used_k:
        m0, m1, m2, m3 = 0, 0, 0, 0
    # past the end P is 0, so that rows there need care only where they may hold anything
    if not CUT_Q and window_left is None:
        m2 = m3
    for member in range(0, group):
        head = head_kv * group + member
        SCORE = (
            softmax_scale,
            softcap,
            None if alibi_slopes is None else slope_of(alibi_slopes, slope_strides, batch_id, head),
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
        lse_h = padded_statistics_of(
            lse, batch_id, batch, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q, USE_TMA
        )
        delta_h = padded_statistics_of(
            delta, batch_id, batch, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q, USE_TMA
        )
        if window_right is not None:
            acc_dk, acc_dv = _accumulate(
                acc_dk, acc_dv, k_tile, v_tile, Q, dO, lse_h, delta_h, n_start, m0, m1, keep_scale,
                SCORE, MASK, DROPOUT, True, CUT_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
                BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH, dk is not None, dv is not None,
            )  # fmt: skip
        acc_dk, acc_dv = _accumulate(
            acc_dk, acc_dv, k_tile, v_tile, Q, dO, lse_h, delta_h, n_start, m1, m2, keep_scale,
            SCORE, MASK, DROPOUT, False, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
            BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH, dk is not None, dv is not None,
        )  # fmt: skip
        if CUT_Q or window_left is not None:
            acc_dk, acc_dv = _accumulate(
                acc_dk, acc_dv, k_tile, v_tile, Q, dO, lse_h, delta_h, n_start, m2, m3, keep_scale,
                SCORE, MASK, DROPOUT, window_left is not None, CUT_Q, HEAD_DIM, HEAD_DIM_V,
                BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, APPROX_TANH,
                dk is not None, dv is not None,
            )  # fmt: skip

    # keys that exist but are not used get zeros, whatever stands in memory there
    used = ((n_start + tl.arange(0, BLOCK_N)) < used_k)[:, None]
    if dk is not None:
        dK = source(dk, dk_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
        acc_dk = tl.where(used, acc_dk * grad_scale, 0.0)
        store_rows(dK, n_start, length_k, acc_dk, BLOCK_N, HEAD_DIM, BLOCK_D)
    if dv is not None:
        dV = source(dv, dv_strides, batch_id, start_k, head_kv, cu_seqlens_k, False)
        acc_dv = tl.where(used, acc_dv * keep_scale, 0.0)
        store_rows(dV, n_start, length_k, acc_dv, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
