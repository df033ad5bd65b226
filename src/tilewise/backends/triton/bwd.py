"""Launches the backward: statistics, then dK and dV, dQ, and the gradients of other operands."""

from __future__ import annotations

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
from ..base import AttentionTensors, Gradients, Wanted
from . import launch
from .launch import Launch, Of
from .operands import add_operand_gradients

STATISTICS_BLOCK: int = _STATISTICS_BLOCK.value


def bwd(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """See ``Backend.bwd``."""
    p, arch = problem, launch.arch(tensors.q)
    t = launch.with_positive_scale(p, tensors)
    grads = Gradients(
        *(
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if want else None
            for x, want in ((t.q, wanted.dq), (t.k, wanted.dk), (t.v, wanted.dv))
        )
    )
    call = given(t, out, lse, dout, dlse)
    lse_padded, delta = statistics(p, t.q)
    call |= {"lse_padded": lse_padded, "delta": delta}
    call |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    configs = lookup.config("bwd_dkdv", arch, p), lookup.config("bwd_dq", arch, p)

    def make() -> list[Launch]:
        plan = [*preprocess(p, t, out, dout, dlse)]
        if wanted.dk or wanted.dv:
            plan += _dkdv(p, t, call, configs[0])
        if wanted.dq:
            plan += _dq(p, t, call, configs[1])
        return plan

    facts = ("bwd", arch, p, configs, launch.precision(p.dtype))
    launch.run(launch.plans.find(facts, call, make), call)
    if p.seqlen_q * p.seqlen_k * p.batch == 0:  # no row sees a key; rows may be of no sequence
        for x in (grads.dq, grads.dk, grads.dv):
            if x is not None:
                x.zero_()
    if p.softmax_scale < 0 and grads.dq is not None:
        grads.dq.neg_()
    add_operand_gradients(grads, wanted, p, t, call)
    return grads


def given(
    t: AttentionTensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor | None]:
    """What a backward reads, by name."""
    dlse = None if dlse is None else dlse.contiguous()
    return launch.operands(t) | {"out": out, "lse": lse, "dout": dout, "dlse": dlse}


def statistics(p: AttentionProblem, q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for lse in the kernels' unit, in two parts where it is natural, and for delta: (parts *
    heads, padded rows), float32."""
    block = STATISTICS_BLOCK
    if p.layout == VARLEN:
        heads, rows = p.nheads, (q.shape[0] // block + p.batch) * block
    else:
        heads, rows = p.batch * p.nheads, -(-p.seqlen_q // block) * block
    parts = 2 if launch.natural(p) else 1
    return (
        torch.empty(parts * heads, rows, dtype=torch.float32, device=q.device),
        torch.empty(heads, rows, dtype=torch.float32, device=q.device),
    )


def preprocess(
    p: AttentionProblem,
    t: AttentionTensors,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    for_wgmma: bool = False,
) -> list[Launch]:
    """Writes the statistics."""
    num_m_blocks = -(-p.seqlen_q // STATISTICS_BLOCK)
    grid = num_m_blocks * p.nheads * p.batch
    if grid == 0:
        return []
    arguments = {
        "out": Of("out"),
        "dout": Of("dout"),
        "lse": Of("lse"),
        "dlse": None if dlse is None else Of("dlse"),
        "lse_padded": Of("lse_padded"),
        "delta_padded": Of("delta"),
        "cu_seqlens_q": None if t.cu_seqlens_q is None else Of("cu_seqlens_q"),
        "seqused_q": None if t.seqused_q is None else Of("seqused_q"),
        **launch.row_strides(out=out, dout=dout),
        "batch": p.batch,
        "nheads": p.nheads,
        "seqlen_q": p.seqlen_q,
        "total_q": t.q.shape[0] if p.layout == VARLEN else 0,
        "num_m_blocks": num_m_blocks,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_DV": launch.power_of_two(p.head_dim_v),
        "NATURAL": launch.natural(p),
        "FOR_WGMMA": for_wgmma,
    }
    options = compat.launch_options(num_warps=4 if p.head_dim_v <= 128 else 8, num_stages=1)
    return [Launch(flash_bwd_preprocess_kernel, grid, arguments, options)]


def _dkdv(
    p: AttentionProblem,
    t: AttentionTensors,
    call: dict[str, Tensor | None],
    config: TileConfig,
) -> list[Launch]:
    """dK and dV: together, or one after the other."""
    dout, dk, dv = call["dout"], call["dk"], call["dv"]
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


def _dq(
    p: AttentionProblem,
    t: AttentionTensors,
    call: dict[str, Tensor | None],
    config: TileConfig,
) -> list[Launch]:
    dout, dq = call["dout"], call["dq"]
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
