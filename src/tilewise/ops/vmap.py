"""torch.func.vmap over the operators.

Dense calls that differ in q, k, v (and their gradients) alone become one call of a larger batch.
Everything else is looped over: one operator call for each entry, right for every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention import flash_attn_bwd, flash_attn_fwd, flash_attn_probs, library
from .schema import NUM_ARGUMENTS, split


def _loop(op: Callable[..., Any], size: int, in_dims: Any, arguments: Any) -> Any:
    """One call for each entry, results stacked in front."""
    results = [
        op(
            *(
                a.select(d, i) if isinstance(a, Tensor) and d is not None else a
                for a, d in zip(arguments, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _can_fold(arguments: Any) -> bool:
    """Whether the call's batch may grow: nothing in it counts batch entries or sums over them."""
    t, s = split(arguments)
    extra = (t.attn_bias, t.alibi_slopes, t.sink, t.cu_seqlens_q)
    return s.dropout_p == 0 and all(x is None for x in extra)


def _fold(op: Callable[..., Any], size: int, in_dims: Any, arguments: Any) -> Any:
    """One call of batch size * batch."""

    def merged(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    results = op(*(merged(a, d) for a, d in zip(arguments, in_dims, strict=True)))
    split_again = tuple(
        r.unflatten(0, (size, r.shape[0] // size)) if r.dim() > 1 else r.expand(size, *r.shape)
        for r in results
    )
    return split_again, (0,) * len(split_again)


def fwd_rule(op: Callable[..., Any], info: Any, in_dims: Any, arguments: Any) -> Any:
    """The rule of a forward with the schema's arguments."""
    rule = _fold if _can_fold(arguments) and info.batch_size else _loop
    return rule(op, info.batch_size, in_dims, arguments)


def bwd_rule(op: Callable[..., Any], info: Any, in_dims: Any, arguments: Any) -> Any:
    """The rule of a backward: dout and dlse before the schema's arguments."""
    foldable = _can_fold(arguments[2 : 2 + NUM_ARGUMENTS]) and info.batch_size
    return (_fold if foldable else _loop)(op, info.batch_size, in_dims, arguments)


def register() -> None:
    """Tells torch the rules."""

    def probs_rule(op: Callable[..., Any], info: Any, in_dims: Any, arguments: Any) -> Any:
        return _loop(op, info.batch_size, in_dims, arguments)

    for op, rule in (
        (flash_attn_fwd, fwd_rule),
        (flash_attn_bwd, bwd_rule),
        (flash_attn_probs, probs_rule),
    ):

        def registered(
            info: Any, in_dims: Any, *arguments: Any, op: Any = op, rule: Any = rule
        ) -> Any:
            return rule(op, info, in_dims, arguments)

        torch.library.register_vmap(op.name(), registered, lib=library)
