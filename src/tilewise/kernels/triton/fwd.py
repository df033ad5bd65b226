"""FlashAttention-2's forward."""

import triton
import triton.language as tl

from .dropout import dropped
from .score import bias_of, hides_keys, scores, slope_of, to_lse
from .softmax import initial_state, online_softmax
from .tiles import (
    accumulate,
    clear_slack,
    key_blocks,
    keys_of,
    load_rows,
    rows_of_sequence,
    source,
    statistics_of,
    store_rows,
    tile_of_program,
)


@triton.jit
def _attend(
    acc_o,
    m_i,
    l_i,
    q,
    K,
    V,
    m_start,
    n_from,
    n_to,
    n_first,
    n_stop,
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
    WARP_SPECIALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """The loop of Algorithm 1 over the key tiles of [n_from, n_to)."""
    i = (m_start + tl.arange(0, BLOCK_M))[:, None]
    for n_start in tl.range(n_from, n_to, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        k = load_rows(K, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM, BLOCK_D, USE_TMA, CHECK)
        s = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        j = (n_start + tl.arange(0, BLOCK_N))[None, :]
        s, _ = scores(s, i, j, SCORE, MASK, MASKED, APPROX_TANH)
        GUARD: tl.constexpr = MASKED or SCORE[3] is not None or SCORE[4] is not None
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, SCORE, GUARD)
        if DROPOUT[0] is not None:
            p = dropped(p, DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N, q.dtype)
        acc_o = acc_o * alpha[:, None]
        v = load_rows(V, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM_V, BLOCK_DV, USE_TMA, CHECK)
        if SCORE[3] is not None or SCORE[4] is not None:
            v = tl.where(hides_keys(s)[:, None], 0.0, v)  # 0 times NaN is NaN
        acc_o = accumulate(acc_o, p.to(v.dtype), v, PRECISION)
    return acc_o, m_i, l_i


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
def flash_fwd_kernel(
    q,
    k,
    v,
    out,
    lse,
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
    num_m_blocks,
    section,
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
    WARP_SPECIALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """Attention's output and log-sum-exp, tile by tile.

    Computes: O = softmax(s(Q K^T)) V and lse = log sum_j exp(s_ij), with s as in ``score.py``.
    Grid: flat over blocks of BLOCK_M rows, heads and sequences; a program owns one block of rows of
        one head and loops over the key tiles that the rows see, cut ones apart from whole ones.
    Numerics: scores, m, l and O in float32, O unscaled until the end; base 2 (natural beside a
        floating bias and in float32, where lse is float64); P in V's dtype. A row
        without keys gets O = 0 and lse = -inf.
    Source: Dao 2023, "FlashAttention-2", Algorithm 1.
    """
    program = tl.program_id(0)
    m_block, head_id = tile_of_program(program, num_m_blocks, batch * nheads, section, True)
    batch_id = head_id // nheads
    head = head_id % nheads
    start_q, length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, _, used_k = rows_of_sequence(batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k)
    clear_slack(
        out, out_strides, batch_id, batch, head, m_block, num_m_blocks, cu_seqlens_q, total_q,
        BLOCK_M, HEAD_DIM_V, BLOCK_DV,
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
    K = source(k, k_strides, batch_id, start_k, head // group, cu_seqlens_k, USE_TMA)
    V = source(v, v_strides, batch_id, start_k, head // group, cu_seqlens_k, USE_TMA)

    q_tile = load_rows(Q, m_start, 0, used_q, BLOCK_M, HEAD_DIM, BLOCK_D, False, True)
    m_i, l_i = initial_state(sink, head, SCORE, BLOCK_M)
    acc_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_stop = tl.minimum(m_start + BLOCK_M, used_q)
    n_first, n_stop = keys_of(m_start, m_stop, MASK)
    n0, n1, n2, n3 = key_blocks(m_start, m_stop, MASK, BLOCK_N)
    if m_start >= used_q:
        n0, n1, n2, n3 = 0, 0, 0, 0
    # TMA fills the end of a dense tensor with zeros by itself
    CUT: tl.constexpr = not USE_TMA or cu_seqlens_k is not None or window_left is not None
    if window_left is not None:
        acc_o, m_i, l_i = _attend(
            acc_o, m_i, l_i, q_tile, K, V, m_start, n0, n1, n_first, n_stop, SCORE, MASK, DROPOUT,
            True, CUT, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            USE_TMA, False, PRECISION, APPROX_TANH,
        )  # fmt: skip
    acc_o, m_i, l_i = _attend(
        acc_o, m_i, l_i, q_tile, K, V, m_start, n1, n2, n_first, n_stop, SCORE, MASK, DROPOUT,
        False, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        USE_TMA, WARP_SPECIALIZE, PRECISION, APPROX_TANH,
    )  # fmt: skip
    acc_o, m_i, l_i = _attend(
        acc_o, m_i, l_i, q_tile, K, V, m_start, n2, n3, n_first, n_stop, SCORE, MASK, DROPOUT,
        True, CUT, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        USE_TMA, False, PRECISION, APPROX_TANH,
    )  # fmt: skip

    acc_o = acc_o * (keep_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    offs_m = m_start + tl.arange(0, BLOCK_M)
    # rows past seqused: no output, lse -inf
    lse_i = tl.where(offs_m < used_q, to_lse(m_i, l_i, SCORE), float("-inf"))
    acc_o = tl.where((offs_m < used_q)[:, None], acc_o, 0.0)
    O = source(out, out_strides, batch_id, start_q, head, cu_seqlens_q, False)
    store_rows(O, m_start, length_q, acc_o, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse = statistics_of(lse, batch_id, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q)
    tl.store(lse + offs_m, lse_i, mask=offs_m < length_q)
