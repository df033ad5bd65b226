"""FlashAttention's forward (Dao et al. 2022, Algorithm 1) on a CPU: outer loop over key blocks.

O, l and m of every row stay in memory between key blocks, and O is kept normalised: each visit of a
query block undoes the last normalisation and applies the new one. Over key blocks j (outer) and
query blocks i (inner):

    S = Q_i K_j^T      m~ = rowmax S      P~ = exp(S - m~)      l~ = rowsum P~
    m' = max(m, m~)    l' = exp(m - m') l + exp(m~ - m') l~
    O_i = ( exp(m - m') l O_i + exp(m~ - m') P~ V_j ) / l'

It exists to be read beside the paper and measured against fa2. The backward is shared (``bwd.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .score import NEG_INF, Scores, accumulate, hidden_free
from .tiles import Chunk, block_sizes, store_rows

BLOCK_M, BLOCK_N = 256, 256


def fwd(chunk: Chunk, out: Tensor, lse: Tensor) -> None:
    """Writes out (B, Sq, Hk, G, Dv) and lse (B, Hk, G, Sq), natural units, of one chunk."""
    c = chunk
    scores = Scores(c)
    size = block_sizes(BLOCK_M, BLOCK_N, c.group, c.seqlen_q, c.seqlen_k)
    b, hk, sq = c.q.shape[0], c.q.shape[2], c.seqlen_q
    o = torch.zeros(b, hk, c.group, sq, c.v.shape[-1], dtype=c.work_dtype)
    m_i = torch.full((b, hk, c.group, sq, 1), NEG_INF, dtype=c.work_dtype)
    l_i = torch.zeros_like(m_i)
    if c.sink is not None:  # a key without a value, seen by every row first
        m_i = m_i.maximum((c.sink * scores.unit)[..., None])
        l_i = l_i + (m_i != NEG_INF).to(c.work_dtype)
    keys, values = c.columns("k", c.k), c.columns("v", c.v)
    for n_start in range(0, c.seqlen_k, size.BLOCK_N):
        n = range(n_start, min(n_start + size.BLOCK_N, c.seqlen_k))
        k, v = keys.block(n), values.block(n)
        first, last = c.mask.rows_of(n.start, n.stop, sq, c.seqlen_k)
        for m_start in range(first, last, size.BLOCK_M):
            m = range(m_start, min(m_start + size.BLOCK_M, last))
            rows = slice(m.start, m.stop)
            _visit(c, scores, k, v, m, n, o[:, :, :, rows], m_i[:, :, :, rows], l_i[:, :, :, rows])
    lse.copy_(scores.to_lse(m_i, l_i).squeeze(-1))
    store_rows(out, 0, sq, o)


def _visit(
    chunk: Chunk,
    scores: Scores,
    k: Tensor,
    v: Tensor,
    m: range,
    n: range,
    o: Tensor,
    m_i: Tensor,
    l_i: Tensor,
) -> None:
    """One inner step: folds key block n into rows m of O, m and l, in place."""
    s, _ = scores.tile(scores.load_q(m.start, m.stop), k, m, n)
    seen = hidden_free(scores, s)
    rows = chunk.by_row(s)
    m_tilde = rows.amax(-1, keepdim=True)
    m_new = torch.maximum(m_i, m_tilde)
    reference = m_new.masked_fill(m_new == NEG_INF, 0.0)
    p = scores.exp_(rows.sub_(m_tilde.masked_fill(m_tilde == NEG_INF, 0.0)))
    old, new = scores.exp_(m_i - reference), scores.exp_(m_tilde - reference)
    l_new = old * l_i + new * p.sum(-1, keepdim=True)
    keep_scale = scores.keep_scale(m, n)
    if keep_scale is not None:
        p.view(s.shape).mul_(keep_scale)
    p.mul_(new)
    o.mul_(old * l_i)
    accumulate(chunk, o, p.view(s.shape), v, seen)
    o.div_(l_new.masked_fill(l_new == 0, 1.0))
    m_i.copy_(m_new)
    l_i.copy_(l_new)
