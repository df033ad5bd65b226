"""The rivals of one measurement, each in its natural contiguous layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._version import __version__
from ..api import flash_attn_func

FORWARD = "fwd"
BACKWARD = "bwd"

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one self-attention call; ``dtype`` is a name such as "float32"."""

    batch: int = 1
    seqlen: int = 1024
    nheads: int = 8
    head_dim: int = 64
    causal: bool = True
    dtype: str = "float32"

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
        forward = 4.0 * self.batch * self.nheads * self.seqlen**2 * self.head_dim
        return forward * (0.5 if self.causal else 1.0) * (2.5 if direction == BACKWARD else 1.0)


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute attention.

    Attributes:
        name: as in result files.
        heads_first: whether tensors are (batch, nheads, seqlen, head_dim).
        attend: (q, k, v, causal) -> out, all in the provider's layout.
        package: whose version is the provider's.
        quadratic: whether it holds matrices of seqlen x seqlen.
    """

    name: str
    heads_first: bool
    attend: Attention
    package: str = "torch"
    quadratic: bool = False

    @property
    def version(self) -> str | None:
        """Version of the package that computes."""
        if self.package == "tilewise":
            return __version__
        try:
            return version(self.package)
        except PackageNotFoundError:
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


def _tilewise(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = flash_attn_func(q, k, v, causal=causal)
    assert isinstance(out, Tensor)
    return out


def _tilewise_fa1(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = flash_attn_func(q, k, v, causal=causal, algorithm="fa1")
    assert isinstance(out, Tensor)
    return out


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    s = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.mT
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
        s = s.masked_fill_(hidden, float("-inf"))
    p = torch.softmax(s, dim=-1)
    del s
    return p @ v


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("tilewise", False, _tilewise, package="tilewise"),
        Provider("tilewise-fa1", False, _tilewise_fa1, package="tilewise"),
        Provider("sdpa-flash", True, _sdpa_flash),
        Provider("eager", True, _eager, quadratic=True),
    )
}


def make_inputs(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normal q, k, v and dout, (batch, seqlen, nheads, head_dim) in the shape's dtype."""
    gen = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.seqlen, shape.nheads, shape.head_dim)
    q, k, v, dout = (torch.randn(size, generator=gen).to(shape.torch_dtype) for _ in range(4))
    return q, k, v, dout


def forward_backward(
    provider: Provider, inputs: Triple, dout: Tensor, causal: bool
) -> tuple[Tensor, Triple]:
    """out and the gradients of q, k and v; everything in the provider's layout."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = provider.attend(leaves[0], leaves[1], leaves[2], causal)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return out.detach(), (dq, dk, dv)
