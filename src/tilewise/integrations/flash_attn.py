"""flash-attn's module names, for code that was written for them and is to run unchanged.

>>> from tilewise.integrations.flash_attn import install
>>> install()  # doctest: +SKIP
>>> from flash_attn import flash_attn_func  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from .. import api
from ..errors import UnsupportedError
from .flash import bert_padding, hopper, interface, rotary

VERSION = "2.8.3"  # of flash-attn, whose meaning the functions have
VERSION_3 = "3.0.0"

PUBLIC: dict[str, Any] = {
    name: getattr(api, name)
    for name in (
        "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
    )
} | {"flash_attn_with_kvcache": interface.flash_attn_with_kvcache}  # fmt: skip

_BENEATH = (
    "_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)  # fmt: skip


def _contents() -> dict[str, dict[str, Any]]:
    """Each module's attributes; parents come before children."""
    old = ("func", "kvpacked_func", "qkvpacked_func")
    unpadded = [f"flash_attn_unpadded_{name}" for name in old]
    beneath = {name: getattr(interface, name) for name in (*_BENEATH, *unpadded)}
    wrapped = {f"_wrapped{name}": beneath[name] for name in _BENEATH}
    return {
        "flash_attn": {"__version__": VERSION, **PUBLIC},
        "flash_attn.flash_attn_interface": {**PUBLIC, **beneath, **wrapped},
        "flash_attn.bert_padding": _functions(bert_padding),
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {
            **_functions(rotary),
            "RotaryEmbedding": rotary.RotaryEmbedding,
        },
        "flash_attn_interface": {
            "__version__": VERSION_3,
            **_functions(hopper),
            **{name: getattr(hopper, name) for name in _BENEATH[:2]},
        },
    }


def _functions(module: ModuleType) -> dict[str, Any]:
    """What a module of ours defines for others."""
    return {
        name: found
        for name, found in vars(module).items()
        if not name.startswith("_") and callable(found) and not isinstance(found, type)
        if getattr(found, "__module__", "").startswith(__package__ or "")
        if name not in ("missing", "refuse", "split_heads")
    }


def install() -> None:
    """Makes flash-attn's module names resolve to tilewise, for the whole process.

    They are ``flash_attn``, ``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding``,
    ``flash_attn.layers.rotary``, and FlashAttention-3's ``flash_attn_interface``. Modules that are
    not among them cannot be imported, and names that are not in them raise AttributeError, or
    ImportError when imported, with the name; ``flash_attn_with_kvcache`` can be imported and raises
    UnsupportedError when called. A flash-attn that is installed, too, is hidden. Call it before
    whatever imports flash-attn; calling it again changes nothing.

    Raises:
        UnsupportedError: the real flash-attn, or FlashAttention-3, is imported already.
    """
    contents = _contents()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("flash_attn", "flash_attn_interface") and not _ours(module):
            raise UnsupportedError(
                f"{name} is imported already, from {getattr(module, '__file__', 'elsewhere')}",
                {"tilewise": ("install() must come before what imports it",)},
            )
    for name, attributes in contents.items():
        if name in sys.modules:
            continue
        module = ModuleType(name, f"tilewise in the place of {name}.")
        module.__spec__ = ModuleSpec(name, None, origin="tilewise", is_package=True)
        module.__path__ = []  # so that what is not there raises by its own name
        module.__package__ = name
        vars(module).update(attributes, __getattr__=_absent(name), __tilewise__=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def uninstall() -> None:
    """Takes the names away again; what has been imported from them stays as it is."""
    for name in _contents():
        if _ours(sys.modules.get(name)):
            del sys.modules[name]


def _ours(module: ModuleType | None) -> bool:
    return "__tilewise__" in getattr(module, "__dict__", {})


def _absent(module: str) -> Callable[[str], NoReturn]:
    def absent(name: str) -> NoReturn:
        raise AttributeError(f"{module}.{name} is not there: tilewise stands in for {module}")

    return absent
