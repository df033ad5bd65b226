"""Launches the forward."""

from __future__ import annotations

from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import AttentionProblem
from ...kernels.triton.fwd import flash_fwd_kernel
from ...tuning import lookup
from ..base import AttentionTensors, Forward
from . import launch
from .launch import Call, Launch, Of, Plan

NAMES = (*AttentionTensors._fields, "out", "lse")


def forward(problem: AttentionProblem, tensors: AttentionTensors) -> Forward:
    """See ``Backend.forward``."""
    p = problem
    config = lookup.config("fwd", launch.arch(tensors.q), p)
    fit, outputs = launch.fitting(p, tensors), launch.outputs(p, tensors)
    plan = Plan(NAMES, tensors.q.device, lambda call: [_launch(p, call, config)])
    nothing = p.seqlen_q * p.nheads * p.batch == 0

    def run(t: AttentionTensors) -> tuple[Tensor, Tensor]:
        out, lse = outputs()
        if nothing:
            return out.zero_(), lse
        t = t if fit is None else fit(t)
        plan((*t, out, lse))
        return out, lse

    return run


def _launch(p: AttentionProblem, call: Call, config: TileConfig) -> Launch:
    t, out = launch.tensors_of(call), call["out"]
    assert out is not None
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
