"""The oracle: attention from its definition, with the scores materialised.

With ``d = i + seqlen_k - seqlen_q`` and query head h reading key and value head ``h // (nheads /
nheads_kv)``:

    x_ij = softmax_scale * <q_i, k_j>
    s_ij = softcap * tanh(x_ij / softcap)  (softcap > 0, else x_ij)  - slope_h * |d - j|  + bias_ij
    j is seen by i when  d - window_left <= j <= d + window_right,  the bool mask is True  and
        bias_ij != -inf
    lse_i = log( sum over seen j of exp(s_ij)  [+ exp(sink_h)] )
    p_ij = exp(s_ij - lse_i) where seen, else 0
    out_i = sum_j p_ij z_ij v_j    with  z_ij = keep_ij / (1 - dropout_p)

and, for L = <out, dout> + <lse, dlse>,

    dp_ij = <dout_i, v_j> z_ij                      dv_j = sum_i p_ij z_ij dout_i
    delta_i = sum_j p_ij dp_ij - dlse_i             ds_ij = p_ij (dp_ij - delta_i)
    dx_ij = ds_ij (1 - tanh(x_ij / softcap)^2)      dbias = ds, summed to the bias's shape
    dq_i = softmax_scale sum_j dx_ij k_j            dk_j = softmax_scale sum_i dx_ij q_i
    dsink_h = - sum_i exp(sink_h - lse_i) delta_i

A row that sees no key gives out = 0 and lse = -inf (lse = sink with a sink) and sends no gradient.
What is not finite reaches a row only through keys that the row sees, and then as NaN.

Both directions are composites of torch functions, so autograd differentiates them: double backward
is the derivative of ``backward``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import features
from ..core.problem import VARLEN, AttentionProblem
from ..formats import philox, varlen
from .base import AttentionTensors, Gradients, InTorch, Wanted, lse_dtype, packed_sequences

NEG_INF = float("-inf")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with 0 where it is not finite, and where that was."""
    bad = ~torch.isfinite(x)
    return x.masked_fill(bad, 0.0), bad


@dataclass(slots=True)
class _Scores:
    """What the definition says before the softmax; heads are nheads, not grouped."""

    s: Tensor  # (B, H, Sq, Sk), -inf where hidden
    seen: Tensor  # (B, H, Sq, Sk) bool
    slope: Tensor | None  # d s / d x of the softcap
    q: Tensor  # (B, H, Sq, D), finite
    k: Tensor  # (B, H, Sk, D), finite


def _by_head(x: Tensor, nheads: int, dtype: torch.dtype) -> Tensor:
    """(B, S, Hk, D) to (B, nheads, S, D)."""
    x = x.to(dtype).transpose(1, 2)
    return x.repeat_interleave(nheads // x.shape[1], dim=1) if x.shape[1] != nheads else x


def _scores(problem: AttentionProblem, t: AttentionTensors, dtype: torch.dtype) -> _Scores:
    nheads = problem.nheads
    q, bad_q = _finite(_by_head(t.q, nheads, dtype))
    k, bad_k = _finite(_by_head(t.k, nheads, dtype))
    sq, sk = q.shape[2], k.shape[2]
    device = q.device
    d = torch.arange(sq, device=device)[:, None] + (sk - sq)
    j = torch.arange(sk, device=device)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if problem.mask.window_right is not None:
        seen = seen & (j <= d + problem.mask.window_right)
    if problem.mask.window_left is not None:
        seen = seen & (j >= d - problem.mask.window_left)
    bias = None
    if t.attn_bias is not None:
        if t.attn_bias.dtype == torch.bool:
            seen = seen & t.attn_bias
        else:
            seen = seen & (t.attn_bias != NEG_INF)
            bias = t.attn_bias.to(dtype)

    x = (q @ k.mT) * problem.softmax_scale
    slope = None
    if problem.softcap > 0:
        tanh = torch.tanh(x / problem.softcap)
        x, slope = problem.softcap * tanh, 1 - tanh * tanh
    if t.alibi_slopes is not None:
        slopes = t.alibi_slopes.to(dtype).expand(q.shape[0], nheads)
        x = x - slopes[:, :, None, None] * (d - j).abs().to(dtype)
    seen = seen.expand(x.shape)
    if bias is not None:
        x = x + torch.where(seen, bias, torch.zeros((), dtype=dtype, device=device))
    bad = bad_q.any(-1)[..., :, None] | bad_k.any(-1)[..., None, :]
    s = x.masked_fill(bad, float("nan")).masked_fill(~seen, NEG_INF)
    return _Scores(s, seen, slope, q, k)


def _softmax(sc: _Scores, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """p (B, H, Sq, Sk), lse and the sink's weight, (B, H, Sq)."""
    s = sc.s
    m = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], NEG_INF)
    if sink is not None:
        sink = sink.to(s.dtype)[None, :, None]
        m = torch.maximum(m, sink.detach())
    m = m.masked_fill(m == NEG_INF, 0.0)
    total = torch.exp(s - m[..., None]).sum(-1)
    p_sink = torch.zeros_like(total) if sink is None else torch.exp(sink - m)
    total = total + p_sink
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (m + torch.log(total)).masked_fill(empty, NEG_INF)
    # not exp(s - lse): beside a large m the sum's logarithm is lost
    p = torch.exp(s - m[..., None]) / total[..., None]
    return p.masked_fill(~sc.seen, 0.0), lse, p_sink / total


def _keep_scale(problem: AttentionProblem, t: AttentionTensors, first: int, p: Tensor) -> Tensor:
    """keep / (1 - dropout_p), (B, H, Sq, Sk)."""
    b, h, sq, sk = p.shape
    assert t.seed is not None
    keep = philox.keep_mask(
        int(t.seed),
        problem.dropout_p,
        batches=range(first, first + b),
        heads=range(h),
        rows=range(sq),
        cols=range(sk),
        device=p.device,
    )
    return keep.to(p.dtype) / (1.0 - problem.dropout_p)


def _dropped(problem: AttentionProblem, t: AttentionTensors, first: int, p: Tensor) -> Tensor:
    return p * _keep_scale(problem, t, first, p) if problem.dropout_p > 0 else p


def forward(
    problem: AttentionProblem, t: AttentionTensors, dtype: torch.dtype, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition for dense tensors.

    Args:
        problem: facts of the call.
        t: dense tensors; ``attn_bias`` broadcasts to (B, H, Sq, Sk).
        dtype: what everything is computed in.
        first: number of the first batch entry, for dropout.

    Returns:
        out (B, Sq, H, Dv), lse (B, H, Sq) and the dropped-out probabilities (B, H, Sq, Sk), in
        ``dtype``.
    """
    sc = _scores(problem, t, dtype)
    p, lse, _ = _softmax(sc, t.sink)
    p = _dropped(problem, t, first, p)
    v, bad_v = _finite(_by_head(t.v, problem.nheads, dtype))
    out = (p @ v).masked_fill((sc.seen.to(dtype) @ bad_v.to(dtype)) > 0, float("nan"))
    out = out.masked_fill((lse == NEG_INF)[..., None], 0.0)
    return out.transpose(1, 2), lse, p


def backward(
    problem: AttentionProblem,
    t: AttentionTensors,
    dout: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
    first: int = 0,
) -> Gradients:
    """The gradients by the formulas above, for dense tensors; recomputes out and lse.

    Args:
        problem: facts of the call.
        t: dense tensors.
        dout: (B, Sq, H, Dv).
        dlse: (B, H, Sq), or None for zero.
        dtype: what everything is computed in.
        first: number of the first batch entry, for dropout.

    Returns:
        dq, dk, dv and, where the call has them, dbias and dsink, in ``dtype``.
    """
    sc = _scores(problem, t, dtype)
    p, lse, p_sink = _softmax(sc, t.sink)
    empty = (lse == NEG_INF)[..., None]
    do = dout.to(dtype).transpose(1, 2).masked_fill(empty, 0.0)
    v, bad_v = _finite(_by_head(t.v, problem.nheads, dtype))
    do_finite, bad_do = _finite(do)
    hidden = ~sc.seen
    keep_scale = _keep_scale(problem, t, first, p) if problem.dropout_p > 0 else None

    weights = p if keep_scale is None else p * keep_scale
    taint = sc.seen.to(dtype).mT @ bad_do.to(dtype)
    dv = (weights.mT @ do_finite).masked_fill(taint > 0, float("nan"))
    dp = do_finite @ v.mT
    bad = bad_do.any(-1)[..., :, None] | bad_v.any(-1)[..., None, :]
    dp = dp.masked_fill(bad, float("nan")).masked_fill(hidden, 0.0)
    if keep_scale is not None:
        dp = dp * keep_scale
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(dtype)[..., None].masked_fill(empty, 0.0)
    ds = (p * (dp - delta)).masked_fill(hidden, 0.0)
    dx = ds if sc.slope is None else (ds * sc.slope).masked_fill(hidden, 0.0)
    dq = (dx @ sc.k) * problem.softmax_scale
    dk = (dx.mT @ sc.q) * problem.softmax_scale

    group = problem.group
    grads = Gradients(
        dq=dq.transpose(1, 2),
        dk=dk.unflatten(1, (-1, group)).sum(2).transpose(1, 2),
        dv=dv.unflatten(1, (-1, group)).sum(2).transpose(1, 2),
    )
    if t.attn_bias is not None and t.attn_bias.dtype != torch.bool:
        grads.dbias = ds.sum_to_size(t.attn_bias.shape)
    if t.sink is not None:
        grads.dsink = -(p_sink * delta.squeeze(-1)).sum((0, 2))
    return grads


def _one_sequence(t: AttentionTensors, rows: varlen.SequenceRows) -> AttentionTensors:
    """The dense call of batch size 1 that a packed sequence stands for."""
    q_rows, k_rows = slice(rows.q_start, rows.q_stop), slice(rows.k_start, rows.k_stop)
    bias, slopes = t.attn_bias, t.alibi_slopes
    if bias is not None:
        bias = bias[None, :, q_rows, : rows.k_stop - rows.k_start]
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[rows.index]
    return t._replace(
        q=t.q[None, q_rows],
        k=t.k[None, k_rows],
        v=t.v[None, k_rows],
        attn_bias=bias,
        alibi_slopes=slopes,
    )


def attention(
    problem: AttentionProblem, t: AttentionTensors, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``forward`` for dense and packed tensors alike.

    Returns:
        out, lse and the dropped-out probabilities in ``dtype``. In varlen out is (total_q, H, Dv),
        lse (H, total_q) and the probabilities (batch, H, max_seqlen_q, max_seqlen_k), zero past
        each sequence.
    """
    if problem.layout != VARLEN:
        return forward(problem, t, dtype)
    out = t.q.new_zeros(t.q.shape[0], problem.nheads, problem.head_dim_v, dtype=dtype)
    lse = t.q.new_full((problem.nheads, t.q.shape[0]), NEG_INF, dtype=dtype)
    probs = t.q.new_zeros(
        problem.batch, problem.nheads, problem.seqlen_q, problem.seqlen_k, dtype=dtype
    )
    for rows in packed_sequences(problem, t):
        o, s, p = forward(problem, _one_sequence(t, rows), dtype, first=rows.index)
        out[rows.q_start : rows.q_stop] = o[0]
        lse[:, rows.q_start : rows.q_stop] = s[0]
        probs[rows.index, :, : p.shape[2], : p.shape[3]] = p[0]
    return out, lse, probs


def attention_backward(
    problem: AttentionProblem,
    t: AttentionTensors,
    dout: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
) -> Gradients:
    """``backward`` for dense and packed tensors alike; differentiable by autograd."""
    if problem.layout != VARLEN:
        return backward(problem, t, dout, dlse, dtype)
    grads = Gradients(
        dq=torch.zeros_like(t.q, dtype=dtype, memory_format=torch.contiguous_format),
        dk=torch.zeros_like(t.k, dtype=dtype, memory_format=torch.contiguous_format),
        dv=torch.zeros_like(t.v, dtype=dtype, memory_format=torch.contiguous_format),
    )
    assert grads.dq is not None and grads.dk is not None and grads.dv is not None
    if t.attn_bias is not None and t.attn_bias.dtype != torch.bool:
        grads.dbias = torch.zeros_like(
            t.attn_bias, dtype=dtype, memory_format=torch.contiguous_format
        )
    if t.sink is not None:
        grads.dsink = torch.zeros_like(t.sink, dtype=dtype)
    for rows in packed_sequences(problem, t):
        q_rows, k_rows = slice(rows.q_start, rows.q_stop), slice(rows.k_start, rows.k_stop)
        one = backward(
            problem,
            _one_sequence(t, rows),
            dout[None, q_rows],
            None if dlse is None else dlse[None, :, q_rows],
            dtype,
            first=rows.index,
        )
        assert one.dq is not None and one.dk is not None and one.dv is not None
        grads.dq[q_rows] = one.dq[0]
        grads.dk[k_rows] = one.dk[0]
        grads.dv[k_rows] = one.dv[0]
        if grads.dbias is not None and one.dbias is not None:
            grads.dbias[:, q_rows, : one.dbias.shape[3]] = one.dbias[0]
        if grads.dsink is not None and one.dsink is not None:
            grads.dsink = grads.dsink + one.dsink
    return grads


class ReferenceBackend(InTorch):
    """The definition as a backend. Taken by name only: it holds O(N^2) scores in memory."""

    name = "reference"
    algorithms = ("standard",)
    automatic = False

    def supports(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See ``Backend.supports``."""
        return features.reasons_against(
            self.name, problem.dtype, problem.features, problem.needs_grad
        )

    def fwd(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> tuple[Tensor, Tensor]:
        """See ``InTorch.fwd``."""
        dtype = compute_dtype(tensors.q.dtype)
        out, lse, _ = attention(problem, tensors, dtype)
        return out.to(tensors.q.dtype).contiguous(), lse.to(lse_dtype(tensors)).contiguous()

    def bwd(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
        algorithm: str,
    ) -> Gradients:
        """See ``InTorch.bwd``."""
        t = tensors
        g = attention_backward(problem, t, dout, dlse, compute_dtype(t.q.dtype))

        def final(grad: Tensor | None, like: Tensor | None, want: bool) -> Tensor | None:
            if not want or grad is None or like is None:
                return None
            return grad.to(like.dtype).contiguous()

        return Gradients(
            dq=final(g.dq, t.q, wanted.dq),
            dk=final(g.dk, t.k, wanted.dk),
            dv=final(g.dv, t.v, wanted.dv),
            dbias=final(g.dbias, t.attn_bias, wanted.dbias),
            dsink=final(g.dsink, t.sink, wanted.dsink),
        )
