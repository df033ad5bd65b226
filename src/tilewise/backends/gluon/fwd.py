"""Launches the forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ...kernels.gluon.fwd_sm90 import flash_fwd_sm90_kernel
from ..base import AttentionTensors, Forward
from ..triton import launch
from ..triton.launch import Call, Launch, Of, Plan
from . import counters
from .config import HopperConfig, find

ROWS = 64  # of a consumer warpgroup
FEWEST_HEADS = 4  # of keys in a section, though they be more than the cache holds


NAMES = (*AttentionTensors._fields, "out", "lse", "counter")


def forward(problem: AttentionProblem, tensors: AttentionTensors) -> Forward:
    """See ``Backend.forward``."""
    p, device = problem, tensors.q.device
    config = find(p)
    fit = launch.fitting(p, tensors, unfit_for_tma(tensors))
    outputs = launch.outputs(p, tensors)
    plan = Plan(NAMES, device, lambda call: [_launch(p, call, config)])
    nothing = p.seqlen_q * p.nheads * p.batch == 0 or tensors.q.numel() == 0

    def run(t: AttentionTensors) -> tuple[Tensor, Tensor]:
        out, lse = outputs()
        if nothing:
            return out.zero_(), lse
        t = t if fit is None else fit(t)
        plan((*t, out, lse, counters.counter_of(device) if config.dynamic else None))
        return out, lse

    return run


def unfit_for_tma(t: AttentionTensors) -> tuple[str, ...]:
    """Those of q, k and v whose strides are none that TMA can read."""
    return tuple(name for name in ("q", "k", "v") if not launch.suits_tma(getattr(t, name)))


def _launch(p: AttentionProblem, call: Call, config: HopperConfig) -> Launch:
    t, out, c = launch.tensors_of(call), call["out"], config
    assert out is not None
    num_m_blocks = -(-p.seqlen_q // (c.consumers * ROWS))
    num_tiles = num_m_blocks * p.nheads * p.batch
    block_d, block_dv = widths(p)
    packed = p.layout == VARLEN
    programs = counters.programs(num_tiles, out.device)
    section, sectioned = order(p, num_m_blocks, programs)
    shared = launch.shared_arguments(p, t)
    arguments: dict[str, Any] = {
        **shared,
        "q": _of("q", t.q, ROWS, block_d),
        "k": _of("k", t.k, c.BLOCK_N, block_d),
        "v": _of("v", t.v, c.BLOCK_N, block_dv),
        "out": _of("out", out, ROWS, block_dv),
        "out_rows": Of("out") if packed else None,
        "lse": Of("lse"),
        "counter": Of("counter") if c.dynamic else None,
        "sink": None if t.sink is None else Of("sink"),
        "out_strides": launch.strides(out),
        "num_m_blocks": num_m_blocks,
        "num_tiles": num_tiles,
        "section": section,
        "sectioned": sectioned,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_N": c.BLOCK_N,
        "CONSUMERS": c.consumers,
        "STAGES": c.num_stages,
        "SHARED_OUT": c.shared_out,
        "ONE_MASKED": one_masked(p),
        "CONSUMER_REGISTERS": c.consumer_registers,
        "PRODUCER_REGISTERS": c.producer_registers,
        "APPROX_TANH": launch.approx_tanh(t.q),
    }
    options = compat.launch_options(num_warps=4, num_stages=1, maxnreg=c.maxnreg)
    return Launch(flash_fwd_sm90_kernel, programs, arguments, options)


def order(p: AttentionProblem, num_m_blocks: int, programs: int) -> tuple[int, int]:
    """Heads of a section, and heads that go in sections, as ``tile_of_program`` has it.

    Programs reach into the section after their own: two, of some heads each, share the L2 cache.
    The last heads are one section, so many that the longest of its tiles, which start first, take
    no more time than all of them: with tiles that grow evenly, two for each program.
    """
    heads = p.nheads * p.batch
    if p.mask.window_right is None:
        return 1, heads  # equal tiles: one head at a time shares most
    section = min(max(launch.section(p, p.nheads) // 2, FEWEST_HEADS * p.group), heads)
    together = -(-2 * programs // num_m_blocks)
    return section, max(0, heads - together) // section * section


def _of(name: str, x: Tensor, rows: int, width: int) -> Of:
    return Of(name, launch.descriptor(x, rows, width, compat.shared_descriptor))


def widths(p: AttentionProblem) -> tuple[int, int]:
    """Columns of a tile of q and k, and of v: powers of two, which TMA fills up with zeros."""
    return launch.power_of_two(p.head_dim, 64), launch.power_of_two(p.head_dim_v, 64)


def one_masked(p: AttentionProblem) -> bool:
    """Whether the window's right side and the keys' end cut one block at most of a consumer's."""
    right = p.mask.window_right
    return right is None or (p.layout != VARLEN and (p.seqlen_k - p.seqlen_q + right) % ROWS == 0)
