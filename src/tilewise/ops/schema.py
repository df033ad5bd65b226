"""The flat argument list of the operators, and the facts and tensors it stands for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends.base import AttentionTensors, arch
from ..core.mask import MaskSpec
from ..core.problem import DENSE, VARLEN, AttentionProblem

TENSOR_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_bias, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? seed"
)
SCALAR_ARGUMENTS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, "
    "float softcap, SymInt window_left, SymInt window_right, bool deterministic, "
    "str backend, str algorithm"
)
ARGUMENTS = f"{TENSOR_ARGUMENTS}, {SCALAR_ARGUMENTS}"
NUM_TENSORS = TENSOR_ARGUMENTS.count(",") + 1
NUM_ARGUMENTS = ARGUMENTS.count(",") + 1


class Scalars(NamedTuple):
    """The scalar arguments in the schema's order; in dense calls the lengths are the tensors'."""

    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    deterministic: bool
    backend: str
    algorithm: str


def split(arguments: tuple[object, ...]) -> tuple[AttentionTensors, Scalars]:
    """The operators' flat arguments as tensors and scalars."""
    tensors, scalars = arguments[:NUM_TENSORS], arguments[NUM_TENSORS:NUM_ARGUMENTS]
    return AttentionTensors(*tensors), Scalars(*scalars)  # type: ignore[arg-type]


def describe(
    t: AttentionTensors, s: Scalars, needs_grad: bool, attn_probs: bool = False
) -> AttentionProblem:
    """The facts of a call, read from shapes, dtypes and scalars alone."""
    varlen = t.cu_seqlens_q is not None
    nheads, nheads_kv = t.q.shape[-2], t.k.shape[-2]
    head_dim, head_dim_v = t.q.shape[-1], t.v.shape[-1]
    used = {
        "causal": s.window_right == 0,
        "window": s.window_left >= 0 or s.window_right > 0,
        "softcap": s.softcap > 0,
        "alibi": t.alibi_slopes is not None,
        "attn_bias": t.attn_bias is not None and t.attn_bias.dtype != torch.bool,
        "bool_mask": t.attn_bias is not None and t.attn_bias.dtype == torch.bool,
        "sink": t.sink is not None,
        "dropout": s.dropout_p > 0,
        "gqa": nheads != nheads_kv,
        "head_dim_v": head_dim != head_dim_v,
        "varlen": varlen,
        "seqused": t.seqused_q is not None or t.seqused_k is not None,
        "deterministic": s.deterministic,
        "attn_probs": attn_probs,
    }
    return AttentionProblem(
        device=t.q.device.type,
        dtype=str(t.q.dtype).removeprefix("torch."),
        layout=VARLEN if varlen else DENSE,
        batch=t.q.shape[0] if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0] - 1,
        seqlen_q=s.max_seqlen_q,
        seqlen_k=s.max_seqlen_k,
        nheads=nheads,
        nheads_kv=nheads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=MaskSpec.from_window(s.window_left, s.window_right),
        softmax_scale=s.softmax_scale,
        softcap=s.softcap,
        dropout_p=s.dropout_p,
        features=frozenset(name for name, on in used.items() if on),
        needs_grad=needs_grad,
        deterministic=s.deterministic,
        arch=arch(t.q),
    )
