"""Calls of one kind: what is worked out once for all of them.

Which backend takes a call, and how it runs there, depends on the scalars and on the layouts of the
tensors, never on what stands in them. So a kind is found by these, in one look-up, and has what a
repeated call needs: functions of the tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..backends.base import AttentionTensors, Backward, Wanted
from ..dispatch import BACKENDS, choose
from ..tuning import lookup
from .schema import Scalars, describe

MOST = 4096  # of anything that is kept by layouts; then all is forgotten

_dispatch_keys = torch._C._dispatch_keys


def layout(x: Tensor | None) -> Hashable:
    """All that a launch depends on but the address and the values.

    Raises:
        RuntimeError: torch keeps x in some other form than strided memory.
    """
    if x is None:
        return None
    return (
        type(x), _dispatch_keys(x).raw_repr(), x.dtype, x.device, x.shape, x.stride(),
        x.data_ptr() & 15,
    )  # fmt: skip


def is_plain(x: object) -> bool:
    """Whether x is memory on a CPU or GPU and no more: no subclass, no batch of torch's old vmap,
    no lazy negation, nothing of the meta device. What is no tensor is plain."""
    return not isinstance(x, Tensor) or (
        type(x) in (Tensor, torch.nn.Parameter)
        and _dispatch_keys(x).raw_repr() in _keys_of_plain_tensors(x.device.type)
    )


@cache
def _keys_of_plain_tensors(device: str) -> frozenset[int]:
    """What torch dispatches by for dense memory on a device, outside inference mode and inside."""
    found = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.append(_dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(found if device in ("cpu", "cuda") else ())


def watched() -> bool:
    """Whether torch's dispatcher may have something to do for a call, whatever its tensors: a mode,
    a profiler, a tracer. To go through it costs as much as all the rest of a call."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._dispatch_tls_local_include_set().raw_repr() not in _INCLUDED
    )


def _included() -> frozenset[int]:
    """Keys that every call has, whatever its tensors, outside inference mode and inside; a
    transform or a mode in C++ adds its own."""
    found = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.append(torch._C._dispatch_tls_local_include_set().raw_repr())
    return frozenset(found)


_INCLUDED = _included()


def settings(dtype: torch.dtype) -> Hashable:
    """What a launch depends on besides the call."""
    if dtype is torch.float32:
        return lookup.epoch, torch.backends.cuda.matmul.fp32_precision
    return lookup.epoch


class Kind:
    """The calls with equal scalars and with tensors of equal layouts.

    Args:
        t, s: one of them.

    Attributes:
        scalars: the scalars.
        forward: see ``Backend.forward``.

    Raises:
        UnsupportedError: no backend can take the call.
    """

    __slots__ = ("_backwards", "_differentiable", "forward", "scalars")

    def __init__(self, t: AttentionTensors, s: Scalars) -> None:
        self.scalars = s
        problem = describe(t, s, needs_grad=False)
        choice = choose(problem, s.backend, s.algorithm)
        self.forward = BACKENDS[choice.backend].forward(problem, t, choice.algorithm)
        self._differentiable = False
        self._backwards: dict[Hashable, Backward] = {}

    def check_differentiable(self, t: AttentionTensors) -> None:
        """Refuses a call whose backward no backend has: now, not after the forward.

        Raises:
            UnsupportedError: no backend has it.
        """
        if not self._differentiable:
            s = self.scalars
            choose(describe(t, s, needs_grad=True), s.backend, s.algorithm)
            self._differentiable = True

    def backward(
        self, t: AttentionTensors, dout: Tensor, dlse: Tensor | None, wanted: tuple[bool, ...]
    ) -> Backward | None:
        """See ``Backend.backward``, for out and lse as the forward makes them; None where dout or
        dlse is not plain."""
        q, k, v = t[:3]
        try:
            key = (
                wanted, layout(dout), layout(dlse), q.stride(), k.stride(), v.stride(),
                settings(q.dtype),
            )  # fmt: skip
        except RuntimeError:
            return None
        found = self._backwards.get(key)
        if found is None and is_plain(dout) and is_plain(dlse):
            s = self.scalars
            problem = describe(t, s, needs_grad=True)
            choice = choose(problem, s.backend, s.algorithm)
            backend = BACKENDS[choice.backend]
            found = backend.backward(problem, t, dout, Wanted(*wanted), choice.algorithm)
            keep(self._backwards, key, found)
        return found


_kinds: dict[Hashable, Kind] = {}


def kind_of(t: AttentionTensors, s: Scalars) -> Kind:
    """The kind of a call of plain tensors.

    Raises:
        UnsupportedError: no backend can take the call.
    """
    key = (s, tuple([layout(x) for x in t]), settings(t.q.dtype))
    found = _kinds.get(key)
    if found is None:
        found = Kind(t, s)
        keep(_kinds, key, found)
    return found


def keep(among: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Keeps a value for later calls."""
    if len(among) >= MOST:
        among.clear()
    among[key] = value
