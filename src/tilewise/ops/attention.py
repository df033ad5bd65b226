"""``tilewise::flash_attn_fwd``, ``flash_attn_bwd`` and ``flash_attn_probs``.

The operators are opaque to torch.compile. Each decides its backend from the facts of the call, so
forward and backward may be taken by different ones. The backward of ``flash_attn_bwd`` is the
derivative of the reference
formulas: a composite that holds O(N^2) memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import reference
from ..backends.base import Gradients, Wanted, lse_dtype
from ..dispatch import BACKENDS, choose
from .schema import ARGUMENTS, NUM_ARGUMENTS, NUM_TENSORS, describe, split

NAMESPACE = "tilewise"
_DIFFERENTIABLE = {"q": 0, "k": 1, "v": 2, "attn_bias": 3, "sink": 5}  # place in the schema

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"flash_attn_fwd({ARGUMENTS}) -> (Tensor, Tensor)", tags=_tags)
_library.define(
    f"flash_attn_bwd(Tensor dout, Tensor? dlse, {ARGUMENTS}, Tensor out, Tensor lse, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(f"flash_attn_probs({ARGUMENTS}) -> Tensor", tags=_tags)

flash_attn_fwd = torch.ops.tilewise.flash_attn_fwd.default
flash_attn_bwd = torch.ops.tilewise.flash_attn_bwd.default
flash_attn_probs = torch.ops.tilewise.flash_attn_probs.default


def _fwd(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, scalars = split(arguments)
    differentiable = (arguments[i] for i in _DIFFERENTIABLE.values())
    needs_grad = any(x is not None and x.requires_grad for x in differentiable)
    problem = describe(tensors, scalars, needs_grad)
    choice = choose(problem, scalars.backend, scalars.algorithm)
    return BACKENDS[choice.backend].fwd(problem, tensors, choice.algorithm)


def _bwd(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    tensors, scalars = split(rest)
    out, lse, wanted = rest[NUM_ARGUMENTS:]
    problem = describe(tensors, scalars, needs_grad=True)
    choice = choose(problem, scalars.backend, scalars.algorithm)
    g = BACKENDS[choice.backend].bwd(
        problem, tensors, out, lse, dout, dlse, Wanted(*wanted), choice.algorithm
    )
    nothing = tensors.q.new_empty(0)
    return tuple(nothing.clone() if x is None else x for x in (g.dq, g.dk, g.dv, g.dbias, g.dsink))


def _probs(*arguments: Any) -> Tensor:
    tensors, scalars = split(arguments)
    problem = describe(tensors, scalars, needs_grad=False, attn_probs=True)
    choose(problem, scalars.backend, scalars.algorithm)
    dtype = reference.compute_dtype(tensors.q.dtype)
    return reference.attention(problem, tensors, dtype)[2].to(tensors.q.dtype).contiguous()


def _fwd_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    t, _ = split(arguments)
    out = t.q.new_empty(*t.q.shape[:-1], t.v.shape[-1])
    lse_shape = (*t.q.shape[:-3], t.q.shape[-2], t.q.shape[-3])
    return out, t.q.new_empty(lse_shape, dtype=lse_dtype(t.q))


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


def _fwd_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.scalars = inputs[NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _fwd_autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * NUM_ARGUMENTS
    if dout is None and dlse is None:
        return tuple(grads)
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE.values()]
    found = flash_attn_bwd(dout, dlse, *tensors, *ctx.scalars, out, lse, wanted)
    for place, want, grad in zip(_DIFFERENTIABLE.values(), wanted, found, strict=True):
        if want:
            grads[place] = grad
    return tuple(grads)


def _bwd_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: 2 + NUM_TENSORS])
    ctx.scalars = inputs[2 + NUM_TENSORS : 2 + NUM_ARGUMENTS]
    ctx.set_materialize_grads(False)


def _bwd_autograd(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """The derivative of reference.attention_backward, where out and lse follow from the inputs."""
    saved: list[Tensor | None] = list(ctx.saved_tensors)
    places = [0, 1, *(2 + place for place in _DIFFERENTIABLE.values())]
    # aliases, so that only the formulas' own dependence on each input is differentiated
    with torch.enable_grad():
        for place in places:
            x = saved[place]
            if x is not None and ctx.needs_input_grad[place]:
                saved[place] = x.view_as(x)
        dout, dlse = saved[:2]
        assert dout is not None
        tensors, scalars = split((*saved[2:], *ctx.scalars))
        problem = describe(tensors, scalars, needs_grad=True)
        dtype = reference.compute_dtype(tensors.q.dtype)
        g: Gradients = reference.attention_backward(problem, tensors, dout, dlse, dtype)
        pairs = [
            (grad, c.to(grad.dtype))
            for grad, c in zip((g.dq, g.dk, g.dv, g.dbias, g.dsink), cotangents, strict=True)
            if grad is not None and c is not None and grad.requires_grad
        ]
    result: list[Tensor | None] = [None] * (2 + NUM_ARGUMENTS + 3)
    needed = [p for p in places if ctx.needs_input_grad[p] and saved[p] is not None]
    if pairs and needed:
        outputs, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs,
            [x for p in needed if (x := saved[p]) is not None],
            weights,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        for place, grad in zip(needed, found, strict=True):
            result[place] = grad
    return tuple(result)


for _name, _kernel, _fake in (
    ("flash_attn_fwd", _fwd, _fwd_fake),
    ("flash_attn_bwd", _bwd, _bwd_fake),
    ("flash_attn_probs", _probs, _probs_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    f"{NAMESPACE}::flash_attn_fwd", _fwd_autograd, setup_context=_fwd_context, lib=_library
)
torch.library.register_autograd(
    f"{NAMESPACE}::flash_attn_bwd", _bwd_autograd, setup_context=_bwd_context, lib=_library
)
