"""What can compute attention on a CPU, each in its natural contiguous layout; the common form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._version import __version__
from ..api import flash_attn_func, flash_attn_varlen_func

FORWARD = "fwd"
BACKWARD = "bwd"
FORWARD_BACKWARD = "fwd_bwd"
DIRECTIONS = (FORWARD, BACKWARD, FORWARD_BACKWARD)
_MATMULS = {FORWARD: 1.0, BACKWARD: 2.5, FORWARD_BACKWARD: 3.5}  # in forwards, as the papers count

# What a softmax may find hard: see ``make_inputs``.
INPUTS = ("randn", "rising", "falling", "first-key", "large")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and options of one self-attention call.

    Attributes:
        batch, seqlen, nheads, head_dim: sizes; keys are as long as queries.
        causal: whether the causal mask is on.
        dtype: a name such as "float32".
        dropout_p: probability of dropping a weight.
        device: "cpu" or "cuda".
        dropout_seed: of tilewise's dropout; drawn in each call when None.
        nheads_kv: heads of k and v; nheads when None.
        inputs: one of INPUTS.
        lengths: of the sequences of a packed call, whose batch and seqlen are their number and
            their maximum; () for a dense call.
    """

    batch: int = 1
    seqlen: int = 1024
    nheads: int = 8
    head_dim: int = 64
    causal: bool = True
    dtype: str = "float32"
    dropout_p: float = 0.0
    device: str = "cpu"
    dropout_seed: int | None = None
    nheads_kv: int | None = None
    inputs: str = "randn"
    lengths: tuple[int, ...] = ()

    @property
    def heads_kv(self) -> int:
        """Heads of k and v."""
        return self.nheads_kv or self.nheads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def matrix_bytes(self) -> int:
        """Size of one (batch, nheads, seqlen, seqlen) matrix in ``dtype``."""
        return self.batch * self.nheads * self.seqlen**2 * self.torch_dtype.itemsize

    def flops(self, direction: str) -> float:
        """Operations counted as the papers do: two matmuls forward, five backward."""
        squares = sum(n**2 for n in self.lengths or (self.seqlen,) * self.batch)
        forward = 4.0 * self.nheads * self.head_dim * squares
        return forward * (0.5 if self.causal else 1.0) * _MATMULS[direction]


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute attention.

    Attributes:
        name: as in result files.
        heads_first: whether tensors are (batch, nheads, seqlen, head_dim).
        bind: a shape to the call (q, k, v) -> out, all in the provider's layout; what the call
            needs beside its tensors, such as a block mask, is made here, outside any timing.
        package: whose version is the provider's.
        quadratic: whether it holds matrices of seqlen x seqlen.
        has_backward, has_dropout, has_packed: what it can do at all.
        absent: why it cannot be used on this machine; None when it can.
    """

    name: str
    heads_first: bool
    bind: Callable[[Shape], Attend]
    package: str = "torch"
    quadratic: bool = False
    has_backward: bool = True
    has_dropout: bool = True
    has_packed: bool = False
    absent: Callable[[], str | None] = lambda: None

    @property
    def version(self) -> str | None:
        """Version of the package that computes."""
        if self.package == "tilewise":
            return __version__
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def refusal(self, shape: Shape, direction: str) -> str | None:
        """Why it cannot take such a call, where that is known before trying; else None."""
        if direction != FORWARD and not self.has_backward:
            return f"{self.name} has no backward"
        if shape.dropout_p > 0 and not self.has_dropout:
            return f"{self.name} has no dropout"
        if shape.lengths and not self.has_packed:
            return f"{self.name} takes no packed sequences"
        return None

    def layout(self, x: Tensor) -> Tensor:
        """(batch, seqlen, nheads, head_dim) to the provider's layout, contiguous; or back."""
        return x.transpose(1, 2).contiguous() if self.heads_first else x.contiguous()

    def bytes_needed(self, shape: Shape, backward: bool) -> int:
        """What the call holds at once beside its inputs, for those that are quadratic.

        Forward: scores and probabilities. Backward: the probabilities, their gradient and the
        scores', each with room for one temporary. The causal mask is seqlen x seqlen of bool.
        """
        if not self.quadratic:
            return 0
        matrices = 4 if backward else 2
        return matrices * shape.matrix_bytes + (shape.seqlen**2 if shape.causal else 0)


def packing(shape: Shape) -> dict[str, Any]:
    """What a packed call is told beside its tensors."""
    ends = torch.tensor((0, *shape.lengths)).cumsum(0)
    cu_seqlens = ends.to(device=shape.device, dtype=torch.int32)
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": shape.seqlen,
        "max_seqlen_k": shape.seqlen,
    }


def bind_tilewise(backend: str = "auto", algorithm: str = "auto") -> Callable[[Shape], Attend]:
    """``flash_attn_func``, packed ``flash_attn_varlen_func``, by the backend and algorithm."""

    def bind(shape: Shape) -> Attend:
        function: Callable[..., object] = flash_attn_func
        if shape.lengths:
            function = partial(flash_attn_varlen_func, **packing(shape))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(
                q,
                k,
                v,
                dropout_p=shape.dropout_p,
                causal=shape.causal,
                backend=backend,
                algorithm=algorithm,
                seed=shape.dropout_seed if shape.dropout_p > 0 else None,
            )
            assert isinstance(out, Tensor)
            return out

        return attend

    return bind


def bind_sdpa(backend: SDPBackend) -> Callable[[Shape], Attend]:
    """``scaled_dot_product_attention`` by one of torch's backends and no other."""

    def bind(shape: Shape) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    dropout_p=shape.dropout_p,
                    is_causal=shape.causal,
                    enable_gqa=shape.heads_kv < shape.nheads,
                )

        return attend

    return bind


def bind_eager(shape: Shape) -> Attend:
    """Standard attention in the tensors' dtype, as it is usually written: each step makes a new
    tensor. Matmul, scale, mask, softmax, dropout, matmul."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (group := shape.nheads // shape.heads_kv) > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if shape.causal:
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
            s = s.masked_fill(hidden, float("-inf"))
        p = torch.softmax(s, dim=-1)
        del s
        return (F.dropout(p, shape.dropout_p) if shape.dropout_p > 0 else p) @ v

    return attend


EAGER = Provider("eager", True, bind_eager, quadratic=True)
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("tilewise", False, bind_tilewise(), "tilewise", has_packed=True),
        Provider(
            "tilewise-fa1", False, bind_tilewise(algorithm="fa1"), "tilewise", has_packed=True
        ),
        Provider("sdpa-flash", True, bind_sdpa(SDPBackend.FLASH_ATTENTION)),
        EAGER,
    )
}


def make_inputs(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normal q, k, v and dout, each (batch, seqlen, heads, head_dim), packed (total, heads,
    head_dim), as the shape says.

    "rising" and "falling" scale the keys by 0.1 to 8 along the sequence, so that a row's maximum
    grows in every tile that is visited in that order; "first-key" makes the first key 30 times as
    long; "large" the queries, for logits of hundreds, 100 times.
    """
    gen = torch.Generator(shape.device).manual_seed(seed)
    lead = (sum(shape.lengths),) if shape.lengths else (shape.batch, shape.seqlen)

    def normal(heads: int) -> Tensor:
        return torch.randn((*lead, heads, shape.head_dim), generator=gen, device=shape.device)

    q, k, v, dout = (normal(n) for n in (shape.nheads, *(shape.heads_kv,) * 2, shape.nheads))
    if shape.inputs == "large":
        q *= 100.0
    elif shape.inputs == "first-key":
        k[..., :1, :, :] *= 30.0
    elif shape.inputs != "randn":
        ramp = torch.linspace(0.1, 8.0, k.shape[-3], device=k.device)
        k *= (ramp if shape.inputs == "rising" else ramp.flip(0))[:, None, None]
    q, k, v, dout = (x.to(shape.torch_dtype) for x in (q, k, v, dout))
    return q, k, v, dout


def forward_backward(attend: Attend, inputs: Triple, dout: Tensor) -> tuple[Tensor, Triple]:
    """out and the gradients of q, k and v; everything in the provider's layout."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(leaves[0], leaves[1], leaves[2])
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return out.detach(), (dq, dk, dv)
