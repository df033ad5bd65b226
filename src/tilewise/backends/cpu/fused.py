"""bfloat16 weights from one fused operator: Q K^T, exp and rounding to bfloat16 in a single pass.

A CPU multiplies bfloat16 matrices fast, but a product that is handed back in bfloat16 has lost the
scores' low bits. oneDNN applies a function to the float32 accumulator before it rounds, and the
logistic function is one of them. Shifted far enough down it is the exponential:

    sigmoid(x) = exp(x) / (1 + exp(x)),    so   |sigmoid(s - c) / exp(s - c) - 1| < exp(max s - c)

With c = max |s| + MARGIN by Cauchy-Schwarz (docs/math/bounded-scores.md) the difference is below
exp(-12) < 2^-17, far under bfloat16's rounding of 2^-9. Scores themselves are never rounded. The
sum l is taken of the rounded weights, so that those which multiply V add up to one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.units import LN2, LOG2E
from .score import BOUNDED_VALUES, Scores, accumulate
from .tiles import Chunk, Columns

MARGIN = 12.0
# Weights lie above exp(-2 * BOUND - MARGIN) > 2^-76; times values from 2^-40 on they stay normal.
BOUND = 20.0
SMALLEST_VALUE = 2.0**-40
# Rounding errors average out over the keys of a row; a row with few keys takes the general path.
MIN_KEYS = 64
# Keys of a tile that every row sees, and of one at the edge of the mask.
BLOCK_N, BLOCK_N_EDGE = 512, 256


def applies(chunk: Chunk, scores: Scores, rows: range) -> bool:
    """Whether this block of queries may take the fused operator."""
    c = chunk
    if c.product_dtype != torch.bfloat16 or not scores.tame or scores.bound_log2 * LN2 > BOUND:
        return False
    if not SMALLEST_VALUE <= scores.largest_v <= BOUNDED_VALUES[1]:
        return False
    if not rows or c.softcap > 0 or c.attn_bias is not None or c.seed is not None:
        return False
    first = c.mask.keys_of(rows.start, rows.start + 1, c.seqlen_q, c.seqlen_k)
    last = c.mask.keys_of(rows.stop - 1, rows.stop, c.seqlen_q, c.seqlen_k)
    return min(first[1] - first[0], last[1] - last[0]) >= MIN_KEYS


class Weights:
    """exp(s - shift) of one block of queries, in bfloat16, key block by key block."""

    def __init__(self, chunk: Chunk, scores: Scores, rows: range) -> None:
        self.chunk, self.scores = chunk, scores
        self.shift = math.ceil(2 * (scores.bound_log2 * LN2 + MARGIN)) / 2  # exact in bfloat16
        q = chunk.row_block("q", chunk.q, rows.start, rows.stop).mul_(chunk.softmax_scale)
        self.q = chunk.scratch.take("q16", *q.shape, dtype=torch.bfloat16).copy_(q)
        # unless the scale is a power of two, scaled queries are the sum of two that bfloat16 holds
        self.twice = abs(math.frexp(chunk.softmax_scale)[0]) != 0.5
        if self.twice:
            self.q = torch.cat((self.q, q.sub_(self.q).to(torch.bfloat16)), dim=-1)

    def tile(self, m: range, here: slice, k: Tensor, n: range) -> Tensor:
        """(nmat, G * len(m), len(n)), 0 where hidden, in scratch memory."""
        c = self.chunk
        q = self.q
        if len(m) * c.group < q.shape[1]:
            q = c.by_row(q)[:, :, :, here].reshape(c.nmat, -1, q.shape[-1])
        if self.twice:
            k = torch.cat((k, k), dim=-1)
        bias = torch.full((len(n),), -self.shift, dtype=torch.bfloat16)
        fused = torch.ops.mkldnn._linear_pointwise
        p = c.scratch.take("p", c.nmat, q.shape[1], len(n), dtype=torch.bfloat16)
        torch.stack([fused(q[i], k[i], bias, "sigmoid", [], "") for i in range(c.nmat)], out=p)
        if not c.mask.covers(m.start, m.stop, n.start, n.stop, c.seqlen_q, c.seqlen_k):
            c.by_row(p).mul_(self.scores.outside_window(m, n).exp().to(torch.bfloat16))
        return p


def query_block(
    chunk: Chunk, scores: Scores, k: Columns, v: Columns, rows: range
) -> tuple[Tensor, Tensor, Tensor]:
    """As fa2's: unscaled O, m and l of one block of queries; m is the shift."""
    c = chunk
    shape = (c.q.shape[0], c.q.shape[2], c.group, len(rows))
    weights = Weights(c, scores, rows)
    acc_o = c.scratch.take("acc_o", *shape, c.v.shape[-1]).zero_()
    l_i = torch.zeros(*shape, 1)
    n_start, n_max = c.mask.keys_of(rows.start, rows.stop, c.seqlen_q, c.seqlen_k)
    while n_start < n_max:
        n = range(n_start, min(n_start + BLOCK_N, n_max))
        if not c.mask.covers(rows.start, rows.stop, n.start, n.stop, c.seqlen_q, c.seqlen_k):
            n = range(n_start, min(n_start + BLOCK_N_EDGE, n_max))
        n_start = n.stop
        first, last = c.mask.rows_of(n.start, n.stop, c.seqlen_q, c.seqlen_k)
        m = range(max(rows.start, first), min(rows.stop, last))
        here = slice(m.start - rows.start, m.stop - rows.start)
        p = weights.tile(m, here, k.block(n), n)
        l_m = l_i[:, :, :, here]
        wide = c.scratch.take("wide", *p.shape).copy_(p)  # p.sum(dtype=) would copy to fresh memory
        l_m.add_(wide.sum(-1).view(l_m.shape))
        accumulate(c, acc_o[:, :, :, here], p, v.block(n), None)
    return acc_o, torch.full_like(l_i, weights.shift * LOG2E), l_i
