"""Launches the backward: statistics, then dK and dV, dQ, and the gradients of other operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ...kernels.triton.bwd_dkdv import flash_bwd_dkdv_kernel
from ...kernels.triton.bwd_dq import flash_bwd_dq_kernel
from ...kernels.triton.bwd_preprocess import flash_bwd_preprocess_kernel
from ...kernels.triton.tiles import STATISTICS_BLOCK as _STATISTICS_BLOCK
from ...tuning import lookup
from ..base import AttentionTensors, Backward, Gradients, Wanted
from . import launch
from .launch import Call, Launch, Of, Plan
from .operands import operand_gradients

STATISTICS_BLOCK: int = _STATISTICS_BLOCK.value

GIVEN = (*AttentionTensors._fields, "out", "lse", "dout", "dlse")
NAMES = (*GIVEN, "lse_padded", "delta", "dq", "dk", "dv")


def backward(problem: AttentionProblem, tensors: AttentionTensors, wanted: Wanted) -> Backward:
    """See ``Backend.backward``."""
    p, arch, w = problem, launch.arch(tensors.q), wanted
    configs = lookup.config("bwd_dkdv", arch, p), lookup.config("bwd_dq", arch, p)
    fit = launch.fitting(p, tensors)
    new_dq, new_dk, new_dv = map(room_like, tensors[:3])
    new_lse, new_delta = statistics(p, tensors.q)
    more = operand_gradients(p, tensors, w, NAMES)
    nothing = p.seqlen_q * p.seqlen_k * p.batch == 0  # no row sees a key or is in a sequence

    def make(call: Call) -> list[Launch]:
        plan = preprocess(p, call)
        if w.dk or w.dv:
            plan += _dkdv(p, call, configs[0])
        if w.dq:
            plan += _dq(p, call, configs[1])
        return plan

    plan = Plan(NAMES, tensors.q.device, make)

    def run(
        t: AttentionTensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        t = t if fit is None else fit(t)
        dq = new_dq() if w.dq else None
        dk = new_dk() if w.dk else None
        dv = new_dv() if w.dv else None
        dlse = None if dlse is None else dlse.contiguous()
        call = (*t, out, lse, dout, dlse, new_lse(), new_delta(), dq, dk, dv)
        plan(call)
        grads = Gradients(dq, dk, dv)
        if nothing:
            for x in (dq, dk, dv):
                if x is not None:
                    x.zero_()
        if p.softmax_scale < 0 and dq is not None:
            dq.neg_()
        if more is not None:
            more(grads, call)
        return grads

    return run


def room_like(x: Tensor) -> Callable[[], Tensor]:
    """What makes gradients of x, to be written."""
    return launch.room(x.shape, x.dtype, x.device)


def statistics_shape(p: AttentionProblem, q: Tensor) -> tuple[int, int]:
    """(heads, rows) of a row's statistics, padded."""
    block = STATISTICS_BLOCK
    if p.layout == VARLEN:
        return p.nheads, (q.shape[0] // block + p.batch) * block
    return p.batch * p.nheads, -(-p.seqlen_q // block) * block


def statistics(p: AttentionProblem, q: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What makes room for lse in the kernels' unit, in two parts where it is natural, and for
    delta: (parts * heads, rows), float32."""
    heads, rows = statistics_shape(p, q)
    parts = 2 if launch.natural(p) else 1
    return (
        launch.room((parts * heads, rows), torch.float32, q.device),
        launch.room((heads, rows), torch.float32, q.device),
    )


def preprocess(
    p: AttentionProblem,
    call: Call,
    delta_scale: float = 1.0,
    for_wgmma: bool = False,
    block_d: int = 0,
) -> list[Launch]:
    """Writes the statistics; with ``block_d``, also zeros for dq_sum, in rows of so many."""
    t, out, dout = launch.tensors_of(call), call["out"], call["dout"]
    assert out is not None and dout is not None
    num_m_blocks = -(-p.seqlen_q // STATISTICS_BLOCK)
    grid = num_m_blocks * p.nheads * p.batch
    if grid == 0:
        return []
    arguments = {
        "out": Of("out"),
        "dout": Of("dout"),
        "lse": Of("lse"),
        "dlse": None if call["dlse"] is None else Of("dlse"),
        "lse_padded": Of("lse_padded"),
        "delta_padded": Of("delta"),
        "dq_sum": Of("dq_sum") if block_d else None,
        "cu_seqlens_q": None if t.cu_seqlens_q is None else Of("cu_seqlens_q"),
        "seqused_q": None if t.seqused_q is None else Of("seqused_q"),
        **launch.row_strides(out=out, dout=dout),
        "batch": p.batch,
        "nheads": p.nheads,
        "seqlen_q": p.seqlen_q,
        "total_q": t.q.shape[0] if p.layout == VARLEN else 0,
        "num_m_blocks": num_m_blocks,
        "delta_scale": delta_scale,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_DV": launch.power_of_two(p.head_dim_v),
        "NATURAL": launch.natural(p),
        "FOR_WGMMA": for_wgmma,
        "BLOCK_D": block_d,
    }
    options = compat.launch_options(num_warps=4 if p.head_dim_v <= 128 else 8, num_stages=1)
    return [Launch(flash_bwd_preprocess_kernel, grid, arguments, options)]


def _dkdv(p: AttentionProblem, call: Call, config: TileConfig) -> list[Launch]:
    """dK and dV: together, or one after the other."""
    t, dout, dk, dv = launch.tensors_of(call), call["dout"], call["dk"], call["dv"]
    assert dout is not None
    num_n_blocks = -(-p.seqlen_k // config.BLOCK_N)
    grid = num_n_blocks * p.nheads_kv * p.batch
    if grid == 0 or p.seqlen_q == 0:
        return []
    plan = []
    apart = config.separate and dk is not None and dv is not None
    for has_dk, has_dv in (
        ((True, False), (False, True)) if apart else ((dk is not None, dv is not None),)
    ):
        shared = launch.shared_arguments(p, t)
        tiles = (config.BLOCK_M, shared["BLOCK_D"]), (config.BLOCK_M, shared["BLOCK_DV"])
        streamed, use_tma = launch.stream_rows(p, t.q, dout, tiles, config)
        arguments = {
            **streamed,
            "k": Of("k"),
            "v": Of("v"),
            **launch.statistics("lse_padded", "delta", call, config, use_tma),
            "dk": Of("dk") if has_dk else None,
            "dv": Of("dv") if has_dv else None,
            **launch.row_strides(
                q=t.q,
                k=t.k,
                v=t.v,
                dout=dout,
                dk=t.k if dk is None else dk,
                dv=t.v if dv is None else dv,
            ),
            **shared,
            "num_n_blocks": num_n_blocks,
            "section": launch.section(p, p.nheads_kv),
            "grad_scale": abs(p.softmax_scale),
            **launch.tiling(config, use_tma, t.q),
        }
        plan.append(Launch(flash_bwd_dkdv_kernel, grid, arguments, launch.options(config)))
    return plan


def _dq(p: AttentionProblem, call: Call, config: TileConfig) -> list[Launch]:
    t, dout, dq = launch.tensors_of(call), call["dout"], call["dq"]
    assert dout is not None and dq is not None
    num_m_blocks = -(-p.seqlen_q // config.BLOCK_M)
    grid = num_m_blocks * p.nheads * p.batch
    if grid == 0:
        return []
    shared = launch.shared_arguments(p, t)
    tiles = (config.BLOCK_N, shared["BLOCK_D"]), (config.BLOCK_N, shared["BLOCK_DV"])
    streamed, use_tma = launch.streams({"k": t.k, "v": t.v}, tiles, config)
    arguments = {
        "q": Of("q"),
        **streamed,
        "dout": Of("dout"),
        "lse": Of("lse_padded"),
        "delta": Of("delta"),
        "dq": Of("dq"),
        **launch.row_strides(q=t.q, k=t.k, v=t.v, dout=dout, dq=dq),
        **shared,
        "num_m_blocks": num_m_blocks,
        "section": launch.section(p, p.nheads),
        "grad_scale": abs(p.softmax_scale),
        **launch.tiling(config, use_tma, t.q),
    }
    return [Launch(flash_bwd_dq_kernel, grid, arguments, launch.options(config))]
