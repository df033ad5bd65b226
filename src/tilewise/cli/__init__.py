"""The command ``tilewise``: ``env``, ``check``, ``bench`` and ``demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from . import bench, check, demo, env


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    root = argparse.ArgumentParser(
        prog="tilewise", description="Exact attention, tile by tile: what it does on this machine."
    )
    root.add_argument("--version", action="version", version=f"tilewise {__version__}")
    commands = root.add_subparsers(required=True)
    for command in (env, check, bench, demo):
        command.add_parser(commands)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: without the program's name; of the process when None.

    Returns:
        0, or 1 when something that was checked is wrong. argparse exits with 2 itself.
    """
    chosen = parser().parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return code
