"""The backward's gradient of a floating attn_bias."""

import triton
import triton.language as tl

from .dropout import kept
from .gradient import load_lse, probabilities, score_gradient
from .score import bias_of, slope_of
from .tiles import (
    keys_of,
    load_rows,
    load_statistics,
    padded_statistics_of,
    rows_of_sequence,
    source,
)


@triton.jit(
    do_not_specialize=[
        "batch",
        "nheads",
        "group",
        "bias_heads",
        "heads_each",
        "batches_each",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
        "num_m_blocks",
        "num_n_blocks",
        "window_left",
        "window_right",
        "dropout_threshold",
    ]
)
def flash_bwd_dbias_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dbias,
    attn_bias,
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
    dbias_strides,
    bias_strides,
    slope_strides,
    batch,
    nheads,
    group,
    bias_heads,
    heads_each,
    batches_each,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_m_blocks,
    num_n_blocks,
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
    ONE_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
    APPROX_TANH: tl.constexpr,
):
    """Gradient of a bias, summed over whatever it was broadcast over.

    Computes: dbias = sum of dS (in natural units, before the derivative of softcap) over the batch
        entries, heads and rows (ONE_ROW) that share an element of the bias.
    Grid: flat over key tiles, row tiles, bias heads and bias batch entries; a program owns one tile
        of the bias and visits everything that reads it in a fixed order, so that nothing of size
        N x N but the bias's own gradient is held, and no addition is atomic.
    Numerics: float32 sum.
    Source: ours; d s / d attn_bias = 1.
    """
    program = tl.program_id(0)
    n_tile = program % num_n_blocks
    m_tile = program // num_n_blocks % num_m_blocks
    bias_id = program // num_n_blocks // num_m_blocks
    bias_head = bias_id % bias_heads
    bias_batch = bias_id // bias_heads
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for reader in range(0, batches_each * heads_each):
        batch_id = bias_batch + reader // heads_each
        head = bias_head + reader % heads_each
        start_q, _, used_q = rows_of_sequence(batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q)
        start_k, _, used_k = rows_of_sequence(batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k)
        MASK = used_q, used_k, window_left, window_right
        SCORE = (
            softmax_scale,
            softcap,
            None if alibi_slopes is None else slope_of(alibi_slopes, slope_strides, batch_id, head),
            bias_of(attn_bias, bias_strides, batch_id, head, start_q),
            None,
            bias_strides[2],
            bias_strides[3],
            natural,
        )
        DROPOUT = seed, dropout_threshold, head, batch_id
        Q = source(q, q_strides, batch_id, start_q, head, cu_seqlens_q, False)
        dO = source(dout, dout_strides, batch_id, start_q, head, cu_seqlens_q, False)
        K = source(k, k_strides, batch_id, start_k, head // group, cu_seqlens_k, False)
        V = source(v, v_strides, batch_id, start_k, head // group, cu_seqlens_k, False)
        lse_h = padded_statistics_of(
            lse, batch_id, batch, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q, False
        )
        delta_h = padded_statistics_of(
            delta, batch_id, batch, head, nheads, seqlen_q, total_q, start_q, cu_seqlens_q, False
        )
        m_from, m_to = m_tile * BLOCK_M, tl.minimum((m_tile + 1) * BLOCK_M, used_q)
        if ONE_ROW:
            m_to = used_q
        for m_start in range(m_from, m_to, BLOCK_M):
            n_first, n_stop = keys_of(m_start, tl.minimum(m_start + BLOCK_M, used_q), MASK)
            q_tile = load_rows(Q, m_start, 0, used_q, BLOCK_M, HEAD_DIM, BLOCK_D, False, True)
            do_tile = load_rows(dO, m_start, 0, used_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False, True)
            lse_i, low_i = load_lse(lse_h, m_start, SCORE, BLOCK_M, False)
            delta_i = load_statistics(delta_h, m_start, BLOCK_M, False)
            i = (m_start + tl.arange(0, BLOCK_M))[:, None]
            n_from = tl.maximum(n_tile * BLOCK_N, n_first // BLOCK_N * BLOCK_N)
            n_to = tl.minimum((n_tile + 1) * BLOCK_N, n_stop)
            for n_start in range(n_from, n_to, BLOCK_N):
                k_tile = load_rows(
                    K, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM, BLOCK_D, False, True
                )
                v_tile = load_rows(
                    V, n_start, n_first, n_stop, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False, True
                )
                j = (n_start + tl.arange(0, BLOCK_N))[None, :]
                x = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
                p = probabilities(
                    x,
                    i,
                    j,
                    lse_i[:, None],
                    low_i[:, None],
                    SCORE,
                    MASK,
                    True,
                    APPROX_TANH,
                )[0]
                dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
                if DROPOUT[0] is not None:
                    keep = kept(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                total += score_gradient(p, dp, delta_i[:, None], 1.0, SCORE)

    # rows are counted from the tensor's first, which in a packed tensor is not the sequence's
    start, length, _ = rows_of_sequence(bias_batch, cu_seqlens_q, None, seqlen_q, total_q)
    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    base = dbias + tl.cast(bias_batch, tl.int64) * dbias_strides[0] + start * dbias_strides[2]
    base += tl.cast(bias_head, tl.int64) * dbias_strides[1]
    rows = base + tl.cast(offs_m, tl.int64) * dbias_strides[2]
    columns = tl.cast(offs_n, tl.int64) * dbias_strides[3]
    dtype = dbias.dtype.element_ty
    if ONE_ROW:
        tl.store(base + columns, tl.sum(total, 0).to(dtype), mask=offs_n < seqlen_k)
    else:
        inside = (offs_m < length)[:, None] & (offs_n < seqlen_k)[None, :]
        tl.store(rows[:, None] + columns[None, :], total.to(dtype), mask=inside)
