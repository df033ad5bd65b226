"""Launches the forward."""

from __future__ import annotations

from torch import Tensor

from ...core.problem import AttentionProblem
from ...kernels.triton.fwd import flash_fwd_kernel
from ...tuning import lookup
from ..base import AttentionTensors
from . import launch


def fwd(
    problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
) -> tuple[Tensor, Tensor]:
    """out and lse; see ``Backend.fwd``."""
    p, t = problem, tensors
    config = lookup.config("fwd", launch.arch(t.q), p)
    q = t.q.neg() if p.softmax_scale < 0 else t.q
    out, lse = launch.outputs(p, q)
    num_m_blocks = -(-p.seqlen_q // config.BLOCK_M)
    grid = num_m_blocks * p.nheads * p.batch
    if grid == 0:
        return out.zero_(), lse
    shared = launch.shared_arguments(p, t)
    tiles = (config.BLOCK_N, shared["BLOCK_D"]), (config.BLOCK_N, shared["BLOCK_DV"])
    (k, v), use_tma = launch.streams((t.k, t.v), tiles, config)
    flash_fwd_kernel[(grid,)](
        q,
        k,
        v,
        out,
        lse,
        sink=t.sink,
        **launch.row_strides(q=q, k=t.k, v=t.v, out=out),
        **shared,
        num_m_blocks=num_m_blocks,
        section=launch.section(p, p.nheads),
        **launch.options(config, use_tma, q),
        WARP_SPECIALIZE=use_tma and config.warp_specialize,
    )
    return out, lse
