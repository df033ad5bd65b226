"""Launches FlashAttention 1: a program for each head, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels.triton.fa1_bwd import fa1_bwd_kernel
from ...kernels.triton.fa1_fwd import fa1_fwd_kernel
from ...tuning import lookup
from ..base import AttentionTensors, Gradients, Wanted
from . import launch
from .bwd import given, preprocess, statistics
from .launch import Launch, Of
from .operands import add_operand_gradients


def fwd(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
    """out and lse; see ``Backend.fwd``."""
    p, arch = problem, launch.arch(tensors.q)
    t = launch.with_positive_scale(p, tensors)
    config = lookup.config("fa1_fwd", arch, p)
    out, lse = launch.outputs(p, t)
    if out.shape[-3] * p.nheads * p.batch == 0:
        return out.zero_(), lse
    call = launch.operands(t)
    facts = ("fa1_fwd", arch, p, config, launch.precision(p.dtype))
    plan = launch.plans.find(facts, call, lambda: [_fwd(p, t, out, config)])
    rows, width = _scratch_rows(p, t.q, config), launch.power_of_two(p.head_dim_v)
    running = {
        name: _scratch(p, t.q, rows, n)
        for name, n in (("o_scratch", width), ("m_scratch", 1), ("l_scratch", 1))
    }
    launch.run(plan, call | running | {"out": out, "lse": lse})
    return out, lse


def _fwd(p: AttentionProblem, t: AttentionTensors, out: Tensor, config: TileConfig) -> Launch:
    shared = launch.shared_arguments(p, t)
    streamed, use_tma = launch.streams({"q": t.q}, ((config.BLOCK_M, shared["BLOCK_D"]),), config)
    arguments = {
        **streamed,
        **{name: Of(name) for name in ("k", "v", "out", "lse")},
        **{name: Of(name) for name in ("o_scratch", "m_scratch", "l_scratch")},
        "sink": None if t.sink is None else Of("sink"),
        **launch.row_strides(q=t.q, k=t.k, v=t.v, out=out),
        **shared,
        "scratch_rows": _scratch_rows(p, t.q, config),
        **launch.tiling(config, use_tma, t.q),
    }
    return Launch(fa1_fwd_kernel, p.nheads * p.batch, arguments, launch.options(config))


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
    p, arch = problem, launch.arch(tensors.q)
    t = launch.with_positive_scale(p, tensors)
    config = lookup.config("fa1_bwd", arch, p)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (t.q, t.k, t.v))
    lse_padded, delta = statistics(p, t.q)
    call = given(t, out, lse, dout, dlse)
    call |= {"lse_padded": lse_padded, "delta": delta, "dq": dq, "dk": dk, "dv": dv}
    if p.nheads_kv * p.batch == 0:
        grads = Gradients(dq.zero_(), dk.zero_(), dv.zero_())
        add_operand_gradients(grads, wanted, p, t, call)
        return grads

    def make() -> list[Launch]:
        return [*preprocess(p, t, out, dout, dlse), _bwd(p, t, call, config)]

    facts = ("fa1_bwd", arch, p, config, launch.precision(p.dtype))
    plan = launch.plans.find(facts, call, make)
    rows = _scratch_rows(p, t.q, config)
    scratch = _scratch(p, t.q, rows, launch.power_of_two(p.head_dim))
    launch.run(plan, call | {"dq_scratch": scratch})
    if p.softmax_scale < 0:
        dq.neg_()
    grads = Gradients(dq, dk, dv)
    add_operand_gradients(grads, wanted, p, t, call)
    return grads


def _bwd(
    p: AttentionProblem,
    t: AttentionTensors,
    call: dict[str, Tensor | None],
    config: TileConfig,
) -> Launch:
    dout, dq, dk, dv = (call[name] for name in ("dout", "dq", "dk", "dv"))
    assert dout is not None and dq is not None and dk is not None and dv is not None
    shared = launch.shared_arguments(p, t)
    tiles = (config.BLOCK_M, shared["BLOCK_D"]), (config.BLOCK_M, shared["BLOCK_DV"])
    streamed, use_tma = launch.stream_rows(p, t.q, dout, tiles, config)
    arguments = {
        **streamed,
        **launch.statistics("lse_padded", "delta", call, config, use_tma),
        **{name: Of(name) for name in ("k", "v", "dq", "dk", "dv", "dq_scratch")},
        **launch.row_strides(q=t.q, k=t.k, v=t.v, dout=dout, dq=dq, dk=dk, dv=dv),
        **shared,
        "scratch_rows": _scratch_rows(p, t.q, config),
        "grad_scale": abs(p.softmax_scale),
        **launch.tiling(config, use_tma, t.q),
    }
    return Launch(fa1_bwd_kernel, p.nheads_kv * p.batch, arguments, launch.options(config))


def _scratch_rows(p: AttentionProblem, q: Tensor, config: TileConfig) -> int:
    """Rows of a scratch tensor, as ``kernels/triton/scratch.py`` cuts it into sequences."""
    total = q.shape[0] if p.layout == VARLEN else p.batch * p.seqlen_q
    return (total // config.BLOCK_M + p.batch) * config.BLOCK_M


def _scratch(p: AttentionProblem, q: Tensor, rows: int, width: int) -> Tensor:
    """Running results of every head, float32, initialised by the kernel."""
    return torch.empty((p.nheads, rows, width), dtype=torch.float32, device=q.device)
