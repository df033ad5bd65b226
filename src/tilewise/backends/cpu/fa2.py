"""FlashAttention-2's forward (Dao 2023, Algorithm 1) on a CPU: outer loop over query blocks.

For each block of queries Q_i, over the key blocks j that it sees:

    S = Q_i K_j^T      m' = max(m, rowmax S)      P = exp(S - m')
    l = exp(m - m') l + rowsum P                  O = exp(m - m') O + P V_j      (unscaled)
    at the end, once:  O_i = O / l                lse_i = m + log l

When all scores are proven small (``Scores.bounded``, Cauchy-Schwarz), m stays 0: no maximum, no
rescaling, and the same result, since float32 keeps its relative accuracy over the whole range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .score import NEG_INF, Scores, accumulate, hidden_free
from .tiles import Chunk, Columns, block_sizes, store_rows

BLOCK_M, BLOCK_N = 512, 256


def fwd(chunk: Chunk, out: Tensor, lse: Tensor) -> None:
    """Writes out (B, Sq, Hk, G, Dv) and lse (B, Hk, G, Sq), natural units, of one chunk."""
    scores = Scores(chunk)
    size = block_sizes(BLOCK_M, BLOCK_N, chunk.group, chunk.seqlen_q, chunk.seqlen_k)
    k, v = chunk.columns("k", chunk.k), chunk.columns("v", chunk.v)
    for m_start in range(0, chunk.seqlen_q, size.BLOCK_M):
        m_stop = min(m_start + size.BLOCK_M, chunk.seqlen_q)
        rows = range(m_start, m_stop)
        acc_o, m_i, l_i = _query_block(chunk, scores, k, v, rows, size.BLOCK_N)
        if chunk.sink is not None:
            sink = (chunk.sink * scores.unit)[..., None]  # (1, Hk, G, 1, 1)
            m_new = torch.maximum(m_i, sink)
            m_new.masked_fill_(m_new == NEG_INF, 0.0)
            alpha = scores.exp_(m_i - m_new)
            acc_o.mul_(alpha)
            l_i.mul_(alpha).add_(scores.exp_(sink - m_new))
            m_i = m_new
        lse[..., m_start:m_stop] = scores.to_lse(m_i, l_i).squeeze(-1)
        acc_o.div_(l_i.masked_fill(l_i == 0, 1.0))
        store_rows(out, m_start, m_stop, acc_o)


def _query_block(
    chunk: Chunk, scores: Scores, k: Columns, v: Columns, rows: range, BLOCK_N: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Unscaled O (B, Hk, G, n, Dv), m and l (B, Hk, G, n, 1) of one block of queries."""
    c = chunk
    b, hk = c.q.shape[0], c.q.shape[2]
    q = scores.load_q(rows.start, rows.stop)
    acc_o = c.scratch.take("acc_o", b, hk, c.group, len(rows), c.v.shape[-1]).zero_()
    m_i = q.new_full((b, hk, c.group, len(rows), 1), 0.0 if scores.bounded else NEG_INF)
    l_i = q.new_zeros(m_i.shape)
    n_min, n_max = c.mask.keys_of(rows.start, rows.stop, c.seqlen_q, c.seqlen_k)
    starts = range(n_min // 16 * 16, n_max, BLOCK_N) if n_min < n_max else range(0)
    for n_start in starts:
        n = range(n_start, min(n_start + BLOCK_N, n_max))
        # only the rows of the block that see one of these keys
        first, last = c.mask.rows_of(n.start, n.stop, c.seqlen_q, c.seqlen_k)
        m = range(max(rows.start, first), min(rows.stop, last))
        q_m, acc, m_m, l_m = q, acc_o, m_i, l_i
        if len(m) < len(rows):
            here = slice(m.start - rows.start, m.stop - rows.start)
            q_m = c.by_row(q)[:, :, :, here].reshape(c.nmat, -1, q.shape[-1])
            acc, m_m, l_m = (x[:, :, :, here] for x in (acc_o, m_i, l_i))
        s, _ = scores.tile(q_m, k.block(n), m, n)
        seen = hidden_free(scores, s)
        if not scores.bounded:
            by_row = c.by_row(s)
            m_new = torch.maximum(m_m, by_row.amax(-1, keepdim=True))
            reference = m_new.masked_fill(m_new == NEG_INF, 0.0)
            alpha = scores.exp_(m_m - reference)
            m_m.copy_(m_new)
            l_m.mul_(alpha)
            acc.mul_(alpha)
            by_row.sub_(reference)
        p = scores.exp_(s)
        l_m.add_(p.sum(-1).view(l_m.shape))
        keep_scale = scores.keep_scale(m, n)
        if keep_scale is not None:
            p.mul_(keep_scale)
        accumulate(c, acc, p, v.block(n), seen)
    return acc_o, m_i, l_i
