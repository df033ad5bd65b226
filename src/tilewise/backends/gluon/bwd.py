"""Launches the backward: statistics, the one pass, dQ's last step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ...kernels.gluon.bwd_sm90 import flash_bwd_sm90_kernel
from ...kernels.gluon.bwd_steps_sm90 import KEYS, ROWS
from ...kernels.triton.bwd_convert import flash_bwd_convert_kernel
from ..base import AttentionTensors, Backward, Gradients, Wanted
from ..triton import launch
from ..triton.bwd import NAMES, preprocess, room_like, statistics, statistics_shape
from ..triton.launch import Call, Launch, Of, Plan
from ..triton.operands import operand_gradients
from . import counters
from .fwd import unfit_for_tma

BLOCK_M: int = ROWS.value
BLOCK_N: int = KEYS.value
BACKWARD = (*NAMES, "dq_sum", "counter")
TILES_OF_SECTION = 1.5  # for each program at least, or the longest tile ends long after the rest
MOST_DROPOUT_OF_FLOAT16 = 0.99  # at 0.999 errors are 0.2 of what is allowed, at 0.9999 1.4 times


def takes(p: AttentionProblem) -> bool:
    """Whether the one pass can compute a call: heads up to 128 wide, of one width, in any order
    of additions; not float16 of which dropout leaves next to nothing."""
    return (
        p.head_dim == p.head_dim_v
        and p.head_dim <= 128
        and not p.deterministic
        and leaves_digits(p)
        and p.batch * p.nheads * p.seqlen_q * p.seqlen_k > 0
    )


def leaves_digits(p: AttentionProblem) -> bool:
    """Whether dS times 1 - dropout_p, as the kernels make it, keeps its digits: float16's range
    ends at 2^-24."""
    return p.dtype != "float16" or p.dropout_p <= MOST_DROPOUT_OF_FLOAT16


def grad_scale(p: AttentionProblem) -> float:
    """What dQ and dK are multiplied by in the end. dropout's scale is part of it: the kernels make
    dS with a mask of 0 and 1 and a delta times 1 - dropout_p, which saves a product an element."""
    return abs(p.softmax_scale) / (1.0 - p.dropout_p)


def backward(
    problem: AttentionProblem, tensors: AttentionTensors, dout: Tensor, wanted: Wanted
) -> Backward:
    """See ``Backend.backward``; dQ, dK and dV come from one kernel, wanted or not."""
    p, device = problem, tensors.q.device
    fit = launch.fitting(p, tensors, unfit_for_tma(tensors))
    more = operand_gradients(p, tensors, wanted, BACKWARD)
    new_dq, new_dk, new_dv = map(room_like, tensors[:3])
    new_lse, new_delta = statistics(p, tensors.q)
    block_d = 64 if p.head_dim <= 64 else 128
    heads, rows = statistics_shape(p, tensors.q)
    shape = (heads * rows * block_d // 32, 32)
    new_sum = launch.room(shape, torch.float32, device)
    fits = launch.suits_tma(dout)

    def make(call: Call) -> list[Launch]:
        return [
            *preprocess(p, call, 1.0 - p.dropout_p, for_wgmma=True, block_d=block_d),
            one_pass(p, call),
            _convert(p, call, block_d),
        ]

    plan = Plan(BACKWARD, device, make)

    def run(
        t: AttentionTensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        t = t if fit is None else fit(t)
        dout = dout if fits else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        call = (
            *t, out, lse, dout, dlse, new_lse(), new_delta(), dq, dk, dv, new_sum(),
            counters.counter_of(device),
        )  # fmt: skip
        plan(call)
        if p.softmax_scale < 0:
            dq.neg_()
        grads = Gradients(dq, dk, dv)
        if more is not None:
            more(grads, call)
        return grads

    return run


def one_pass(p: AttentionProblem, call: Call) -> Launch:
    """The launch of all three gradients, or of dK and dV alone where a call has no "dq_sum"."""
    t = launch.tensors_of(call)
    block_d = 64 if p.head_dim <= 64 else 128
    with_dq = "dq_sum" in call

    def rows_of(name: str, rows: int, columns: int = block_d) -> Of:
        x = call[name]
        assert x is not None
        return Of(name, launch.descriptor(x, rows, columns, compat.shared_descriptor))

    def flat(name: str, argument: str, block: list[int], swizzled: bool) -> Of:
        x = call[name]
        assert x is not None
        shape = list(x.shape)
        return Of(name, compat.matrix_descriptor(x, shape, [shape[1], 1], block, swizzled))

    num_n_blocks = -(-p.seqlen_k // BLOCK_N)
    num_tiles = num_n_blocks * p.nheads_kv * p.batch
    programs = counters.programs(num_tiles, t.q.device)
    group_bytes = p.group * p.seqlen_q * block_d * (2 + 2 + 4)  # of Q, dO and dq_sum
    dk, dv = call["dk"], call["dv"]
    assert dk is not None and dv is not None
    arguments: dict[str, Any] = {
        **launch.shared_arguments(p, t),
        "q": rows_of("q", BLOCK_M),
        "dout": rows_of("dout", BLOCK_M),
        **{name: rows_of(name, 64) for name in ("k", "v", "dk")},
        "dv": rows_of("dv", 64, 64),  # of wide heads, by halves
        "lse": flat("lse_padded", "lse", [1, BLOCK_M], False),
        "delta": flat("delta", "delta", [1, BLOCK_M], False),
        "dq": flat("dq_sum", "dq", [block_d, 32], True) if with_dq else None,
        "dk_rows": Of("dk") if p.layout == VARLEN else None,
        "dv_rows": Of("dv") if p.layout == VARLEN else None,
        "dk_strides": launch.strides(dk),
        "dv_strides": launch.strides(dv),
        "counter": Of("counter"),
        "num_n_blocks": num_n_blocks,
        "num_tiles": num_tiles,
        "section": _section(p, num_n_blocks, programs, group_bytes),
        "grad_scale": grad_scale(p),
        "BLOCK_D": block_d,
        "STAGES": 3 if block_d == 64 or not with_dq else 2,
        "CONSUMER_REGISTERS": 240,
        "PRODUCER_REGISTERS": 24,
        "APPROX_TANH": launch.approx_tanh(t.q),
    }
    options = compat.launch_options(num_warps=4, num_stages=1, maxnreg=168)
    return Launch(flash_bwd_sm90_kernel, programs, arguments, options)


def _section(p: AttentionProblem, num_n_blocks: int, programs: int, group_bytes: int) -> int:
    """Heads of a section: what the L2 cache holds, or more where groups make tiles few and long."""
    section = launch.section(p, p.nheads_kv, group_bytes)
    if p.mask.window_right is None:  # equal tiles
        return section
    heads = p.nheads_kv * p.batch
    least = math.ceil(TILES_OF_SECTION * programs / num_n_blocks)
    return -(-heads // max(1, heads // max(section, least)))  # all sections of one size


def _convert(p: AttentionProblem, call: Call, block_d: int) -> Launch:
    t, dq = launch.tensors_of(call), call["dq"]
    assert dq is not None
    num_m_blocks = -(-p.seqlen_q // BLOCK_M)
    arguments = {
        "dq_sum": Of("dq_sum"),
        "dq": Of("dq"),
        "cu_seqlens_q": None if t.cu_seqlens_q is None else Of("cu_seqlens_q"),
        "seqused_q": None if t.seqused_q is None else Of("seqused_q"),
        **launch.row_strides(dq=dq),
        "batch": p.batch,
        "nheads": p.nheads,
        "seqlen_q": p.seqlen_q,
        "total_q": t.q.shape[0] if p.layout == VARLEN else 0,
        "num_m_blocks": num_m_blocks,
        "grad_scale": grad_scale(p),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": BLOCK_M,
        "BLOCK_D": block_d,
    }
    grid = num_m_blocks * p.nheads * p.batch
    return Launch(flash_bwd_convert_kernel, grid, arguments, compat.launch_options(4, 1))
