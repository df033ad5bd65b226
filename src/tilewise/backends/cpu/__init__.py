"""FlashAttention and FlashAttention-2 on a CPU, in torch, to be read beside the papers.

``fa1.py`` and ``fa2.py`` are the two forwards, ``bwd.py`` the backward of both, ``score.py`` the
score pipeline, ``tiles.py`` how a call is cut.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...core import features
from ...core.problem import VARLEN, AttentionProblem
from ..base import AttentionTensors, Gradients, InTorch, Wanted, lse_dtype
from . import bwd, fa1, fa2
from .score import NEG_INF
from .tiles import Scratch, block_sizes, make_chunk, slots, work_dtype

_FORWARD = {"fa2": fa2, "fa1": fa1}


def _tile_elements(problem: AttentionProblem, module: ModuleType) -> int:
    """Elements of the score tile of one key head."""
    size = block_sizes(
        module.BLOCK_M,
        module.BLOCK_N,
        problem.group,
        problem.seqlen_q,
        problem.seqlen_k,
    )
    return problem.group * size.BLOCK_M * size.BLOCK_N


class CpuBackend(InTorch):
    """The CPU backend; see ``backends.base.Backend``."""

    name = "cpu"
    algorithms = ("fa2", "fa1")
    automatic = True

    def supports(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See ``Backend.supports``."""
        reasons = []
        if problem.device not in ("cpu", "meta"):
            reasons.append(f"computes on a CPU, and the tensors are on {problem.device}")
        reasons += features.reasons_against(
            self.name, problem.dtype, problem.features, problem.needs_grad
        )
        return tuple(reasons)

    def fwd(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> tuple[Tensor, Tensor]:
        """See ``InTorch.fwd``."""
        q, h, dv = tensors.q, problem.nheads, problem.head_dim_v
        if problem.layout == VARLEN:
            out = q.new_zeros(q.shape[0], h, dv)
            lse = q.new_full((h, q.shape[0]), NEG_INF, dtype=lse_dtype(tensors))
        else:
            out = q.new_empty(problem.batch, problem.seqlen_q, h, dv)
            lse = q.new_empty(problem.batch, h, problem.seqlen_q, dtype=lse_dtype(tensors))
        forward = _FORWARD[algorithm]
        scratch = Scratch.of_this_thread(work_dtype(q.dtype))
        for slot in slots(problem, tensors, _tile_elements(problem, forward)):
            chunk = make_chunk(problem, tensors, slot, scratch)
            forward.fwd(chunk, slot.queries(out, problem.group), slot.stats(lse, problem.group))
        return out, lse

    def bwd(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
        algorithm: str,
    ) -> Gradients:
        """See ``InTorch.bwd``."""
        t, group = tensors, problem.group
        dtype = work_dtype(t.q.dtype)

        def like(x: Tensor, want: bool) -> Tensor | None:
            return x.new_zeros(x.shape) if want else None  # zeros: slack rows are never visited

        grads = Gradients(like(t.q, wanted.dq), like(t.k, wanted.dk), like(t.v, wanted.dv))
        if wanted.dbias:
            assert t.attn_bias is not None
            grads.dbias = torch.zeros(t.attn_bias.shape, dtype=dtype)
        if wanted.dsink:
            assert t.sink is not None
            grads.dsink = torch.zeros(t.sink.shape, dtype=torch.float64)

        scratch = Scratch.of_this_thread(dtype)
        for slot in slots(problem, t, _tile_elements(problem, bwd)):
            into = bwd.ChunkGradients(
                dq=None if grads.dq is None else slot.queries(grads.dq, group),
                dk=None if grads.dk is None else slot.keys(grads.dk),
                dv=None if grads.dv is None else slot.keys(grads.dv),
                dbias=None if grads.dbias is None else slot.bias(grads.dbias, group),
                dsink=None if grads.dsink is None else grads.dsink.view(-1, group)[slot.kv_heads],
            )
            bwd.bwd(
                make_chunk(problem, t, slot, scratch),
                slot.queries(out, group),
                slot.stats(lse, group),
                slot.queries(dout, group),
                None if dlse is None else slot.stats(dlse, group),
                into,
            )
        if grads.dbias is not None and t.attn_bias is not None:
            grads.dbias = grads.dbias.to(t.attn_bias.dtype)
        if grads.dsink is not None and t.sink is not None:
            grads.dsink = grads.dsink.to(t.sink.dtype)
        return grads
