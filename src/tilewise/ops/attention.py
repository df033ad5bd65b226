"""``tilewise::flash_attn_fwd``, ``flash_attn_bwd`` and ``flash_attn_probs``.

The operators are opaque to torch.compile. Each decides its backend from the facts of the call, so
forward and backward may be taken by different ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import reference
from ..backends.base import lse_dtype
from ..dispatch import choose
from .kinds import kind_of
from .schema import ARGUMENTS, NUM_ARGUMENTS, describe, split

NAMESPACE = "tilewise"
DIFFERENTIABLE = (0, 1, 2, 3, 5)  # places of q, k, v, attn_bias and sink in the schema

library = torch.library.Library(NAMESPACE, "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
library.define(f"flash_attn_fwd({ARGUMENTS}) -> (Tensor, Tensor)", tags=_tags)
library.define(
    f"flash_attn_bwd(Tensor dout, Tensor? dlse, {ARGUMENTS}, Tensor out, Tensor lse, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
library.define(f"flash_attn_probs({ARGUMENTS}) -> Tensor", tags=_tags)

flash_attn_fwd = torch.ops.tilewise.flash_attn_fwd.default
flash_attn_bwd = torch.ops.tilewise.flash_attn_bwd.default
flash_attn_probs = torch.ops.tilewise.flash_attn_probs.default


def _fwd(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, scalars = split(arguments)
    return kind_of(tensors, scalars).forward(tensors)


def _bwd(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    tensors, scalars = split(rest)
    out, lse, wanted = rest[NUM_ARGUMENTS:]
    dout = _itself(dout)
    dlse = None if dlse is None else _itself(dlse)
    run = kind_of(tensors, scalars).backward(tensors, dout, dlse, tuple(wanted))
    assert run is not None  # the dispatcher makes all else plain before it comes here
    g = run(tensors, _as_made(out), _as_made(lse), dout, dlse)
    nothing = tensors.q.new_empty(0)
    return tuple(nothing.clone() if x is None else x for x in (g.dq, g.dk, g.dv, g.dbias, g.dsink))


def _itself(x: Tensor) -> Tensor:
    """x without the subclass that it may be of and that asks for nothing."""
    return x if type(x) is Tensor else x.as_subclass(Tensor)


def _as_made(x: Tensor) -> Tensor:
    """x as a forward makes out and lse: contiguous, at an address that is a multiple of 16."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def fwd_below_autograd(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """``flash_attn_fwd``, whose derivative something else knows."""
    with torch._C._AutoDispatchBelowAutograd():
        return flash_attn_fwd(*arguments)


def bwd_below_autograd(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """``flash_attn_bwd``, likewise."""
    with torch._C._AutoDispatchBelowAutograd():
        return flash_attn_bwd(*arguments)


def _probs(*arguments: Any) -> Tensor:
    tensors, scalars = split(arguments)
    problem = describe(tensors, scalars, needs_grad=False, attn_probs=True)
    choose(problem, scalars.backend, scalars.algorithm)
    dtype = reference.compute_dtype(tensors.q.dtype)
    with torch.autocast(problem.device, enabled=False):
        probs = reference.attention(problem, tensors, dtype)[2]
    return probs.to(tensors.q.dtype).contiguous()


def _fwd_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    t, _ = split(arguments)
    out = t.q.new_empty(*t.q.shape[:-1], t.v.shape[-1])
    lse_shape = (*t.q.shape[:-3], t.q.shape[-2], t.q.shape[-3])
    return out, t.q.new_empty(lse_shape, dtype=lse_dtype(t))


def _bwd_fake(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    t, _ = split(rest)
    inputs = (t.q, t.k, t.v, t.attn_bias, t.sink)
    return tuple(
        x.new_empty(x.shape) if want and x is not None else t.q.new_empty(0)
        for x, want in zip(inputs, rest[-1], strict=True)
    )


def _probs_fake(*arguments: Any) -> Tensor:
    t, s = split(arguments)
    batch = t.q.shape[0] if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0] - 1
    return t.q.new_empty(batch, t.q.shape[-2], s.max_seqlen_q, s.max_seqlen_k)


for _name, _kernel, _fake in (
    ("flash_attn_fwd", _fwd, _fwd_fake),
    ("flash_attn_bwd", _bwd, _bwd_fake),
    ("flash_attn_probs", _probs, _probs_fake),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=library)
