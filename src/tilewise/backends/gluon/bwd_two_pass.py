"""Launches the backward in two passes: statistics, dK and dV, dQ."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ...kernels.gluon.bwd_dkdv_sm90 import KEYS as _KEYS
from ...kernels.gluon.bwd_dkdv_sm90 import flash_bwd_dkdv_sm90_kernel
from ...kernels.gluon.bwd_dq_sm90 import BLOCK_M as _BLOCK_M
from ...kernels.gluon.bwd_dq_sm90 import flash_bwd_dq_sm90_kernel
from ..base import AttentionTensors, Backward, Gradients, Wanted
from ..triton import launch
from ..triton.bwd import NAMES, preprocess, room_like, statistics
from ..triton.launch import Call, Launch, Of, Plan
from ..triton.operands import operand_gradients
from . import counters
from .bwd import grad_scale, leaves_digits, one_pass
from .fwd import unfit_for_tma, widths

KEYS: int = _KEYS.value
BLOCK_M: int = _BLOCK_M.value
ROWS = 64  # of a warpgroup
BACKWARD = (*NAMES, "counter")


def takes(p: AttentionProblem) -> bool:
    """Whether a call goes this way: heads too wide for the one pass, and additions in one order."""
    wide = max(p.head_dim, p.head_dim_v) > 128
    some = p.batch * p.nheads * p.seqlen_q * p.seqlen_k > 0
    return (wide or p.deterministic) and some and leaves_digits(p)


def backward(
    problem: AttentionProblem, tensors: AttentionTensors, dout: Tensor, wanted: Wanted
) -> Backward:
    """See ``Backend.backward``."""
    p, device = problem, tensors.q.device
    fit = launch.fitting(p, tensors, unfit_for_tma(tensors))
    more = operand_gradients(p, tensors, wanted, BACKWARD)
    want_dkdv = wanted.dk or wanted.dv
    new_dq, new_dk, new_dv = map(room_like, tensors[:3])
    new_lse, new_delta = statistics(p, tensors.q)
    fits = launch.suits_tma(dout)
    # narrow heads leave registers for dK and dV together
    together = p.head_dim == p.head_dim_v <= 128

    def make(call: Call) -> list[Launch]:
        plan = preprocess(p, call, 1.0 - p.dropout_p, for_wgmma=True)
        if want_dkdv:
            plan.append(one_pass(p, call) if together else _dkdv(p, call))
        if wanted.dq:
            plan.append(_dq(p, call))
        return plan

    plan = Plan(BACKWARD, device, make)

    def run(
        t: AttentionTensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        t = t if fit is None else fit(t)
        dout = dout if fits else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        dq = new_dq() if wanted.dq else None
        dk, dv = (new_dk(), new_dv()) if want_dkdv else (None, None)
        call = (
            *t, out, lse, dout, dlse, new_lse(), new_delta(), dq, dk, dv,
            counters.counter_of(device),
        )  # fmt: skip
        plan(call)
        if p.softmax_scale < 0 and dq is not None:
            dq.neg_()
        grads = Gradients(dq, dk, dv)
        if more is not None:
            more(grads, call)
        return grads

    return run


def _tiles(call: Call, name: str, rows: int, width: int) -> Of:
    x = call[name]
    assert x is not None
    return Of(name, launch.descriptor(x, rows, width, compat.shared_descriptor))


def _statistic(call: Call, name: str) -> Of:
    x = call[name]
    assert x is not None
    shape = list(x.shape)
    return Of(name, compat.matrix_descriptor(x, shape, [shape[1], 1], [1, ROWS], False))


def _how(p: AttentionProblem, t: AttentionTensors) -> dict[str, Any]:
    block_d, block_dv = widths(p)
    return {
        **launch.shared_arguments(p, t),
        "grad_scale": grad_scale(p),
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "CONSUMER_REGISTERS": 240,
        "PRODUCER_REGISTERS": 24,
        "APPROX_TANH": launch.approx_tanh(t.q),
    }


def _dkdv(p: AttentionProblem, call: Call) -> Launch:
    t = launch.tensors_of(call)
    block_d, block_dv = widths(p)
    num_n_blocks = -(-p.seqlen_k // KEYS)
    dk, dv = call["dk"], call["dv"]
    assert dk is not None and dv is not None
    arguments: dict[str, Any] = {
        **_how(p, t),
        "q": _tiles(call, "q", ROWS, block_d),
        "dout": _tiles(call, "dout", ROWS, block_dv),
        "k": _tiles(call, "k", KEYS, block_d),
        "v": _tiles(call, "v", KEYS, block_dv),
        "dk": _tiles(call, "dk", KEYS, block_d),
        "dv": _tiles(call, "dv", KEYS, block_dv),
        "lse": _statistic(call, "lse_padded"),
        "delta": _statistic(call, "delta"),
        "dk_rows": Of("dk") if p.layout == VARLEN else None,
        "dv_rows": Of("dv") if p.layout == VARLEN else None,
        "dk_strides": launch.strides(dk),
        "dv_strides": launch.strides(dv),
        "num_n_blocks": num_n_blocks,
        "section": launch.section(p, p.nheads_kv),
    }
    options = compat.launch_options(num_warps=4, num_stages=1, maxnreg=168)
    grid = num_n_blocks * p.nheads_kv * p.batch
    return Launch(flash_bwd_dkdv_sm90_kernel, grid, arguments, options)


def _dq(p: AttentionProblem, call: Call) -> Launch:
    t = launch.tensors_of(call)
    block_d, block_dv = widths(p)
    num_m_blocks = -(-p.seqlen_q // BLOCK_M)
    dq = call["dq"]
    assert dq is not None
    arguments: dict[str, Any] = {
        **_how(p, t),
        "q": _tiles(call, "q", ROWS, block_d),
        "dout": _tiles(call, "dout", ROWS, block_dv),
        "k": _tiles(call, "k", KEYS, block_d),
        "v": _tiles(call, "v", KEYS, block_dv),
        "dq": _tiles(call, "dq", ROWS, block_d),
        "lse": Of("lse_padded"),
        "delta": Of("delta"),
        "dq_rows": Of("dq") if p.layout == VARLEN else None,
        "dq_strides": launch.strides(dq),
        "num_m_blocks": num_m_blocks,
        "section": launch.section(p, p.nheads),
        "V_STAGES": 1 if max(block_d, block_dv) == 256 else 2,
    }
    options = compat.launch_options(num_warps=4, num_stages=1, maxnreg=168)
    grid = num_m_blocks * p.nheads * p.batch
    return Launch(flash_bwd_dq_sm90_kernel, grid, arguments, options)
