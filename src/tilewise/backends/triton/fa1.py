"""Launches FlashAttention 1: a program for each head, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels.triton.fa1_bwd import fa1_bwd_kernel
from ...kernels.triton.fa1_fwd import fa1_fwd_kernel
from ...tuning import lookup
from ..base import AttentionTensors, Backward, Forward, Gradients, Wanted
from . import launch
from .bwd import NAMES, preprocess, room_like, statistics
from .launch import Call, Launch, Of, Plan
from .operands import operand_gradients

REGISTERS_OF_THREE = 168  # of a thread, for three programs of four warps in 65536
FORWARD = (*AttentionTensors._fields, "out", "lse", "o_scratch", "m_scratch", "l_scratch")
BACKWARD = (*NAMES, "dq_scratch")


def forward(problem: AttentionProblem, tensors: AttentionTensors) -> Forward:
    """See ``Backend.forward``."""
    p, q = problem, tensors.q
    config = lookup.config("fa1_fwd", launch.arch(q), p)
    fit, outputs = launch.fitting(p, tensors), launch.outputs(p, tensors)
    plan = Plan(FORWARD, q.device, lambda call: [_fwd(p, call, config)])
    scratch = [_scratch(p, q, config, n) for n in (launch.power_of_two(p.head_dim_v), 1, 1)]
    nothing = q.shape[-3] * p.nheads * p.batch == 0

    def run(t: AttentionTensors) -> tuple[Tensor, Tensor]:
        out, lse = outputs()
        if nothing:
            return out.zero_(), lse
        t = t if fit is None else fit(t)
        plan((*t, out, lse, *(make() for make in scratch)))
        return out, lse

    return run


def _fwd(p: AttentionProblem, call: Call, config: TileConfig) -> Launch:
    t, out = launch.tensors_of(call), call["out"]
    assert out is not None
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
    options = launch.options(_in_one_turn(p, config, t.q))
    return Launch(fa1_fwd_kernel, p.nheads * p.batch, arguments, options)


def _in_one_turn(p: AttentionProblem, config: TileConfig, q: Tensor) -> TileConfig:
    """With fewer registers for each, where so three programs on a multiprocessor run at once that
    would otherwise come in two turns, two and one. Measured for Hopper with dropout: 97 to 108
    TFLOPS with 384 programs of 2k rows, and 104 to 92 with 768, which come in turns anyway. So this
    one kernel is compiled twice, by the number of heads."""
    narrow = p.head_dim <= 64 and p.head_dim_v <= 64 and p.dtype != "float32"
    dropout = "dropout" in p.features and not {"attn_bias", "bool_mask"} & set(p.features)
    if not (narrow and dropout and launch.arch(q) == "sm_90" and q.is_cuda):
        return config
    if config.num_warps != 4 or config.maxnreg:
        return config
    programs = p.nheads * p.batch
    several = programs / torch.cuda.get_device_properties(q.device).multi_processor_count
    return replace(config, maxnreg=REGISTERS_OF_THREE) if 2 < several <= 3 else config


def backward(problem: AttentionProblem, tensors: AttentionTensors, wanted: Wanted) -> Backward:
    """See ``Backend.backward``; dQ, dK and dV come from one kernel, wanted or not."""
    p = problem
    config = lookup.config("fa1_bwd", launch.arch(tensors.q), p)
    fit, more = launch.fitting(p, tensors), operand_gradients(p, tensors, wanted, BACKWARD)
    new_dq, new_dk, new_dv = map(room_like, tensors[:3])
    new_lse, new_delta = statistics(p, tensors.q)
    new_scratch = _scratch(p, tensors.q, config, launch.power_of_two(p.head_dim))
    nothing = p.nheads_kv * p.batch == 0

    def make(call: Call) -> list[Launch]:
        return [] if nothing else [*preprocess(p, call), _bwd(p, call, config)]

    plan = Plan(BACKWARD, tensors.q.device, make)

    def run(
        t: AttentionTensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        t = t if fit is None else fit(t)
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        dlse = None if dlse is None else dlse.contiguous()
        call = (*t, out, lse, dout, dlse, new_lse(), new_delta(), dq, dk, dv, new_scratch())
        plan(call)
        if nothing:
            for x in (dq, dk, dv):
                x.zero_()
        if p.softmax_scale < 0:
            dq.neg_()
        grads = Gradients(dq, dk, dv)
        if more is not None:
            more(grads, call)
        return grads

    return run


def _bwd(p: AttentionProblem, call: Call, config: TileConfig) -> Launch:
    t = launch.tensors_of(call)
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


def _scratch(
    p: AttentionProblem, q: Tensor, config: TileConfig, width: int
) -> Callable[[], Tensor]:
    """What makes room for running results of every head, float32, initialised by the kernel."""
    shape = (p.nheads, _scratch_rows(p, q, config), width)
    return launch.room(shape, torch.float32, q.device)
