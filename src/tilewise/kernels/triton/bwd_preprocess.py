"""The backward's preprocessing: delta."""

import triton
import triton.language as tl

from .score import LOG2E, NEG_INF, last_place
from .tiles import (
    STATISTICS_BLOCK,
    load_rows,
    padded_statistics_of,
    rows_of_program,
    rows_of_sequence,
    source,
    statistics_of,
)


@triton.jit(
    do_not_specialize=["batch", "nheads", "seqlen_q", "total_q", "num_m_blocks"]
)  # fmt: skip
def flash_bwd_preprocess_kernel(
    out,
    dout,
    lse,
    dlse,
    lse_padded,
    delta_padded,
    dq_sum,
    cu_seqlens_q,
    seqused_q,
    out_strides,
    dout_strides,
    batch,
    nheads,
    seqlen_q,
    total_q,
    num_m_blocks,
    delta_scale,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NATURAL: tl.constexpr,
    FOR_WGMMA: tl.constexpr = False,
    BLOCK_D: tl.constexpr = 0,
):
    """The statistics of a row that the backward's loops read, in whole blocks.

    Computes: delta_i = sum_d dO_id O_id - dlse_i, stored times delta_scale, and lse_i in base 2
        (natural with NATURAL). Where lse is -inf, in rows without keys or a sink and past the end,
        delta is 0 and lse +inf, so that P is 0 there. With NATURAL what float32 leaves of lse
        follows as a second part, in ``last_place`` of the first. FOR_WGMMA: -delta, and each 16
        rows by pair, half and parity, so that a thread's are adjacent. dq_sum, where the one pass
        adds up rows of BLOCK_D, becomes 0.
    Grid: flat over blocks of STATISTICS_BLOCK rows, heads and sequences.
    Numerics: float32.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, line 4; dlse is ours: d lse_i / d s_ij is
        p_ij, so that it joins delta with the opposite sign.
    """
    m_block, head, batch_id = rows_of_program(num_m_blocks, nheads)
    start, length, used = rows_of_sequence(batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q)
    BLOCK_M: tl.constexpr = STATISTICS_BLOCK
    m_start = m_block * BLOCK_M
    if m_start >= length:
        return
    O = source(out, out_strides, batch_id, start, head, cu_seqlens_q, False)
    dO = source(dout, dout_strides, batch_id, start, head, cu_seqlens_q, False)
    o = load_rows(O, m_start, 0, used, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False, True)
    do = load_rows(dO, m_start, 0, used, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False, True)
    # beside a sink a row without keys has a finite lse; its O is 0 and its dO may hold anything
    do = tl.where(o == 0.0, 0.0, do)
    delta_i = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # (BLOCK_M,)
    offs_m = m_start + tl.arange(0, BLOCK_M)
    lse = statistics_of(lse, batch_id, head, nheads, seqlen_q, total_q, start, cu_seqlens_q)
    lse_i = tl.load(lse + offs_m, mask=offs_m < used, other=NEG_INF)
    if dlse is not None:
        dlse = statistics_of(dlse, batch_id, head, nheads, seqlen_q, total_q, start, cu_seqlens_q)
        delta_i -= tl.load(dlse + offs_m, mask=offs_m < used, other=0.0).to(tl.float32)
    unit = 1.0 if NATURAL else LOG2E
    empty = lse_i == NEG_INF
    delta_i = tl.where(empty, 0.0, delta_i * delta_scale)
    high_i = tl.where(empty, -NEG_INF, (lse_i * unit).to(tl.float32))
    delta_h = padded_statistics_of(
        delta_padded, batch_id, batch, head, nheads, seqlen_q, total_q, start, cu_seqlens_q, False
    )
    lse_h = padded_statistics_of(
        lse_padded, batch_id, batch, head, nheads, seqlen_q, total_q, start, cu_seqlens_q, False
    )
    if FOR_WGMMA:
        delta_i = -delta_i
        offs_m = offs_m // 16 * 16 + offs_m % 8 // 2 * 4 + offs_m // 8 % 2 * 2 + offs_m % 2
    tl.store(delta_h[0] + offs_m, delta_i)
    tl.store(lse_h[0] + offs_m, high_i)
    if NATURAL:
        low_i = (lse_i - high_i.to(lse_i.dtype)) / last_place(high_i)
        low_i = tl.where(empty, 0.0, low_i.to(tl.float32))
        tl.store(lse_h[0] + lse_h[1] + offs_m, low_i)
    if dq_sum is not None:
        first, _ = padded_statistics_of(
            tl.zeros((), tl.int64), batch_id, batch, head, nheads, seqlen_q, total_q, start,
            cu_seqlens_q, False,
        )  # fmt: skip
        flat = tl.arange(0, BLOCK_M * BLOCK_D)
        nothing = tl.zeros([BLOCK_M * BLOCK_D], tl.float32)
        tl.store(dq_sum + (first + m_start) * BLOCK_D + flat, nothing)
