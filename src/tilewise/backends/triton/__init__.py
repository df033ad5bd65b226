"""FlashAttention and FlashAttention-2 in Triton, on any GPU that Triton has.

Nothing here imports triton until a call is taken, so that tilewise can be imported without it.
"""

from __future__ import annotations

import importlib.util
import os

from torch import Tensor

from ...core import features
from ...core.problem import VARLEN, AttentionProblem
from ...kernels import compat
from ..base import AttentionTensors, Backward, Forward, Wanted, packed_sequences

MAX_HEAD_DIM = 512


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU: TRITON_INTERPRET was set."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


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

    def forward(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> Forward:
        """See ``Backend.forward``."""
        compat.check_version()
        if algorithm == "fa1":
            from .fa1 import forward
        else:
            from .fwd import forward

        found = forward(problem, tensors)
        if problem.layout != VARLEN or tensors.q.is_cuda:
            return found

        def checked(t: AttentionTensors) -> tuple[Tensor, Tensor]:
            packed_sequences(problem, t)  # values on the host are checked
            return found(t)

        return checked

    def backward(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        dout: Tensor,
        wanted: Wanted,
        algorithm: str,
    ) -> Backward:
        """See ``Backend.backward``."""
        compat.check_version()
        if algorithm == "fa1":
            from .fa1 import backward
        else:
            from .bwd import backward

        return backward(problem, tensors, wanted)
