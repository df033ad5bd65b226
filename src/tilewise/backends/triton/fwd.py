"""Launches the forward."""

from __future__ import annotations

from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import AttentionProblem
from ...kernels.triton.fwd import flash_fwd_kernel
from ...tuning import lookup
from ..base import AttentionTensors
from . import launch
from .launch import Launch, Of


def fwd(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
    """out and lse; see ``Backend.fwd``."""
    p, arch = problem, launch.arch(tensors.q)
    t = launch.with_positive_scale(p, tensors)
    config = lookup.config("fwd", arch, p)
    out, lse = launch.outputs(p, t)
    if p.seqlen_q * p.nheads * p.batch == 0:
        return out.zero_(), lse
    call = launch.operands(t)
    facts = ("fwd", arch, p, config, launch.precision(p.dtype))
    plan = launch.plans.find(facts, call, lambda: [_launch(p, t, out, config)])
    launch.run(plan, call | {"out": out, "lse": lse})
    return out, lse


def _launch(p: AttentionProblem, t: AttentionTensors, out: Tensor, config: TileConfig) -> Launch:
    num_m_blocks = -(-p.seqlen_q // config.BLOCK_M)
    shared = launch.shared_arguments(p, t)
    tiles = (config.BLOCK_N, shared["BLOCK_D"]), (config.BLOCK_N, shared["BLOCK_DV"])
    streamed, use_tma = launch.streams({"k": t.k, "v": t.v}, tiles, config)
    arguments = {
        "q": Of("q"),
        **streamed,
        "out": Of("out"),
        "lse": Of("lse"),
        "sink": None if t.sink is None else Of("sink"),
        **launch.row_strides(q=t.q, k=t.k, v=t.v, out=out),
        **shared,
        "num_m_blocks": num_m_blocks,
        "section": launch.section(p, p.nheads),
        **launch.tiling(config, use_tma, t.q),
        "WARP_SPECIALIZE": use_tma and config.warp_specialize,
    }
    grid = num_m_blocks * p.nheads * p.batch
    return Launch(flash_fwd_kernel, grid, arguments, launch.options(config))
