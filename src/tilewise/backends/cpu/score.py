"""The score pipeline of the CPU backend: scale -> softcap -> ALiBi -> bias -> mask, and its
derivative.

Scores come out in base 2 (times log2 e, folded into the scaled queries), because exp2 is several
times faster than exp. With a float bias they stay in natural units, since a bias near the end of
float32's range, such as ``torch.finfo.min`` used as a mask, would overflow when multiplied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.units import LN2, LOG2E
from ...formats import philox
from .tiles import Chunk, Scratch

NEG_INF = float("-inf")

# Scores proven to lie within this many powers of two of 1 need no running maximum
# (docs/math/bounded-scores.md).
BOUND_LOG2 = 32.0
# The largest value of v must lie in this range, so that no weight times value leaves float32's
# normal numbers on either side.
BOUNDED_VALUES = (2.0**-60, 2.0**60)
# Norms, values and biases below this keep every intermediate finite.
TAME = 1e37
# Below this width baddbmm adds up in an order that loses digits; bmm does not.
NARROW = 16


def largest_element(x: Tensor) -> float:
    """The largest absolute value; NaN if any is, 0 without elements."""
    if x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x)
    return max(-float(low), float(high))


def largest_norm(x: Tensor, scratch: Scratch) -> float:
    """The largest Euclidean norm of a row (last dimension); NaN if any is, 0 without rows."""
    if x.numel() == 0:
        return 0.0
    norms = []
    for rows in (x,) if x.dtype == scratch.dtype else x.split(512, dim=1):
        wide = rows
        if x.dtype != scratch.dtype:
            wide = scratch.take("norm", *rows.shape).copy_(rows)
        norms.append(torch.linalg.vector_norm(wide, dim=-1).amax())
    norm = float(torch.stack(norms).amax())
    if norm < 1e-15:  # squares may have underflowed
        return math.sqrt(x.shape[-1]) * largest_element(x)
    return norm


class Scores:
    """Scores of one chunk, tile by tile.

    Attributes:
        bounded: every score is proven to lie within BOUND_LOG2 of 0, in base 2.
        tame: nothing that is hidden can turn a finite sum into NaN. When it is False every product
            takes the slow form that keeps hidden rows out.
    """

    def __init__(self, chunk: Chunk, dout: Tensor | None = None) -> None:
        c = self.chunk = chunk
        self.natural = c.attn_bias is not None and c.attn_bias.dtype != torch.bool
        self.unit = 1.0 if self.natural else LOG2E  # scores are natural scores times this
        self.q_factor = c.softmax_scale * self.unit
        if c.softcap > 0:
            self.q_factor = c.softmax_scale / c.softcap

        largest_v = largest_element(c.v)
        norms = largest_norm(c.q, c.scratch) * largest_norm(c.k, c.scratch)
        bound = norms * abs(c.softmax_scale) * LOG2E
        self.tame = bound < TAME and largest_v < TAME
        if dout is not None:
            self.tame = self.tame and largest_element(dout) < TAME
        if c.alibi_slopes is not None:
            largest = torch.finfo(c.work_dtype).max  # an infinity times distance 0 would be NaN
            self.slopes = (c.alibi_slopes * -self.unit).clamp_(-largest, largest)
            farthest = (c.seqlen_q + c.seqlen_k) * LOG2E
            self.tame = self.tame and largest_element(c.alibi_slopes) * farthest < TAME
        if self.natural and c.attn_bias is not None and c.attn_bias.numel():
            self.tame = self.tame and float(c.attn_bias.amax()) < TAME
        if c.softcap > 0 and self.tame:
            bound = min(bound, c.softcap * LOG2E)
        self.bounded = (
            self.tame
            and bound <= BOUND_LOG2
            and c.alibi_slopes is None
            and not self.natural
            and BOUNDED_VALUES[0] <= largest_v <= BOUNDED_VALUES[1]
        )
        self._hidden: dict[tuple[int, int, int], Tensor] = {}

    def load_q(self, start: int, stop: int) -> Tensor:
        """Rows of q times ``q_factor``, (nmat, G * n, D) in the work dtype."""
        return self.chunk.row_block("q", self.chunk.q, start, stop).mul_(self.q_factor)

    def tile(
        self, q: Tensor, k: Tensor, m: range, n: range, slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The tile of rows ``m`` and keys ``n``.

        Args:
            q: (nmat, G * len(m), D), from ``load_q``.
            k: (nmat, len(n), D) in the work dtype.
            m: rows of the sequence.
            n: keys of the sequence.
            slope: whether the derivative of the softcap is wanted.

        Returns:
            s (nmat, G * len(m), len(n)), -inf where hidden, and d s / d x or None, both in scratch
            memory.
        """
        c = self.chunk
        s = c.scratch.take("s", c.nmat, q.shape[1], len(n))
        torch.bmm(q, k.transpose(1, 2), out=s)
        dcap = None
        if c.softcap > 0:
            s.tanh_()
            if slope:
                dcap = c.scratch.take("dcap", *s.shape)
                torch.mul(s, s, out=dcap).neg_().add_(1.0)
            s.mul_(c.softcap * self.unit)
        rows = c.by_row(s)  # (B, Hk, G, len(m), len(n))
        if c.alibi_slopes is not None:
            rows.addcmul_(self.slopes, self._distance(m, n))
        if c.attn_bias is not None:
            self._add_bias(rows, m, n)
        if not c.mask.covers(m.start, m.stop, n.start, n.stop, c.seqlen_q, c.seqlen_k):
            self._hide(rows, self.outside_window(m, n))
        return s, dcap

    def exp_(self, s: Tensor) -> Tensor:
        """exp of a score minus its reference, in place."""
        return s.mul_(LOG2E).exp2_() if self.natural else s.exp2_()

    def to_lse(self, m: Tensor, total: Tensor) -> Tensor:
        """log-sum-exp in natural units and float64, from a reference and the sum relative to it."""
        return m.double() / self.unit + total.double().log2() * LN2

    def from_lse(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What to subtract from scores, and what the result of exp_ is to be multiplied with.

        exp(s - lse) = exp_(s - reference) * correction: the correction is what rounding the
        reference to the work dtype took away. Rows without keys get reference 0, where exp_(-inf)
        is 0.
        """
        exact = lse.masked_fill(lse == NEG_INF, 0.0) * self.unit
        reference = exact.to(self.chunk.work_dtype)
        correction = (reference.double() - exact) * (LOG2E if self.natural else 1.0)
        return reference, torch.exp2(correction).to(self.chunk.work_dtype)

    def keep_scale(self, m: range, n: range) -> Tensor | None:
        """keep / (1 - dropout_p), (nmat, G * len(m), len(n)); None without dropout."""
        c = self.chunk
        if c.seed is None:
            return None
        kept = philox.keep_mask(
            c.seed, c.dropout_p, batches=c.batches, heads=c.heads, rows=m, cols=n
        )
        scale = c.scratch.take("keep", *kept.shape)
        return scale.copy_(kept).mul_(1.0 / (1.0 - c.dropout_p)).view(c.nmat, -1, len(n))

    def bias_tile(self, x: Tensor, m: range, n: range) -> Tensor:
        """A tile's part of a (B, Hk, G, Sq, Sk) tensor with broadcast dimensions."""
        if x.shape[3] != 1:
            x = x[:, :, :, m.start : m.stop]
        return x[..., n.start : n.stop] if x.shape[4] != 1 else x

    def _distance(self, m: range, n: range) -> Tensor:
        """|i + seqlen_k - seqlen_q - j|, (len(m), len(n)) in the work dtype."""
        c = self.chunk
        d = torch.arange(m.start, m.stop, dtype=c.work_dtype) + (c.seqlen_k - c.seqlen_q)
        return (d[:, None] - torch.arange(n.start, n.stop, dtype=c.work_dtype)).abs_()

    def _add_bias(self, rows: Tensor, m: range, n: range) -> None:
        assert self.chunk.attn_bias is not None
        bias = self.bias_tile(self.chunk.attn_bias, m, n)
        if bias.dtype == torch.bool:
            self._hide(rows, ~bias)
            return
        rows.add_(bias)
        if not self.tame:
            self._hide(rows, bias == NEG_INF)

    def _hide(self, rows: Tensor, hidden: Tensor) -> None:
        """Sets hidden pairs to -inf; adding is several times faster, but NaN and inf survive it."""
        if self.tame and hidden.dtype == torch.bool:
            hidden = torch.zeros(hidden.shape, dtype=rows.dtype).masked_fill_(hidden, NEG_INF)
        if self.tame:
            rows.add_(hidden)
        else:
            rows.masked_fill_(hidden, NEG_INF)

    def outside_window(self, m: range, n: range) -> Tensor:
        """Pairs the window hides, (len(m), len(n)): 0 or -inf to add when tame, else bool.

        Tiles at the same place relative to the diagonal share one.
        """
        c = self.chunk
        shift = m.start + c.seqlen_k - c.seqlen_q - n.start
        key = (shift, len(m), len(n))
        if key not in self._hidden:
            d = torch.arange(len(m))[:, None] + shift
            j = torch.arange(len(n))[None, :]
            hidden = torch.zeros(len(m), len(n), dtype=torch.bool)
            if c.mask.window_right is not None:
                hidden |= j > d + c.mask.window_right
            if c.mask.window_left is not None:
                hidden |= j < d - c.mask.window_left
            if self.tame:
                hidden = torch.zeros(hidden.shape, dtype=c.work_dtype).masked_fill_(hidden, NEG_INF)
            if len(self._hidden) >= 8:
                self._hidden.clear()
            self._hidden[key] = hidden
        return self._hidden[key]


def narrow(chunk: Chunk, name: str, w: Tensor) -> Tensor:
    """Weights in the dtype of products: themselves, or a copy in scratch memory of this name."""
    if chunk.product_dtype == w.dtype:
        return w
    return chunk.scratch.take(name, *w.shape, dtype=chunk.product_dtype).copy_(w)


def accumulate(chunk: Chunk, acc: Tensor, w: Tensor, x: Tensor, seen: Tensor | None) -> None:
    """acc += w @ x.

    Args:
        chunk: whose scratch memory may be used.
        acc: (nmat, R, C), or (B, Hk, G, n, C) of which R = G * n rows; need not be contiguous.
        w: (nmat, R, K) in the product dtype.
        x: (nmat, K, C) in the product dtype.
        seen: None, or (nmat, R, K) bool: what is not finite in x reaches only rows that see it, as
            NaN.
    """
    taint = None
    if seen is not None:
        bad = ~torch.isfinite(x)
        w, x = w.to(chunk.work_dtype), x.to(chunk.work_dtype).masked_fill(bad, 0.0)
        taint = torch.bmm(seen.to(chunk.work_dtype), bad.to(chunk.work_dtype)) > 0
    elif acc.is_contiguous() and x.dtype == chunk.work_dtype and x.shape[2] >= NARROW:
        acc.view(chunk.nmat, -1, acc.shape[-1]).baddbmm_(w, x)
        return
    product = chunk.scratch.take("product", w.shape[0], w.shape[1], x.shape[2], dtype=x.dtype)
    torch.bmm(w, x, out=product)
    if taint is not None:
        product.masked_fill_(taint, float("nan"))
    if product.dtype != acc.dtype:  # adding across dtypes would convert in fresh memory
        product = chunk.scratch.take("product", *product.shape, dtype=acc.dtype).copy_(product)
    acc.add_(product.view(acc.shape))


def hidden_free(scores: Scores, s: Tensor) -> Tensor | None:
    """``accumulate``'s seen for a tile of scores: None when nothing hidden can do harm."""
    return None if scores.tame else s != NEG_INF
