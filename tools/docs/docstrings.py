"""For mkdocstrings: what this project's docstrings have, and Google's style or Markdown has not."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SHARED = re.compile(r"^    (\w+(?:,\s+\w+)+): (.*(?:\n {8,}.*)*)", re.M)
_PRODUCT = re.compile(r"<(\w+, \w+)>")


def as_markdown(docstring: str) -> str:
    """``a, b: text`` as ``a: text`` and ``b: text``; <x, y>, which would be a tag, by brackets."""

    def entries(match: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {match[2]}" for name in re.split(r",\s+", match[1]))

    return _PRODUCT.sub(r"⟨\1⟩", _SHARED.sub(entries, docstring))


class Docstrings(griffe.Extension):
    """Changes the docstring of everything that has one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
