"""The generated parts of pages: what stands after each ``<!-- generated: NAME -->``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import error_tables
import measured
from markdown_text import markdown

from tilewise.backends import gluon, triton
from tilewise.cli import parser
from tilewise.core.features import DTYPES, FEATURES, markdown_table
from tilewise.dispatch import BACKENDS

DRAWN = measured.SITE_FOLDER


def backends() -> str:
    """In order of preference: what each has."""
    widest = {"gluon": gluon.MAX_HEAD_DIM, "triton": triton.MAX_HEAD_DIM}
    lines = []
    for name, backend in BACKENDS.items():
        lacks = [f"`{f.name}`" for f in FEATURES if name not in f.fwd]
        lines.append(
            [
                f"`{name}`",
                ", ".join(f"`{a}`" for a in backend.algorithms),
                ", ".join(DTYPES[name]),
                f"{widest[name]}" if name in widest else "any",
                ", ".join(lacks) or "nothing",
                "in this order" if backend.automatic else "never",
            ]
        )
    header = ["backend", "algorithms", "dtypes", "widest head", "lacks", 'taken by "auto"']
    return markdown(header, lines, left=len(header))


def command_line() -> str:
    """Each command's own help."""
    root = parser()
    (commands,) = (a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    formatter = argparse.HelpFormatter
    texts = []
    for name, command in commands.choices.items():
        if command.formatter_class is argparse.HelpFormatter:
            command.formatter_class = lambda prog: formatter(prog, width=100)
        texts.append(f"## tilewise {name}\n\n```text\n{command.format_help()}```")
    return "\n\n".join(texts)


def drawn_results() -> list[Path]:
    """The figures of all result files, drawn where they are not yet."""
    return [path for result in measured.results() for path in result.figures()]


PARTS: dict[str, Callable[[], str]] = {
    "backends": backends,
    "features": markdown_table,
    "error-tables": error_tables.tables,
    "error-cases": error_tables.cases,
    "benchmarks": measured.page,
    "device-tests": measured.device_tests,
    "command-line": command_line,
}
