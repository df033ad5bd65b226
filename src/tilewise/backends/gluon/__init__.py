"""FlashAttention-3 for Hopper, in Gluon.

The backward of what ``bwd.takes`` or ``bwd_two_pass.takes`` names is this backend's own, the rest
the Triton backend's, which reads the same out and lse. Nothing here imports triton until a call is
taken.
"""

from __future__ import annotations

import importlib.util

from torch import Tensor

from ...core import features
from ...core.problem import AttentionProblem
from ..base import AttentionTensors, Backward, Forward, Wanted
from ..triton import TritonBackend

MAX_HEAD_DIM = 256


class GluonBackend:
    """The Gluon backend; see ``backends.base.Backend``."""

    name = "gluon"
    algorithms = ("fa3",)
    automatic = True
    _triton = TritonBackend()

    def supports(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See ``Backend.supports``."""
        p = problem
        reasons = []
        if p.device != "cuda":
            reasons.append(f"computes on a Hopper GPU, and the tensors are on {p.device}")
        elif p.arch != "sm_90":
            reasons.append(f"computes on Hopper, sm_90, and the GPU is {p.arch}")
        elif importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed: pip install 'tilewise[triton]'")
        for name, width in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
            if width > MAX_HEAD_DIM:
                reasons.append(f"{name} {width} is over {MAX_HEAD_DIM}")
            elif width % 8:
                reasons.append(f"{name} {width} is no multiple of 8: TMA moves 16 bytes at a time")
        reasons += features.reasons_against(self.name, p.dtype, p.features, p.needs_grad)
        return tuple(reasons)

    def forward(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> Forward:
        """See ``Backend.forward``."""
        from ...kernels import compat

        compat.check_version()
        if tensors.k.numel() == 0:  # a descriptor must have rows
            return self._triton.forward(problem, tensors, "fa2")
        from .fwd import forward

        return forward(problem, tensors)

    def backward(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        dout: Tensor,
        wanted: Wanted,
        algorithm: str,
    ) -> Backward:
        """See ``Backend.backward``."""
        from . import bwd, bwd_two_pass

        found = [way for way in (bwd, bwd_two_pass) if way.takes(problem)]
        if not found or tensors.q.numel() * tensors.k.numel() == 0:
            return self._triton.backward(problem, tensors, dout, wanted, "fa2")
        return found[0].backward(problem, tensors, dout, wanted)
