"""The backward of FlashAttention and FlashAttention-2 on a CPU: outer loop over key blocks,
recomputation.

FlashAttention-2 (Dao 2023) Algorithm 2; the first paper's Algorithm 4 is the same loop with m and l
where this one reads lse = m + log l. Over key blocks j (outer) and query blocks i (inner), with Z =
keep / (1 - dropout_p):

    S = Q_i K_j^T            P = exp(S - lse_i)
    dV_j += (P Z)^T dO_i     dP = (dO_i V_j^T) Z      dS = P (dP - delta_i)
    dK_j += dS^T Q_i         dQ_i += dS K_j           delta_i = rowsum(dO_i O_i) - dlse_i

dQ is accumulated over key blocks in their order, so every run adds alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .score import NEG_INF, Scores, accumulate, hidden_free, narrow
from .tiles import BlockSizes, Chunk, Columns, block_sizes

BLOCK_M, BLOCK_N = 256, 256

# Beside a larger lse the logarithm of the sum has lost digits that count.
LARGE_LSE = {torch.float32: 2.0**20, torch.float64: 2.0**10}


class ChunkGradients:
    """Where one chunk's gradients go: views of the results, None where not wanted."""

    def __init__(
        self,
        dq: Tensor | None,  # (B, Sq, Hk, G, D)
        dk: Tensor | None,  # (B, Sk, Hk, D)
        dv: Tensor | None,  # (B, Sk, Hk, Dv)
        dbias: Tensor | None,  # shape of the chunk's attn_bias, work dtype, added to
        dsink: Tensor | None,  # (Hk, G), float64, added to
    ) -> None:
        self.dq, self.dk, self.dv, self.dbias, self.dsink = dq, dk, dv, dbias, dsink

    @property
    def needs_ds(self) -> bool:
        """Whether the gradient of the scores is wanted by anything."""
        return self.dq is not None or self.dk is not None or self.dbias is not None


def bwd(
    chunk: Chunk,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: ChunkGradients,
) -> None:
    """Computes the gradients of one chunk.

    Args:
        chunk: the call's tensors.
        out, dout: (B, Sq, Hk, G, Dv).
        lse: (B, Hk, G, Sq) float64, natural units.
        dlse: (B, Hk, G, Sq) or None.
        grads: where results are written.
    """
    c = chunk
    scores = Scores(c, dout)
    size = block_sizes(BLOCK_M, BLOCK_N, c.group, c.seqlen_q, c.seqlen_k)
    lse = lse.unsqueeze(-1)  # (B, Hk, G, Sq, 1)
    delta = _preprocess(c, out, lse, dout, dlse, size.BLOCK_M)
    scores.tame = scores.tame and bool(torch.isfinite(delta).all())
    reference, correction = scores.from_lse(lse)
    p_sink = _sink_weight(c, scores, lse)
    if bool((lse.abs() > LARGE_LSE[c.work_dtype]).logical_and(lse.isfinite()).any()):
        reference, correction = _statistics(c, scores, size)
        if c.sink is not None:
            sink = (c.sink * scores.unit)[..., None]
            p_sink = (scores.exp_(sink - reference) * correction).double()
    if grads.dsink is not None:
        grads.dsink.sub_((p_sink * delta).sum((0, 3, 4)))
    if grads.dbias is not None and grads.dbias.shape[-1] == 1:
        # one bias for all keys of a row: sum_j dS_ij = dlse_i + p_sink delta_i, whatever the keys
        total = p_sink * delta
        if dlse is not None:
            total = total + dlse.unsqueeze(-1).masked_fill(lse == NEG_INF, 0.0)
        grads.dbias.add_(total.sum_to_size(grads.dbias.shape))
        grads.dbias = None
    # exp(S - lse) = P' * correction: the row factor goes to dO and delta, which are small
    delta.mul_(correction)
    acc_dq = None
    if grads.dq is not None:
        # (B, Sq, Hk, G, D): dQ itself where it has the accumulator's dtype
        same = grads.dq.dtype == c.work_dtype
        acc_dq = grads.dq if same else torch.zeros(grads.dq.shape, dtype=c.work_dtype)
    # K for the scores, V, and K for dQ
    columns = c.columns("k", c.k), c.columns("v", c.v), c.columns("k_x", c.k, c.product_dtype)
    for n_start in range(0, c.seqlen_k, size.BLOCK_N):
        n = range(n_start, min(n_start + size.BLOCK_N, c.seqlen_k))
        _key_block(c, scores, columns, n, size, dout, reference, correction, delta, grads, acc_dq)
    if grads.dq is not None and acc_dq is not None:
        grads.dq.copy_(acc_dq.mul_(c.softmax_scale))


def _sink_weight(chunk: Chunk, scores: Scores, lse: Tensor) -> Tensor:
    """exp(sink - lse), (B, Hk, G, Sq, 1) float64, with the sink as the forward rounded it."""
    if chunk.sink is None:
        return torch.zeros_like(lse)
    sink = (chunk.sink * scores.unit).double() / scores.unit
    return torch.exp(sink[..., None] - lse).masked_fill_(lse == NEG_INF, 0.0)


def _statistics(chunk: Chunk, scores: Scores, size: BlockSizes) -> tuple[Tensor, Tensor]:
    """max_j S and 1 / sum_j exp(S - max), where lse has no digits left for the sum: two passes."""
    c = chunk
    keys = c.columns("k", c.k)

    def tiles() -> Iterator[tuple[slice, Tensor]]:
        for n_start in range(0, c.seqlen_k, size.BLOCK_N):
            n = range(n_start, min(n_start + size.BLOCK_N, c.seqlen_k))
            first, last = c.mask.rows_of(n.start, n.stop, c.seqlen_q, c.seqlen_k)
            for m_start in range(first, last, size.BLOCK_M):
                m = range(m_start, min(m_start + size.BLOCK_M, last))
                s, _ = scores.tile(scores.load_q(m.start, m.stop), keys.block(n), m, n)
                yield slice(m.start, m.stop), c.by_row(s)

    shape = (c.q.shape[0], c.q.shape[2], c.group, c.seqlen_q, 1)
    m_i = torch.full(shape, NEG_INF, dtype=c.work_dtype)
    sink = None if c.sink is None else (c.sink * scores.unit)[..., None]
    if sink is not None:
        m_i = torch.maximum(m_i, sink)
    for rows, s in tiles():
        m_i[:, :, :, rows] = torch.maximum(m_i[:, :, :, rows], s.amax(-1, keepdim=True))
    m_i.masked_fill_(m_i == NEG_INF, 0.0)
    l_i = torch.zeros_like(m_i)
    if sink is not None:
        l_i += scores.exp_(sink - m_i)
    for rows, s in tiles():
        l_i[:, :, :, rows] += scores.exp_(s.sub_(m_i[:, :, :, rows])).sum(-1, keepdim=True)
    return m_i, 1.0 / l_i.masked_fill_(l_i == 0, 1.0)


def _preprocess(
    chunk: Chunk, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, block: int
) -> Tensor:
    """delta (B, Hk, G, Sq, 1) in the work dtype; 0 in rows without keys."""
    delta = torch.empty(lse.shape, dtype=chunk.work_dtype)
    for start in range(0, chunk.seqlen_q, block):
        stop = min(start + block, chunk.seqlen_q)
        do, o = (
            chunk.by_row(chunk.row_block(name, x, start, stop))
            for name, x in (("do", dout), ("o", out))
        )
        delta[:, :, :, start:stop] = do.mul_(o).sum(-1, keepdim=True)
    if dlse is not None:
        delta.sub_(dlse.unsqueeze(-1))
    return delta.masked_fill_(lse == NEG_INF, 0.0)


def _key_block(
    chunk: Chunk,
    scores: Scores,
    columns: tuple[Columns, Columns, Columns],
    n: range,
    size: BlockSizes,
    dout: Tensor,
    reference: Tensor,
    correction: Tensor,
    delta: Tensor,
    grads: ChunkGradients,
    acc_dq: Tensor | None,
) -> None:
    """dK and dV of one key block, and its share of dQ and dbias."""
    c = chunk
    k, v, k_x = (x.block(n) for x in columns)
    acc_dk = c.scratch.take("acc_dk", c.nmat, len(n), k.shape[-1]).zero_()
    acc_dv = c.scratch.take("acc_dv", c.nmat, len(n), v.shape[-1]).zero_()
    first, last = c.mask.rows_of(n.start, n.stop, c.seqlen_q, c.seqlen_k)
    for block in range(first // size.BLOCK_M, -(-last // size.BLOCK_M) if first < last else 0):
        m = range(max(block * size.BLOCK_M, first), min((block + 1) * size.BLOCK_M, last))
        rows = slice(m.start, m.stop)
        q = scores.load_q(m.start, m.stop)
        do = c.row_block("do", dout, m.start, m.stop)
        c.by_row(do).mul_(correction[:, :, :, rows])
        s, dcap = scores.tile(q, k, m, n, slope=True)
        seen = hidden_free(scores, s)
        c.by_row(s).sub_(reference[:, :, :, rows])
        p = scores.exp_(s)
        if seen is not None:
            p.masked_fill_(~seen, 0.0)  # a row whose lse is NaN
        keep_scale = scores.keep_scale(m, n)
        if grads.dv is not None:
            weights = p
            if keep_scale is not None:
                weights = torch.mul(p, keep_scale, out=c.scratch.take("pz", *p.shape))
            weights, do_x = narrow(c, "p", weights), narrow(c, "do_x", do)
            accumulate(c, acc_dv, weights.mT, do_x, None if seen is None else seen.mT)
        if not grads.needs_ds:
            continue
        dp = torch.bmm(do, v.mT, out=c.scratch.take("dp", *p.shape))
        if keep_scale is not None:
            dp.mul_(keep_scale)
        c.by_row(dp).sub_(delta[:, :, :, rows])
        ds = dp.mul_(p)
        if seen is not None:
            ds.masked_fill_(~seen, 0.0)
        if grads.dbias is not None:
            into = scores.bias_tile(grads.dbias, m, n)
            into.add_(c.by_row(ds).sum_to_size(into.shape))
        if dcap is not None:
            ds.mul_(dcap)
            if seen is not None:
                ds.masked_fill_(~seen, 0.0)
        ds_x = narrow(c, "ds", ds)
        if grads.dk is not None:
            q_x = c.row_block("q_x", c.q, m.start, m.stop, c.product_dtype)
            accumulate(c, acc_dk, ds_x.mT, q_x, None if seen is None else seen.mT)
        if acc_dq is not None:
            accumulate(c, acc_dq[:, rows].permute(0, 2, 3, 1, 4), ds_x, k_x, seen)
    b, hk = c.k.shape[0], c.k.shape[2]
    cols = slice(n.start, n.stop)
    if grads.dk is not None:
        acc_dk.mul_(c.softmax_scale)
        grads.dk[:, cols].copy_(acc_dk.view(b, hk, len(n), -1).transpose(1, 2))
    if grads.dv is not None:
        grads.dv[:, cols].copy_(acc_dv.view(b, hk, len(n), -1).transpose(1, 2))
