"""Calls like one that came before.

All that ``arguments`` checks, and which ``Kind`` a call is of, follows from the layouts of its
tensors, from its options and from a few flags of torch. A call that was taken is remembered by
these; one like it needs a single look-up. What stands in a tensor is no part of it: a call whose
checks or operands depend on that, or whose operands are brought to another form first, is not
remembered.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import Options, draw_seed
from .backends.base import AttentionTensors
from .ops import autograd, kinds
from .ops.kinds import Kind, layout
from .ops.schema import Scalars

_IMMUTABLE = (bool, int, float, str, type(None))

_autocast_enabled = torch._C._is_any_autocast_enabled
_is_deterministic = torch._C._get_deterministic_algorithms


class Repeat(NamedTuple):
    """A call like one before.

    Attributes:
        kind: its kind.
        cast: to which dtype autocast casts q, k and v; None where it casts nothing.
        draws: whether it draws a seed for dropout.
        return_lse: whether the user gets lse too.
    """

    kind: Kind
    cast: torch.dtype | None
    draws: bool
    return_lse: bool

    def __call__(self, t: AttentionTensors) -> Tensor | tuple[Tensor, Tensor]:
        """What the user gets."""
        if self.cast is not None:
            q, k, v = (x.to(self.cast) for x in t[:3])
            t = t._replace(q=q, k=k, v=v)
        if self.draws:
            t = t._replace(seed=draw_seed(t.q.device))
        out, lse = autograd.eager(self.kind, t)
        return (out, users_lse(lse, t.q)) if self.return_lse else out


def users_lse(lse: Tensor, q: Tensor) -> Tensor:
    """lse in the dtype that users get."""
    return lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


_known: dict[Hashable, Repeat] = {}


def find(t: AttentionTensors, scalars: tuple[Any, ...], window: Any) -> Repeat | None:
    """The call before that this one is like, if there is one and nothing watches.

    Args:
        t: the tensors as the user gives them, perhaps none at all.
        scalars: the options that are neither tensors nor the window, and the lengths of packed
            sequences.
        window: the window.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or kinds.watched():
        return None
    try:
        return _known.get(_key(t, scalars, window))
    except (AttributeError, RuntimeError, TypeError):  # not what it should be, or not plain
        return None


def _key(t: AttentionTensors, scalars: tuple[Any, ...], window: Any) -> Hashable:
    numbers = (*scalars, *window)
    return (
        numbers,
        (type(window), *map(type, numbers)),  # True equals 1.0, and is refused where that is taken
        tuple([x if x is None else layout(x) for x in t]),
        torch.is_grad_enabled(),
        t.alibi_slopes is not None and t.alibi_slopes.requires_grad,
        _is_deterministic(),
        _autocast_enabled() and _autocast(t.q.device.type),
        kinds.settings(t.q.dtype),
    )


def _autocast(device: str) -> Hashable:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def remember(
    t: AttentionTensors,
    scalars: tuple[Any, ...],
    options: Options,
    taken: AttentionTensors,
    taken_scalars: Scalars,
) -> None:
    """Remembers a call that was taken, where one like it may go the short way.

    Args:
        t, scalars: as in ``find``.
        options: all options.
        taken, taken_scalars: what the call came to.
    """
    if torch.compiler.is_compiling() or kinds.watched():
        return
    if options.validate or options.return_attn_probs:
        return
    cast = None if all(map(is_, t[:3], taken[:3])) else taken.q.dtype
    draws = options.seed is None and taken.seed is not None
    as_given = map(is_, t[3:], (*taken[3:-1], None if draws else taken.seed))
    immutable = (type(x) in _IMMUTABLE for x in (*scalars, *options.window_size))
    if all(as_given) and all(immutable) and all(map(kinds.is_plain, t)):
        kind = kinds.kind_of(taken, taken_scalars)
        repeat = Repeat(kind, cast, draws, bool(options.return_lse))
        kinds.keep(_known, _key(t, scalars, options.window_size), repeat)
