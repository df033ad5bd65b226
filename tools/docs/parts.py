"""The generated parts of pages: what stands after each ``<!-- generated: NAME -->``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import error_tables
import measured

from tilewise.cli import parser
from tilewise.core.features import markdown_table

DRAWN = "measured"  # the site's folder of the results' figures


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
    "features": markdown_table,
    "error-tables": error_tables.tables,
    "error-cases": error_tables.cases,
    "benchmarks": measured.page,
    "device-tests": measured.device_tests,
    "command-line": command_line,
}
