"""Launches the backward in two passes: statistics, dK and dV, dQ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ...kernels.gluon.bwd_dkdv_sm90 import KEYS as _KEYS
from ...kernels.gluon.bwd_dkdv_sm90 import flash_bwd_dkdv_sm90_kernel
from ...kernels.gluon.bwd_dq_sm90 import BLOCK_M as _BLOCK_M
from ...kernels.gluon.bwd_dq_sm90 import flash_bwd_dq_sm90_kernel
from ..base import AttentionTensors, Gradients, Wanted
from ..triton import launch
from ..triton.bwd import given, preprocess, statistics
from ..triton.launch import Launch, Of
from ..triton.operands import add_operand_gradients
from .fwd import for_tma, widths

KEYS: int = _KEYS.value
BLOCK_M: int = _BLOCK_M.value
ROWS = 64  # of a warpgroup


def takes(p: AttentionProblem) -> bool:
    """Whether a call goes this way: heads too wide for the one pass, and additions in one order."""
    wide = max(p.head_dim, p.head_dim_v) > 128
    return (wide or p.deterministic) and p.batch * p.nheads * p.seqlen_q * p.seqlen_k > 0


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
    p = problem
    t = for_tma(launch.with_positive_scale(p, tensors))
    dout = dout if launch.suits_tma(dout) else dout.contiguous()
    want_dkdv = wanted.dk or wanted.dv
    grads = Gradients(
        *(
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if want else None
            for x, want in ((t.q, wanted.dq), (t.k, want_dkdv), (t.v, want_dkdv))
        )
    )
    lse_padded, delta = statistics(p, t.q)
    call = given(t, out, lse, dout, dlse)
    call |= {"lse_padded": lse_padded, "delta": delta}
    call |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    def make() -> list[Launch]:
        plan = preprocess(p, t, out, dout, dlse, for_wgmma=True)
        if want_dkdv:
            plan.append(_dkdv(p, t, call))
        if wanted.dq:
            plan.append(_dq(p, t, call))
        return plan

    launch.run(launch.plans.find(("gluon_bwd_two_pass", p), call, make), call)
    if p.softmax_scale < 0 and grads.dq is not None:
        grads.dq.neg_()
    add_operand_gradients(grads, wanted, p, t, call)
    return grads


def _tiles(call: dict[str, Tensor | None], name: str, rows: int, width: int) -> Of:
    x = call[name]
    assert x is not None
    return Of(name, launch.descriptor(x, rows, width, compat.shared_descriptor))


def _statistic(call: dict[str, Tensor | None], name: str) -> Of:
    x = call[name]
    assert x is not None
    shape = list(x.shape)
    return Of(name, compat.matrix_descriptor(x, shape, [shape[1], 1], [1, ROWS], False))


def _how(p: AttentionProblem, t: AttentionTensors) -> dict[str, Any]:
    block_d, block_dv = widths(p)
    return {
        **launch.shared_arguments(p, t),
        "grad_scale": abs(p.softmax_scale),
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "CONSUMER_REGISTERS": 240,
        "PRODUCER_REGISTERS": 24,
        "APPROX_TANH": launch.approx_tanh(t.q),
    }


def _dkdv(p: AttentionProblem, t: AttentionTensors, call: dict[str, Tensor | None]) -> Launch:
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


def _dq(p: AttentionProblem, t: AttentionTensors, call: dict[str, Tensor | None]) -> Launch:
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
