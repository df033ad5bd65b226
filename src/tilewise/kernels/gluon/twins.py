"""Triton's device functions for Gluon kernels, so that what a score or a tile means is said once.

A function under ``triton.jit`` cannot serve a Gluon kernel, whose tensors carry layouts, though the
same source can: everything elementwise or scalar. ``twin`` gives that source to Gluon, and with it
the functions it calls.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from triton.experimental import gluon

_FUNCTIONS: dict[Any, Any] = {}
_GLOBALS: dict[str, dict[str, Any]] = {}


def twin(function: Any) -> Any:
    """``function``, and all that it calls, as Gluon functions."""
    if function not in _FUNCTIONS:
        source = function.fn
        copy = FunctionType(
            source.__code__,
            _globals_of(source.__module__),
            source.__name__,
            source.__defaults__,
            source.__closure__,
        )
        copy.__annotations__ = source.__annotations__
        copy.__doc__ = source.__doc__
        _FUNCTIONS[function] = gluon.jit(copy)
    return _FUNCTIONS[function]


def _globals_of(module: str) -> dict[str, Any]:
    """A module's names, its Triton functions replaced by their twins."""
    if module not in _GLOBALS:
        names = vars(sys.modules[module])
        found = _GLOBALS[module] = dict(names)  # before its functions, which may call each other
        ours = module.partition(".")[0]
        for name, value in names.items():
            source = getattr(value, "fn", None)  # of triton.jit's functions, interpreted ones too
            if isinstance(source, FunctionType) and source.__module__.startswith(ours):
                found[name] = twin(value)
    return _GLOBALS[module]
