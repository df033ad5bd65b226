"""Forward and backward as two calls, for interfaces that keep what lies between themselves.

A dense call has q (batch, seqlen_q, nheads, head_dim), k (batch, seqlen_k, nheads_kv, head_dim) and
v (batch, seqlen_k, nheads_kv, head_dim_v); a packed one no batch, and rows for lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import Options, Packing, dense_call, packed_call
from ..backends.base import AttentionTensors, lse_dtype
from ..ops.attention import bwd_below_autograd, flash_attn_bwd, flash_attn_fwd, fwd_below_autograd
from ..ops.schema import Scalars


def forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention without autograd.

    Args:
        q, k, v: see the module.
        packing: of a packed call, or None.
        options: ``return_lse`` and ``return_attn_probs`` are not read.

    Returns:
        out; lse (batch, nheads, seqlen_q) or (nheads, total_q), float32 (float64 for float64); and
        the (1,) int64 seed, None without dropout.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: no backend can take the call.
    """
    with torch.no_grad():
        tensors, scalars = _call(q, k, v, packing, options)
        flat = _flat(tensors, scalars)
        out, lse = (
            flash_attn_fwd(*flat) if torch.compiler.is_compiling() else fwd_below_autograd(flat)
        )
    return out, lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32), tensors.seed


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        dout: gradient of out.
        q, k, v: see the module.
        out, lse: what ``forward`` returned, or of other keys in a ring.
        packing: as of the forward.
        options: as of the forward, with its seed when there is dropout.

    Returns:
        dq, dk and dv, contiguous, in the inputs' shapes and dtype.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: no backend can take the call.
    """
    with torch.no_grad():
        tensors, scalars = _call(q, k, v, packing, options)
        lse = lse.to(lse_dtype(tensors))
        wanted = [True, True, True, False, False]
        flat = (dout, None, *_flat(tensors, scalars), out, lse, wanted)
        compiling = torch.compiler.is_compiling()
        dq, dk, dv, *_ = flash_attn_bwd(*flat) if compiling else bwd_below_autograd(flat)
    return dq, dk, dv


def _call(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options
) -> tuple[AttentionTensors, Scalars]:
    with torch.autocast(q.device.type, enabled=False):  # whoever keeps the halves casts before
        if packing is None:
            return dense_call(q, k, v, options)
        return packed_call(q, k, v, packing, options)


def _flat(t: AttentionTensors, scalars: Scalars) -> tuple[Any, ...]:
    return (
        t.q, t.k, t.v, t.attn_bias, t.alibi_slopes, t.sink, t.cu_seqlens_q, t.cu_seqlens_k,
        t.seqused_q, t.seqused_k, t.seed, *scalars,
    )  # fmt: skip
