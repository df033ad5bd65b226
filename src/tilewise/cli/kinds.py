"""Kinds of command-line arguments; what cannot be right is refused before any work."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def positive(text: str) -> int:
    """An integer that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def duration(text: str) -> float:
    """A positive number."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number}: must be positive")
    return number


def lengths(text: str) -> list[int]:
    """Comma-separated integers that are at least 1, sorted."""
    try:
        return sorted({positive(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be integers and commas") from None


def output_folder(text: str) -> Path:
    """A folder that can be written to; made if it is not there."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written to")
    return path


def output_file(text: str) -> Path:
    """A file that can be written; its folder is made if it is not there."""
    path = Path(text)
    output_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder")
    return path
