"""Launches the backward: delta, then dK and dV, dQ and the bias's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ...kernels.triton.bwd_dbias import flash_bwd_dbias_kernel
from ...kernels.triton.bwd_dkdv import flash_bwd_dkdv_kernel
from ...kernels.triton.bwd_dq import flash_bwd_dq_kernel
from ...kernels.triton.bwd_preprocess import flash_bwd_preprocess_kernel
from ...kernels.triton.tiles import STATISTICS_BLOCK as _STATISTICS_BLOCK
from ...tuning import lookup
from ..base import AttentionTensors, Gradients, Wanted
from . import launch

STATISTICS_BLOCK: int = _STATISTICS_BLOCK.value


def bwd(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    algorithm: str,
) -> Gradients:
    """See ``Backend.bwd``."""
    p, t = problem, tensors
    arch = launch.arch(t.q)
    if p.softmax_scale < 0:
        t = launch.with_q(t, t.q.neg())
    lse_padded, delta = preprocess(p, t, out, lse, dout, dlse)
    shared = launch.shared_arguments(p, t)
    tensors_in = (t.q, t.k, t.v, dout)
    grads = Gradients()
    if wanted.dk or wanted.dv:
        config = lookup.config("bwd_dkdv", arch, p)
        grads.dk, grads.dv = _dkdv(p, tensors_in, lse_padded, delta, shared, wanted, config)
    if wanted.dq:
        config = lookup.config("bwd_dq", arch, p)
        grads.dq = _dq(p, tensors_in, lse_padded, delta, shared, config)
        if p.softmax_scale < 0:
            grads.dq.neg_()
    if wanted.dbias:
        assert t.attn_bias is not None
        grads.dbias = bias_gradient(
            p,
            tensors_in,
            lse_padded,
            delta,
            t.attn_bias,
            shared,
            lookup.config("bwd_dbias", arch, p),
        )
    if wanted.dsink:
        assert t.sink is not None
        grads.dsink = sink_gradient(p, t, lse, out, dout, dlse)
    return grads


def preprocess(
    p: AttentionProblem,
    t: AttentionTensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """lse in the kernels' unit and delta = rowsum(dO O) - dlse, (heads, padded rows) float32."""
    block = STATISTICS_BLOCK
    if p.layout == VARLEN:
        shape = (p.nheads, (t.q.shape[0] // block + p.batch) * block)
    else:
        shape = (p.batch * p.nheads, -(-p.seqlen_q // block) * block)
    lse_padded, delta = (
        torch.empty(shape, dtype=torch.float32, device=lse.device) for _ in range(2)
    )
    num_m_blocks = -(-p.seqlen_q // block)
    grid = num_m_blocks * p.nheads * p.batch
    if grid > 0:
        flash_bwd_preprocess_kernel[(grid,)](
            out,
            dout,
            lse,
            None if dlse is None else dlse.contiguous(),
            lse_padded,
            delta,
            t.cu_seqlens_q,
            t.seqused_q,
            launch.strides(out),
            launch.strides(dout),
            p.batch,
            p.nheads,
            p.seqlen_q,
            t.q.shape[0] if p.layout == VARLEN else 0,
            num_m_blocks,
            HEAD_DIM_V=p.head_dim_v,
            BLOCK_DV=launch.power_of_two(p.head_dim_v),
            NATURAL=launch.natural(p),
            **compat.launch_options(num_warps=4 if p.head_dim_v <= 128 else 8, num_stages=1),
        )
    return lse_padded, delta


def _dkdv(
    p: AttentionProblem,
    qkvdo: tuple[Tensor, ...],
    lse: Tensor,
    delta: Tensor,
    shared: dict[str, Any],
    wanted: Wanted,
    config: TileConfig,
) -> tuple[Tensor | None, Tensor | None]:
    q, k, v, dout = qkvdo
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if wanted.dk else None
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if wanted.dv else None
    num_n_blocks = -(-p.seqlen_k // config.BLOCK_N)
    grid = num_n_blocks * p.nheads_kv * p.batch
    if grid == 0:  # no keys or no batch: nothing to write, but rows of no sequence
        return tuple(None if x is None else x.zero_() for x in (dk, dv))  # type: ignore[return-value]
    tiles = (config.BLOCK_M, shared["BLOCK_D"]), (config.BLOCK_M, shared["BLOCK_DV"])
    (q_in, dout_in), use_tma = launch.streams((q, dout), tiles, config)
    statistics = [lse, delta]
    if use_tma:
        statistics = [launch.statistics_descriptor(x, config.BLOCK_M) for x in statistics]
    apart = config.separate and dk is not None and dv is not None
    for dk_out, dv_out in ((dk, None), (None, dv)) if apart else ((dk, dv),):
        flash_bwd_dkdv_kernel[(grid,)](
            q_in,
            k,
            v,
            dout_in,
            *statistics,
            dk_out,
            dv_out,
            **launch.row_strides(
                q=q, k=k, v=v, dout=dout, dk=k if dk is None else dk, dv=v if dv is None else dv
            ),
            **shared,
            num_n_blocks=num_n_blocks,
            section=launch.section(p, p.nheads_kv),
            grad_scale=abs(p.softmax_scale),
            **launch.options(config, use_tma, q),
        )
    return dk, dv


def _dq(
    p: AttentionProblem,
    qkvdo: tuple[Tensor, ...],
    lse: Tensor,
    delta: Tensor,
    shared: dict[str, Any],
    config: TileConfig,
) -> Tensor:
    q, k, v, dout = qkvdo
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_m_blocks = -(-p.seqlen_q // config.BLOCK_M)
    grid = num_m_blocks * p.nheads * p.batch
    if grid == 0:
        return dq.zero_()
    tiles = (config.BLOCK_N, shared["BLOCK_D"]), (config.BLOCK_N, shared["BLOCK_DV"])
    (k_in, v_in), use_tma = launch.streams((k, v), tiles, config)
    flash_bwd_dq_kernel[(grid,)](
        q,
        k_in,
        v_in,
        dout,
        lse,
        delta,
        dq,
        **launch.row_strides(q=q, k=k, v=v, dout=dout, dq=dq),
        **shared,
        num_m_blocks=num_m_blocks,
        section=launch.section(p, p.nheads),
        grad_scale=abs(p.softmax_scale),
        **launch.options(config, use_tma, q),
    )
    return dq


def bias_gradient(
    p: AttentionProblem,
    qkvdo: tuple[Tensor, ...],
    lse: Tensor,
    delta: Tensor,
    attn_bias: Tensor,
    shared: dict[str, Any],
    config: TileConfig,
) -> Tensor:
    """Gradient of a floating bias, in its shape and dtype."""
    q, k, v, dout = qkvdo
    varlen = p.layout == VARLEN
    dbias = torch.zeros(attn_bias.shape, dtype=attn_bias.dtype, device=attn_bias.device)
    shape = (p.batch, *attn_bias.shape) if varlen else attn_bias.shape
    one_row, one_column = not varlen and shape[2] == 1, shape[3] == 1
    num_m_blocks = 1 if one_row else -(-p.seqlen_q // config.BLOCK_M)
    num_n_blocks = 1 if one_column else -(-p.seqlen_k // config.BLOCK_N)
    grid = num_n_blocks * num_m_blocks * shape[1] * shape[0]
    if grid == 0:
        return dbias
    strides = dbias.stride() if dbias.dim() == 4 else (0, *dbias.stride())
    flash_bwd_dbias_kernel[(grid,)](
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dbias,
        **launch.row_strides(q=q, k=k, v=v, dout=dout),
        **{name: x for name, x in shared.items() if name != "attn_mask"},
        dbias_strides=strides,
        bias_heads=shape[1],
        heads_each=p.nheads // shape[1],
        batches_each=p.batch // shape[0],
        num_m_blocks=num_m_blocks,
        num_n_blocks=num_n_blocks,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        ONE_ROW=one_row,
        ONE_COLUMN=one_column,
        APPROX_TANH=launch.approx_tanh(q),
        **compat.launch_options(config.num_warps, config.num_stages, config.maxnreg),
    )
    return dbias


def sink_gradient(
    p: AttentionProblem,
    t: AttentionTensors,
    lse: Tensor,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Tensor:
    """- sum over rows of exp(sink - lse) delta, (nheads,)."""
    assert t.sink is not None
    delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2)  # as lse
    if dlse is not None:
        delta -= dlse
    empty = lse == -torch.inf
    p_sink = torch.exp(t.sink.to(lse.dtype)[:, None] - lse)
    terms = (p_sink * delta).masked_fill(empty, 0.0)
    return terms.sum(-1 if p.layout == VARLEN else (0, 2)).neg().to(t.sink.dtype)
