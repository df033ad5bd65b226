"""tilewise: exact attention, tile by tile.

FlashAttention, FlashAttention-2 and their successors as a pure-Python package. ``import tilewise as
flash_attn`` is a drop-in for flash-attn's functions.
"""

from importlib import import_module
from types import ModuleType

from ._version import __version__
from .api import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    merge_attention,
)
from .errors import InvalidInputError, TilewiseError, UnsupportedError


def __getattr__(name: str) -> ModuleType:
    if name == "integrations":  # which need not be imported by name
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "InvalidInputError",
    "TilewiseError",
    "UnsupportedError",
    "__version__",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "merge_attention",
]
