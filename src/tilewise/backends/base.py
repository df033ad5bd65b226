"""What every backend is: reasons against a call, a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.problem import AttentionProblem
from ..formats import varlen


class AttentionTensors(NamedTuple):
    """The tensors of one call; an operand that is absent is None.

    Attributes:
        q: (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) in varlen.
        k: (batch, seqlen_k, nheads_kv, head_dim), or (total_k, nheads_kv, head_dim).
        v: (batch, seqlen_k, nheads_kv, head_dim_v), or (total_k, nheads_kv, head_dim_v).
        attn_bias: four dimensions that broadcast to (batch, nheads, seqlen_q, seqlen_k), or in
            varlen (nheads or 1, total_q, max_seqlen_k); floating (added) or bool (True is seen).
        alibi_slopes: (batch, nheads) or (nheads,), float32 (float64 beside float64 inputs).
        sink: (nheads,).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers, varlen only.
        seqused_q, seqused_k: (batch,) integers, varlen only.
        seed: (1,) int64, present exactly when dropout is on.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    seed: Tensor | None = None


@lru_cache
def _arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch(x: Tensor) -> str:
    """What x's GPU is called, such as "sm_90" or "gfx942"; "" where it is on none."""
    return _arch(x.device.index) if x.is_cuda and torch.cuda.is_available() else ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients a backward must compute."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dbias: bool = False
    dsink: bool = False


@dataclass(slots=True)
class Gradients:
    """What a backward computed; None where it was not wanted."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsink: Tensor | None = None


def packed_sequences(
    problem: AttentionProblem, tensors: AttentionTensors
) -> list[varlen.SequenceRows]:
    """The sequences of a varlen call, with the values of its boundaries checked on the host."""
    t = tensors
    assert t.cu_seqlens_q is not None and t.cu_seqlens_k is not None
    return varlen.sequences(
        t.cu_seqlens_q,
        t.cu_seqlens_k,
        total_q=t.q.shape[0],
        total_k=t.k.shape[0],
        max_seqlen_q=problem.seqlen_q,
        max_seqlen_k=problem.seqlen_k,
        seqused_q=t.seqused_q,
        seqused_k=t.seqused_k,
    )


def lse_dtype(t: AttentionTensors) -> torch.dtype:
    """The dtype in which the ops hand lse from forward to backward.

    For float32 inputs, beside a floating bias, and for all on a CPU, that is float64: beside scores
    of thousands float32 has no digits left for the logarithm of the sum, and the recomputed
    probabilities would not add up to one. Users get float32 (float64 for float64 inputs).
    """
    half = t.q.dtype in (torch.float16, torch.bfloat16)
    biased = t.attn_bias is not None and t.attn_bias.dtype != torch.bool
    return torch.float64 if t.q.device.type == "cpu" or not half or biased else torch.float32


Forward = Callable[[AttentionTensors], tuple[Tensor, Tensor]]
Backward = Callable[[AttentionTensors, Tensor, Tensor, Tensor, Tensor | None], Gradients]


class Backend(Protocol):
    """One way to compute attention.

    What it hands out are functions, each of which then serves every call of one kind: with equal
    scalars, and with tensors of equal dtypes, shapes, strides and devices, whose addresses leave
    equal rests by 16. A function holds none of the tensors that it was asked for with, looks at the
    values that are on the host each time, and may be called by several threads at once.
    """

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def algorithms(self) -> tuple[str, ...]:
        """What it can run; the first is what "auto" takes."""
        ...

    @property
    def automatic(self) -> bool:
        """Whether backend="auto" may take it."""
        ...

    def supports(self, problem: AttentionProblem) -> tuple[str, ...]:
        """The reasons against this call; empty when it can be taken."""
        ...

    def forward(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> Forward:
        """A function of the tensors that returns out, contiguous in q's dtype, and lse, (batch,
        nheads, seqlen_q) or (nheads, total_q)."""
        ...

    def backward(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        dout: Tensor,
        wanted: Wanted,
        algorithm: str,
    ) -> Backward:
        """A function of the tensors, out, lse, dout and dlse, or None for it, that returns the
        gradients of <out, dout> + <lse, dlse>, contiguous, each in its input's dtype."""
        ...


class InTorch:
    """A backend for whose calls nothing is worked out beforehand: torch's operators compute them.

    They do so in the dtypes that the backend says, whatever torch's autocast would make of them.
    """

    def fwd(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> tuple[Tensor, Tensor]:
        """out and lse, as a ``Forward``."""
        raise NotImplementedError

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
        """The gradients, as a ``Backward``."""
        raise NotImplementedError

    def forward(
        self, problem: AttentionProblem, tensors: AttentionTensors, algorithm: str
    ) -> Forward:
        """See ``Backend.forward``."""

        def run(t: AttentionTensors) -> tuple[Tensor, Tensor]:
            with torch.autocast(problem.device, enabled=False):
                return self.fwd(problem, t, algorithm)

        return run

    def backward(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        dout: Tensor,
        wanted: Wanted,
        algorithm: str,
    ) -> Backward:
        """See ``Backend.backward``."""

        def run(
            t: AttentionTensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
        ) -> Gradients:
            with torch.autocast(problem.device, enabled=False):
                return self.bwd(problem, t, out, lse, dout, dlse, wanted, algorithm)

        return run
