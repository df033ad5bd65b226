"""The one-pass backward's last step: dQ from float32 memory to its own dtype."""

import triton
import triton.language as tl

from .tiles import (
    clear_slack,
    padded_statistics_of,
    rows_of_program,
    rows_of_sequence,
    source,
    store_rows,
)


@triton.jit(do_not_specialize=["batch", "nheads", "seqlen_q", "total_q", "num_m_blocks"])
def flash_bwd_convert_kernel(
    dq_sum,
    dq,
    cu_seqlens_q,
    seqused_q,
    dq_strides,
    batch,
    nheads,
    seqlen_q,
    total_q,
    num_m_blocks,
    grad_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scales and rounds dQ, and puts it in order.

    Computes: dQ = grad_scale dq_sum, 0 in rows that are not used.
    Grid: flat over blocks of BLOCK_M rows, heads and sequences.
    Numerics: one rounding.
    Source: ours; the order is that of ``gluon.bwd_steps_sm90.in_register_order``.
    """
    m_block, head, batch_id = rows_of_program(num_m_blocks, nheads)
    start, length, used = rows_of_sequence(batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q)
    clear_slack(
        dq, dq_strides, batch_id, batch, head, m_block, num_m_blocks, cu_seqlens_q, total_q,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    m_start = m_block * BLOCK_M
    if m_start >= length:
        return
    first, _ = padded_statistics_of(
        tl.zeros((), tl.int64), batch_id, batch, head, nheads, seqlen_q, total_q, start,
        cu_seqlens_q, False,
    )  # fmt: skip
    dQ = source(dq, dq_strides, batch_id, start, head, cu_seqlens_q, False)
    base = dq_sum + (first + m_start) * BLOCK_D
    halves = tl.load(base + tl.arange(0, BLOCK_M * BLOCK_D)) * grad_scale
    # half of the columns, block of columns, warp, row, pair, half of rows, parity
    halves = halves.reshape([2, BLOCK_D // 16, 4, 8, 4, 2, 2])
    tile = halves.permute([2, 5, 3, 0, 1, 4, 6])
    tile = tile.reshape([BLOCK_M, BLOCK_D])
    tile = tl.where(((m_start + tl.arange(0, BLOCK_M)) < used)[:, None], tile, 0.0)
    store_rows(dQ, m_start, length, tile, BLOCK_M, HEAD_DIM, BLOCK_D)
