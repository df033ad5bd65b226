"""For mkdocstrings: what this project's docstrings have, and Google's style or Markdown has not.

- An entry may document several names, ``a, b: text``: each gets an entry.
- "Source: ..." is a sentence, not a section.
- Examples stand without a heading: they are fenced.
- <x, y> is an inner product, not a tag.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SHARED = re.compile(r"^    (\w+(?:,\s+\w+)+): (.*(?:\n {8,}.*)*)", re.M)
_SOURCE = re.compile(r"^Source: (.*(?:\n {4}.*)*)", re.M)
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
_PRODUCT = re.compile(r"<(\w+, \w+)>")


def as_markdown(docstring: str) -> str:
    """The docstring in Google's style, for a page."""

    def entries(match: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {match[2]}" for name in re.split(r",\s+", match[1]))

    docstring = _SHARED.sub(entries, docstring)
    docstring = _SOURCE.sub(lambda match: "**Source:** " + " ".join(match[1].split()), docstring)
    docstring = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)
    return _PRODUCT.sub(r"⟨\1⟩", docstring)


class Docstrings(griffe.Extension):
    """Changes the docstring of everything that has one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
