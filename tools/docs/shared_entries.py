"""For mkdocstrings: an entry of a docstring that documents several names is one entry for each."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SHARED = re.compile(r"^    (\w+(?:,\s+\w+)+): (.*(?:\n {8,}.*)*)", re.M)


def expanded(docstring: str) -> str:
    """The docstring, with ``a, b: text`` as ``a: text`` and ``b: text``."""

    def entries(match: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {match[2]}" for name in re.split(r",\s+", match[1]))

    return _SHARED.sub(entries, docstring)


class SharedEntries(griffe.Extension):
    """Expands the docstring of everything that has one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = expanded(obj.docstring.value)
