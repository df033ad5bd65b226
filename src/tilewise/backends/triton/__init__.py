"""FlashAttention and FlashAttention-2 in Triton, on any GPU that Triton has.

Nothing here imports triton until a call is taken, so that tilewise can be imported without it.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...core import features
from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ..base import AttentionTensors, Gradients, Wanted, packed_sequences

MAX_HEAD_DIM = 512


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU: TRITON_INTERPRET was set."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes x's GPU the current one, on which Triton launches whatever the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class TritonBackend:
    """The Triton backend; see ``backends.base.Backend``."""

    name = "triton"
    algorithms = ("fa2", "fa1")
    automatic = True

    def supports(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See ``Backend.supports``."""
        p = problem
        reasons = []
        on_cpu = p.device == "cpu" and interpreted()
        if p.device != "cuda" and not on_cpu:
            reasons.append(f"computes on a GPU, and the tensors are on {p.device}")
        elif importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed: pip install 'tilewise[triton]'")
        elif on_cpu and p.dtype == "bfloat16":
            reasons.append("Triton's interpreter computes bfloat16 products wrongly")
        for name, width in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
            if width > MAX_HEAD_DIM:
                reasons.append(f"{name} {width} is over {MAX_HEAD_DIM}")
        reasons += features.reasons_against(self.name, p.dtype, p.features, p.needs_grad)
        return tuple(reasons)

    def fwd(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> tuple[Tensor, Tensor]:
        """See ``Backend.fwd``."""
        compat.check_version()
        if problem.layout == VARLEN and not tensors.q.is_cuda:
            packed_sequences(problem, tensors)  # values on the host are checked
        with _on_device_of(tensors.q):
            if algorithm == "fa1":
                from . import fa1

                return fa1.fwd(problem, tensors)
            from .fwd import fwd

            return fwd(problem, tensors)

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
        """See ``Backend.bwd``."""
        compat.check_version()
        with _on_device_of(tensors.q):
            if algorithm == "fa1":
                from . import fa1

                return fa1.bwd(problem, tensors, out, lse, dout, dlse, wanted)
            from .bwd import bwd

            return bwd(problem, tensors, out, lse, dout, dlse, wanted)
