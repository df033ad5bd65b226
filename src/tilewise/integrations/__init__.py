"""Where people already are: transformers, SDPA, flash-attn's name, DTensor.

Each module is imported when it is used, and changes nothing until it is told to.
"""

from importlib import import_module
from types import ModuleType

_MODULES = ("dtensor", "flash_attn", "sdpa", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
