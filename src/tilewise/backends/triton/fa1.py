"""Launches FlashAttention 1: a program for each head, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels.triton.fa1_bwd import fa1_bwd_kernel
from ...kernels.triton.fa1_fwd import fa1_fwd_kernel
from ...tuning import lookup
from ..base import AttentionTensors, Gradients, Wanted
from . import launch
from .bwd import bias_gradient, preprocess, sink_gradient


def fwd(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
    """out and lse; see ``Backend.fwd``."""
    p, t = problem, tensors
    config = lookup.config("fa1_fwd", launch.arch(t.q), p)
    q = t.q.neg() if p.softmax_scale < 0 else t.q
    out, lse = launch.outputs(p, q)
    if out.shape[-3] * p.nheads * p.batch == 0:
        return out.zero_(), lse
    shared = launch.shared_arguments(p, t)
    tiles = ((config.BLOCK_M, shared["BLOCK_D"]),)
    (q_in,), use_tma = launch.streams((q,), tiles, config)
    rows = _scratch_rows(p, q, config)
    fa1_fwd_kernel[(p.nheads * p.batch,)](
        q_in,
        t.k,
        t.v,
        out,
        lse,
        *(_scratch(p, q, rows, width) for width in (shared["BLOCK_DV"], 1, 1)),
        sink=t.sink,
        **launch.row_strides(q=q, k=t.k, v=t.v, out=out),
        **shared,
        scratch_rows=rows,
        **launch.options(config, use_tma, q),
    )
    return out, lse


def bwd(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """See ``Backend.bwd``; dQ, dK and dV come from one kernel, wanted or not."""
    p, t = problem, tensors
    arch = launch.arch(t.q)
    if p.softmax_scale < 0:
        t = launch.with_q(t, t.q.neg())
    lse_padded, delta = preprocess(p, t, out, lse, dout, dlse)
    grads = Gradients()
    if wanted.dq or wanted.dk or wanted.dv:
        grads = _dqkv(p, t, dout, lse_padded, delta, lookup.config("fa1_bwd", arch, p))
        if p.softmax_scale < 0:
            assert grads.dq is not None
            grads.dq.neg_()
    if wanted.dbias:
        assert t.attn_bias is not None
        shared = launch.shared_arguments(p, t)
        config = lookup.config("bwd_dbias", arch, p)
        rows = (t.q, t.k, t.v, dout)
        grads.dbias = bias_gradient(p, rows, lse_padded, delta, t.attn_bias, shared, config)
    if wanted.dsink:
        assert t.sink is not None
        grads.dsink = sink_gradient(p, t, lse, out, dout, dlse)
    return grads


def _dqkv(
    p: AttentionProblem,
    t: AttentionTensors,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    config: TileConfig,
) -> Gradients:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (t.q, t.k, t.v))
    if p.nheads_kv * p.batch == 0:
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_())
    shared = launch.shared_arguments(p, t)
    tiles = (config.BLOCK_M, shared["BLOCK_D"]), (config.BLOCK_M, shared["BLOCK_DV"])
    (q_in, dout_in), use_tma = launch.streams((t.q, dout), tiles, config)
    statistics: list[Any] = [lse, delta]
    if use_tma:
        statistics = [launch.statistics_descriptor(x, config.BLOCK_M) for x in (lse, delta)]
    rows = _scratch_rows(p, t.q, config)
    fa1_bwd_kernel[(p.nheads_kv * p.batch,)](
        q_in,
        t.k,
        t.v,
        dout_in,
        *statistics,
        dq,
        dk,
        dv,
        _scratch(p, t.q, rows, shared["BLOCK_D"]),
        **launch.row_strides(q=t.q, k=t.k, v=t.v, dout=dout, dq=dq, dk=dk, dv=dv),
        **shared,
        scratch_rows=rows,
        grad_scale=abs(p.softmax_scale),
        **launch.options(config, use_tma, t.q),
    )
    return Gradients(dq, dk, dv)


def _scratch_rows(p: AttentionProblem, q: Tensor, config: TileConfig) -> int:
    """Rows of a scratch tensor, as ``kernels/triton/scratch.py`` cuts it into sequences."""
    total = q.shape[0] if p.layout == VARLEN else p.batch * p.seqlen_q
    return (total // config.BLOCK_M + p.batch) * config.BLOCK_M


def _scratch(p: AttentionProblem, q: Tensor, rows: int, width: int) -> Tensor:
    """Running results of every head, float32, initialised by the kernel."""
    return torch.empty((p.nheads, rows, width), dtype=torch.float32, device=q.device)
