"""Packed sequences: ``cu_seqlens`` and what stands between them.

A packed tensor is (total, nheads, head_dim); sequence ``b`` is rows cu_seqlens[b] to cu_seqlens[b +
1]. Rows past the last boundary are slack. ``seqused[b]`` limits a sequence to its first rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence that are used, in the packed tensors of queries and of keys."""

    index: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


def check_cu_seqlens(name: str, values: list[int], total: int, max_name: str, longest: int) -> None:
    """Raises InvalidInputError unless boundaries start at 0, never decrease and fit the data."""
    if values[0] != 0:
        raise InvalidInputError(name, values[0], "its first entry must be 0")
    for b, (start, stop) in enumerate(pairwise(values)):
        if stop < start:
            raise InvalidInputError(
                name, f"{start} then {stop} at entry {b + 1}", "must not decrease"
            )
        if stop - start > longest:
            raise InvalidInputError(
                max_name,
                longest,
                f"sequence {b} of {name} has {stop - start} rows; give the longest",
            )
    if values[-1] > total:
        raise InvalidInputError(
            name, values[-1], f"points past the data, which has {total} rows in all"
        )


def check_seqused(name: str, values: list[int], boundaries: list[int]) -> None:
    """Raises InvalidInputError unless each used length lies within its sequence."""
    for b, used in enumerate(values):
        length = boundaries[b + 1] - boundaries[b]
        if not 0 <= used <= length:
            raise InvalidInputError(name, f"{used} at sequence {b}", f"must be in [0, {length}]")


def sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    total_q: int,
    total_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> list[SequenceRows]:
    """Reads the boundaries on the host, checks their values and lists the sequences.

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers.
        total_q, total_k: rows of the packed tensors.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        seqused_q, seqused_k: (batch,) integers, or None when all rows are used.

    Raises:
        InvalidInputError: a boundary decreases or points past the data, a used length is longer
            than its sequence, or a sequence is longer than its ``max_seqlen``.
    """
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check_cu_seqlens("cu_seqlens_q", bounds_q, total_q, "max_seqlen_q", max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", bounds_k, total_k, "max_seqlen_k", max_seqlen_k)
    used_q = [b - a for a, b in pairwise(bounds_q)]
    used_k = [b - a for a, b in pairwise(bounds_k)]
    if seqused_q is not None:
        used_q = seqused_q.tolist()
        check_seqused("seqused_q", used_q, bounds_q)
    if seqused_k is not None:
        used_k = seqused_k.tolist()
        check_seqused("seqused_k", used_k, bounds_k)
    return [
        SequenceRows(b, q, q + nq, k, k + nk)
        for b, (q, nq, k, nk) in enumerate(zip(bounds_q, used_q, bounds_k, used_k, strict=False))
    ]


def unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the rows of a padded batch that the mask keeps.

    Args:
        x: (batch, seqlen, ...).
        mask: (batch, seqlen), nonzero where a row is real.

    Returns:
        packed (total, ...), row indices (total,) into batch * seqlen, cu_seqlens (batch + 1,) int32
        and the longest length.
    """
    kept = mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return x.flatten(0, 1)[indices], indices, cu_seqlens, longest


def pad(packed: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes ``unpad``: (total, ...) to (batch, seqlen, ...), zero where nothing was packed."""
    out = packed.new_zeros(batch * seqlen, *packed.shape[1:])
    return out.index_copy(0, indices, packed).view(batch, seqlen, *packed.shape[1:])


def boundaries(starts: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens of rows that follow one another in memory, from where sequences start.

    Args:
        starts: (batch, seqlen) bool; the first of each row counts as True.

    Returns:
        cu_seqlens (sequences + 1,) int32 into batch * seqlen, and the longest length.
    """
    first = torch.zeros_like(starts)
    first[:, :1] = True
    places = (starts | first).flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(places, (0, 1), value=starts.numel()).to(torch.int32)
    lengths = cu_seqlens.diff()
    return cu_seqlens, int(lengths.max()) if len(lengths) else 0
