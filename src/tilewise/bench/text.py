"""Real text that is on every machine: the source of Python's own standard library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to learn from and bytes held out, uint8."""

    train: Tensor
    held_out: Tensor


def standard_library(limit: int = 4_000_000, held_out: float = 0.1) -> Text:
    """The top level modules of the standard library, by name, in one piece.

    Args:
        limit: bytes taken at most.
        held_out: share at the end that is not trained on.

    Raises:
        FileNotFoundError: this Python comes without its source files.
    """
    folder = Path(os.__file__).parent
    files = sorted(folder.glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in files)[:limit])
    if not text:
        raise FileNotFoundError(f"no *.py in {folder}: the demo learns from their text")
    data = torch.frombuffer(text, dtype=torch.uint8)
    cut = int(len(data) * (1 - held_out))
    return Text(data[:cut], data[cut:])


def batch_of(data: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """(batch, context) inputs and the byte that follows each, int64, where ``seed`` draws."""
    gen = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (batch, 1), generator=gen)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
