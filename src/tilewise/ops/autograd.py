"""Derivatives of the operators, told to torch three times.

torch's ``register_autograd`` serves torch.compile. torch.func's transforms, and whatever else
watches the dispatcher, take an ``autograd.Function`` with ``setup_context`` and ``vmap``:
``Attention``, of the same rules. An eager call takes ``EagerAttention``, which goes past the
dispatcher: that costs as much as all the rest of a call.

The backward of the backward is the derivative of the reference formulas: a composite that holds
O(N^2) memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import reference
from ..backends.base import AttentionTensors
from ..dispatch import choose
from . import vmap
from .attention import (
    DIFFERENTIABLE,
    NAMESPACE,
    bwd_below_autograd,
    flash_attn_bwd,
    flash_attn_fwd,
    fwd_below_autograd,
    library,
)
from .kinds import Kind, is_plain, kind_of, watched
from .schema import NUM_ARGUMENTS, NUM_TENSORS, Scalars, describe, split


def _fwd_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    t, s = split(inputs)
    sizes = (*t.q.shape, *t.k.shape, s.max_seqlen_q, s.max_seqlen_k)
    if all(isinstance(size, int) for size in sizes):  # not symbols of a trace
        # a call whose backward no backend has is refused now, not after the forward
        choose(describe(t, s, needs_grad=True), s.backend, s.algorithm)
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.scalars = inputs[NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _fwd_backward(
    bwd: Callable[..., Any], ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * NUM_ARGUMENTS
    if dout is None and dlse is None:
        return tuple(grads)
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = [ctx.needs_input_grad[place] for place in DIFFERENTIABLE]
    found = bwd(dout, dlse, *tensors, *ctx.scalars, out, lse, wanted)
    for place, want, grad in zip(DIFFERENTIABLE, wanted, found, strict=True):
        if want:
            grads[place] = grad
    return tuple(grads)


def _bwd_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: 2 + NUM_TENSORS])
    ctx.scalars = inputs[2 + NUM_TENSORS : 2 + NUM_ARGUMENTS]
    ctx.wanted = inputs[-1]
    ctx.set_materialize_grads(False)


def _bwd_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """The derivative of reference.attention_backward, where out and lse follow from the inputs."""
    saved: list[Tensor | None] = list(ctx.saved_tensors)
    result: list[Tensor | None] = [None] * (2 + NUM_ARGUMENTS + 3)
    places = [0, 1, *(2 + place for place in DIFFERENTIABLE)]
    needed = [p for p in places if ctx.needs_input_grad[p] and saved[p] is not None]
    used = [i for i, c in enumerate(cotangents) if c is not None and ctx.wanted[i]]
    if not needed or not used:
        return tuple(result)

    def formulas(*inputs: Tensor) -> tuple[Tensor, ...]:
        everything = list(saved)
        for place, given in zip(needed, inputs, strict=True):
            everything[place] = given
        dout, dlse = everything[:2]
        assert dout is not None
        tensors, scalars = split((*everything[2:], *ctx.scalars))
        problem = describe(tensors, scalars, needs_grad=True)
        dtype = reference.compute_dtype(tensors.q.dtype)
        g = reference.attention_backward(problem, tensors, dout, dlse, dtype)
        grads = (g.dq, g.dk, g.dv, g.dbias, g.dsink)
        return tuple(x for i in used if (x := grads[i]) is not None)

    inputs = [x for p in needed if (x := saved[p]) is not None]
    device = inputs[0].device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        outputs, pull, *_ = torch.func.vjp(formulas, *inputs)
        weights = [c for i in used if (c := cotangents[i]) is not None]
        found = pull(tuple(c.to(o.dtype) for c, o in zip(weights, outputs, strict=True)))
    for place, grad in zip(needed, found, strict=True):
        result[place] = grad
    return tuple(result)


class AttentionBackward(torch.autograd.Function):
    """``flash_attn_bwd`` for torch.func's transforms."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """The operator."""
        *rest, wanted = arguments
        return bwd_below_autograd((*rest, list(wanted)))

    setup_context = staticmethod(_bwd_context)
    backward = staticmethod(_bwd_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """The operator's rule."""
        return vmap.bwd_rule(AttentionBackward.apply, info, (*in_dims[:-1], None), arguments)


def _differentiable_bwd(*arguments: Any) -> Any:
    """The backward: differentiable in its turn where that may be asked for."""
    if torch.is_grad_enabled() or _transformed():
        return AttentionBackward.apply(*arguments[:-1], tuple(arguments[-1]))
    return bwd_below_autograd(arguments)


class Attention(torch.autograd.Function):
    """``flash_attn_fwd`` for torch.func's transforms."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """The operator."""
        return fwd_below_autograd(arguments)

    setup_context = staticmethod(_fwd_context)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        """The operator's rule, with a backward that can be transformed again."""
        return _fwd_backward(_differentiable_bwd, ctx, *cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """The operator's rule."""
        return vmap.fwd_rule(Attention.apply, info, in_dims, arguments)


class EagerAttention(torch.autograd.Function):
    """The call of a kind that nothing watches, with as little Python as a call can have."""

    @staticmethod
    def forward(
        ctx: Any, kind: Kind, t: AttentionTensors, *differentiable: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The backend's. What may have a gradient is given once more, for autograd to see."""
        out, lse = kind.forward(t)
        ctx.save_for_backward(*t, out, lse)
        ctx.kind = kind
        ctx.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """The backend's; where somebody watches now, or what was saved went through somebody's
        hands, the rule of ``Attention``."""
        *given, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 7
        t, kind, wanted = AttentionTensors(*given), ctx.kind, ctx.needs_input_grad[2:]
        dout = torch.zeros_like(out) if dout is None else dout
        run = None
        if not (ctx.hooked or torch.is_grad_enabled() or watched()):
            run = kind.backward(t, dout, dlse, wanted)
        if run is not None:
            g = run(t, out, lse, dout, dlse)
            return None, None, g.dq, g.dk, g.dv, g.dbias, g.dsink
        found = _differentiable_bwd(dout, dlse, *t, *kind.scalars, out, lse, list(wanted))
        return None, None, *(x if w else None for x, w in zip(found, wanted, strict=True))


# Function.apply below what it does for transforms of torch.func, of which there are none here
_apply_eagerly: Any = super(torch.autograd.Function, EagerAttention).apply


def register() -> None:
    """Tells torch the rules of the operators."""
    torch.library.register_autograd(
        f"{NAMESPACE}::flash_attn_fwd",
        lambda ctx, *cotangents: _fwd_backward(flash_attn_bwd, ctx, *cotangents),
        setup_context=_fwd_context,
        lib=library,
    )
    torch.library.register_autograd(
        f"{NAMESPACE}::flash_attn_bwd", _bwd_backward, setup_context=_bwd_context, lib=library
    )
    vmap.register()


def attention(t: AttentionTensors, s: Scalars) -> tuple[Tensor, Tensor]:
    """out and lse: by the operator, by ``Attention`` or, where nothing watches, by ``eager``."""
    if torch.compiler.is_compiling():
        return flash_attn_fwd(*t, *s)
    if not (watched() or _transformed()) and all(map(is_plain, t)):
        return eager(kind_of(t, s), t)
    if _transformed() or torch.is_grad_enabled():
        return Attention.apply(*t, *s)
    return fwd_below_autograd((*t, *s))


def eager(kind: Kind, t: AttentionTensors) -> tuple[Tensor, Tensor]:
    """out and lse of a kind's call that nothing watches."""
    if torch.is_grad_enabled() and (
        t.q.requires_grad
        or t.k.requires_grad
        or t.v.requires_grad
        or (t.attn_bias is not None and t.attn_bias.requires_grad)
        or (t.sink is not None and t.sink.requires_grad)
    ):
        kind.check_differentiable(t)
        return _apply_eagerly(kind, t, t.q, t.k, t.v, t.attn_bias, t.sink)
    return kind.forward(t)


def _transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None
