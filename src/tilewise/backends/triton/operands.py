"""Gradients of what is not q, k or v: the bias and the sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels.triton.bwd_dbias import flash_bwd_dbias_kernel
from ...tuning import lookup
from ..base import AttentionTensors, Gradients, Wanted
from . import launch
from .launch import Call, Launch, Of, Plan

Adds = Callable[[Gradients, tuple[Tensor | None, ...]], None]


def operand_gradients(
    p: AttentionProblem, t: AttentionTensors, wanted: Wanted, names: tuple[str, ...]
) -> Adds | None:
    """What adds the bias's and the sink's gradients to a backward's; None where none is wanted.

    Args:
        p, t: the call.
        wanted: whether they are wanted.
        names: of the tensors that are given then, with out, lse, dout, dlse and the padded
            statistics among them.
    """
    bias, sink = wanted.dbias and t.attn_bias is not None, wanted.dsink and t.sink is not None
    if not (bias or sink):
        return None
    by_key = bias and t.attn_bias is not None and t.attn_bias.shape[-1] != 1
    dbias = _bias_gradient(p, t, names) if by_key else None

    def add(grads: Gradients, tensors: tuple[Tensor | None, ...]) -> None:
        call = dict(zip(names, tensors, strict=True))
        if dbias is not None:
            grads.dbias = dbias(tensors)
        if by_key and not sink:
            return
        with torch.autocast(p.device, enabled=False):
            terms = RowTerms.of(call)
            if bias and not by_key:
                grads.dbias = terms.to_bias(call["attn_bias"])  # type: ignore[arg-type]
            if sink:
                grads.dsink = terms.to_sink(call["sink"])  # type: ignore[arg-type]

    return add


def _bias_gradient(
    p: AttentionProblem, t: AttentionTensors, names: tuple[str, ...]
) -> Callable[[tuple[Tensor | None, ...]], Tensor]:
    """What computes the gradient of a floating bias that differs from key to key, in its shape and
    dtype."""
    bias = t.attn_bias
    assert bias is not None
    config = lookup.config("bwd_dbias", launch.arch(t.q), p)
    shape, dtype, device = bias.shape, bias.dtype, bias.device
    nothing = bias.numel() * p.seqlen_q * p.seqlen_k * p.batch == 0
    plan = Plan((*names, "dbias"), device, lambda call: [_dbias(p, call, config)])

    def run(tensors: tuple[Tensor | None, ...]) -> Tensor:
        dbias = torch.zeros(shape, dtype=dtype, device=device)
        if not nothing:
            plan((*tensors, dbias))
        return dbias

    return run


def _dbias(p: AttentionProblem, call: Call, config: TileConfig) -> Launch:
    t, dbias = launch.tensors_of(call), call["dbias"]
    dout = call["dout"]
    assert dout is not None and dbias is not None
    varlen = p.layout == VARLEN
    shape = (p.batch, *dbias.shape) if varlen else dbias.shape
    one_row = not varlen and shape[2] == 1
    num_m_blocks = 1 if one_row else -(-p.seqlen_q // config.BLOCK_M)
    num_n_blocks = -(-p.seqlen_k // config.BLOCK_N)
    shared = launch.shared_arguments(p, t)
    tiling = launch.tiling(config, False, t.q)
    arguments = {
        **{name: Of(name) for name in ("q", "k", "v", "dout", "delta", "dbias")},
        "lse": Of("lse_padded"),
        **launch.row_strides(q=t.q, k=t.k, v=t.v, dout=dout),
        **shared,
        "dbias_strides": dbias.stride() if dbias.dim() == 4 else (0, *dbias.stride()),
        "bias_heads": shape[1],
        "heads_each": p.nheads // shape[1],
        "batches_each": p.batch // shape[0],
        "num_m_blocks": num_m_blocks,
        "num_n_blocks": num_n_blocks,
        "ONE_ROW": one_row,
        **tiling,
    }
    grid = num_n_blocks * num_m_blocks * shape[1] * shape[0]
    return Launch(flash_bwd_dbias_kernel, grid, arguments, launch.options(config))


def _weight(score: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), from an lse as ``kernels.triton.score.to_lse`` writes it."""
    if lse.dtype != torch.float64:
        return torch.exp(score - lse)
    m = lse.float().double()
    m = m.masked_fill(m.isinf(), 0.0)
    logarithm = (lse - m) / (m.abs() * 2.0**-31).clamp(1.0)
    return torch.exp((score - m) - logarithm)


@dataclass(frozen=True, slots=True)
class RowTerms:
    """What a row's gradients come to without its keys, float32 in lse's layout.

    Attributes:
        sink: p_sink delta, with p_sink = exp(sink - lse), 0 without a sink.
        keys: sum_j dS_ij = dlse_i + p_sink delta_i, whatever the keys; 0 in rows without keys.
    """

    sink: Tensor
    keys: Tensor

    @classmethod
    def of(cls, call: Call) -> RowTerms:
        """The terms of a call."""
        out, lse, dout, dlse, logit = (call[n] for n in ("out", "lse", "dout", "dlse", "sink"))
        assert out is not None and lse is not None and dout is not None
        empty = lse == -torch.inf
        sink = torch.zeros_like(lse)
        if logit is not None:
            delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2)
            if dlse is not None:
                delta = delta - dlse
            rounded = logit.float().to(lse.dtype)  # as the forward reads it
            p_sink = _weight(rounded[:, None], lse)
            sink = (p_sink * delta).masked_fill(empty, 0.0)
        keys = sink if dlse is None else sink + dlse.masked_fill(empty, 0.0)
        return cls(sink, keys)

    def to_sink(self, sink: Tensor) -> Tensor:
        """The sink's gradient: - sum over rows of p_sink delta, (nheads,)."""
        return self.sink.sum(-1 if self.sink.dim() == 2 else (0, 2)).neg().to(sink.dtype)

    def to_bias(self, bias: Tensor) -> Tensor:
        """The gradient of a bias that all keys of a row share."""
        return self.keys[..., None].sum_to_size(bias.shape).to(bias.dtype)
