"""Gradients of what is not q, k or v: the bias and the sink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...kernels.triton.bwd_dbias import flash_bwd_dbias_kernel
from ...tuning import lookup
from ..base import AttentionTensors, Gradients, Wanted
from . import launch
from .launch import Launch, Of


def add_operand_gradients(
    grads: Gradients,
    wanted: Wanted,
    p: AttentionProblem,
    t: AttentionTensors,
    call: dict[str, Tensor | None],
) -> None:
    """Adds the bias's and the sink's gradients.

    Args:
        grads: where they go.
        wanted: whether they are wanted.
        p, t: the call.
        call: its tensors by name, with out, lse, dout, dlse and the padded statistics.
    """
    bias = t.attn_bias
    if wanted.dbias and bias is not None and bias.shape[-1] != 1:
        grads.dbias = _bias_gradient(p, t, call, bias)
    elif wanted.dbias and bias is not None:
        grads.dbias = RowTerms.of(t, call).to_bias(bias)
    if wanted.dsink and t.sink is not None:
        grads.dsink = RowTerms.of(t, call).to_sink(t.sink)


def _bias_gradient(
    p: AttentionProblem, t: AttentionTensors, call: dict[str, Tensor | None], bias: Tensor
) -> Tensor:
    """Gradient of a floating bias that differs from key to key, in its shape and dtype."""
    arch = launch.arch(t.q)
    config = lookup.config("bwd_dbias", arch, p)
    dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    if dbias.numel() * p.seqlen_q * p.seqlen_k * p.batch == 0:
        return dbias
    call = call | {"dbias": dbias}
    facts = ("bwd_dbias", arch, p, config, launch.precision(p.dtype))
    plan = launch.plans.find(facts, call, lambda: [_dbias(p, t, call, dbias, config)])
    launch.run(plan, call)
    return dbias


def _dbias(
    p: AttentionProblem,
    t: AttentionTensors,
    call: dict[str, Tensor | None],
    dbias: Tensor,
    config: TileConfig,
) -> Launch:
    dout = call["dout"]
    assert dout is not None
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
    def of(cls, t: AttentionTensors, call: dict[str, Tensor | None]) -> RowTerms:
        """The terms of a call."""
        out, lse, dout, dlse = (call[name] for name in ("out", "lse", "dout", "dlse"))
        assert out is not None and lse is not None and dout is not None
        empty = lse == -torch.inf
        sink = torch.zeros_like(lse)
        if t.sink is not None:
            delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2)
            if dlse is not None:
                delta = delta - dlse
            rounded = t.sink.float().to(lse.dtype)  # as the forward reads it
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
