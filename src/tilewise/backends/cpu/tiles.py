"""What a CPU call is cut into: chunks of heads, tiles of rows and columns, and the buffers they
reuse.

All heads of a chunk go through one batched matmul. Query heads that share a key head are stacked as
rows of one matrix, so grouped heads need no copy of K or V. Tile-sized buffers are reused: on a
CPU, fresh pages for every tile would cost a good part of the time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.mask import MaskSpec
from ...core.problem import VARLEN, AttentionProblem
from ...formats import varlen
from ..base import AttentionTensors, packed_sequences

# One score tile of a chunk holds at most this many elements: 4 MiB in float32, within a shared L3
# cache.
TILE_ELEMENTS = 1 << 20
# Keys or values of up to this many elements are converted once, larger ones again for each tile.
WHOLE_ELEMENTS = 1 << 22
# Buffers of up to this size in all stay with their thread.
KEEP_BYTES = 64 << 20

_THREAD = threading.local()


@cache
def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices fast."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Rows (per query head) and columns of a score tile."""

    BLOCK_M: int
    BLOCK_N: int


def block_sizes(rows: int, cols: int, group: int, seqlen_q: int, seqlen_k: int) -> BlockSizes:
    """Shrinks a preferred tile to the call: ``group`` query heads share the rows of one matrix.

    Both sizes are multiples of 16, the granule of the dropout mask.
    """

    def up(n: int) -> int:
        return max(16, -(-n // 16) * 16)

    return BlockSizes(min(up(rows // group), up(seqlen_q)), min(up(cols), up(seqlen_k)))


class Scratch:
    """Named flat buffers, grown on demand and handed out as contiguous views.

    A thread keeps its buffers from call to call, which saves short calls their page faults. Buffers
    of more than KEEP_BYTES in all are given back at the thread's next call.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    @classmethod
    def of_this_thread(cls, dtype: torch.dtype) -> Scratch:
        """The calling thread's buffers for this work dtype."""
        kept: dict[Any, Scratch] = _THREAD.__dict__
        scratch = kept.get(dtype)
        if scratch is None or scratch._bytes() > KEEP_BYTES:
            scratch = kept[dtype] = cls(dtype)
        return scratch

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor of this shape, in memory that the name's next call reuses."""
        key = (name, dtype or self.dtype)
        size = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            with torch.inference_mode(False):  # the next call may be outside of it
                flat = self._flat[key] = torch.empty(size, dtype=key[1])
        elif torch.are_deterministic_algorithms_enabled():
            flat = _as_new(flat)
        return flat[:size].view(shape)

    def _bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())


def _as_new(flat: Tensor) -> Tensor:
    """What torch does to new memory in deterministic mode: NaN, so that a missing write shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return flat.fill_(math.nan) if fill else flat


@dataclass(slots=True)
class Columns:
    """Keys or values of a chunk: a view, a converted copy if small, else copied by block."""

    name: str
    x: Tensor  # (B, S, Hk, D)
    dtype: torch.dtype
    scratch: Scratch
    whole: Tensor | None = None  # (B * Hk, S, D), made when first asked for

    def block(self, n: range) -> Tensor:
        """Rows ``n``, (B * Hk, len(n), D)."""
        x = self.x
        if self.whole is None:
            if x.dtype == self.dtype and x.shape[0] == 1 and x.stride(-1) == 1:
                self.whole = x[0].transpose(0, 1)
            elif x.numel() <= WHOLE_ELEMENTS:
                self.whole = self._converted(f"whole_{self.name}", x)
            else:
                return self._converted(self.name, x[:, n.start : n.stop])
        return self.whole[:, n.start : n.stop]

    def _converted(self, name: str, rows: Tensor) -> Tensor:
        rows = rows.transpose(1, 2)  # (B, Hk, n, D)
        return self.scratch.take(name, *rows.shape, dtype=self.dtype).copy_(rows).flatten(0, 1)


@dataclass(slots=True)
class Chunk:
    """Some batch entries and key heads of one call, as views.

    Sizes: B batch entries, Hk key heads, G query heads to each, S rows, D or Dv columns.
    """

    q: Tensor  # (B, Sq, Hk, G, D)
    k: Tensor  # (B, Sk, Hk, D)
    v: Tensor  # (B, Sk, Hk, Dv)
    attn_bias: Tensor | None  # (B or 1, Hk or 1, G or 1, Sq or 1, Sk or 1)
    alibi_slopes: Tensor | None  # (B, Hk, G, 1, 1), work dtype
    sink: Tensor | None  # (1, Hk, G, 1), work dtype
    batches: range  # numbers of the batch entries, for dropout
    heads: range  # numbers of the query heads, for dropout
    seed: int | None
    mask: MaskSpec
    softmax_scale: float
    softcap: float
    dropout_p: float
    scratch: Scratch

    @property
    def work_dtype(self) -> torch.dtype:
        """What scores and accumulators are held in."""
        return self.scratch.dtype

    @property
    def seqlen_q(self) -> int:
        """Rows of q."""
        return self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        """Rows of k."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads to each key head."""
        return self.q.shape[3]

    @property
    def nmat(self) -> int:
        """Matrices in a batched matmul."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def product_dtype(self) -> torch.dtype:
        """What the backward multiplies P^T dO, dS K and dS^T Q in.

        bfloat16 inputs stay bfloat16 where the CPU has it: the product rounds what would be
        rounded anyway. Scores never do. float16 has no fast matmul on a CPU.
        """
        return torch.bfloat16 if self.q.dtype == torch.bfloat16 and has_bf16() else self.work_dtype

    def row_block(
        self, name: str, x: Tensor, start: int, stop: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Rows of a (B, S, Hk, G, D) tensor as (B * Hk, G * n, D), copied.

        The dtype is the work dtype unless another is given.
        """
        rows = x[:, start:stop].permute(0, 2, 3, 1, 4)  # (B, Hk, G, n, D)
        buf = self.scratch.take(name, *rows.shape, dtype=dtype)
        return buf.copy_(rows).view(self.nmat, -1, x.shape[-1])

    def columns(self, name: str, x: Tensor, dtype: torch.dtype | None = None) -> Columns:
        """A (B, S, Hk, D) tensor to take blocks of rows from, in the work dtype or another."""
        return Columns(name, x, dtype or self.work_dtype, self.scratch)

    def by_row(self, x: Tensor) -> Tensor:
        """(B * Hk, G * n, C) as (B, Hk, G, n, C)."""
        b, hk = self.q.shape[0], self.q.shape[2]
        return x.view(b, hk, self.group, -1, x.shape[-1])


def store_rows(dest: Tensor, start: int, stop: int, block: Tensor) -> None:
    """Writes (B, Hk, G, n, D) to rows of a (B, S, Hk, G, D) tensor, in its dtype."""
    dest[:, start:stop].copy_(block.permute(0, 3, 1, 2, 4))


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(slots=True)
class Slot:
    """Where a chunk lies in its sequence: batch entries, key heads, and the sequence's rows."""

    sequence: varlen.SequenceRows | None
    batch: slice
    kv_heads: slice

    def rows(self, x: Tensor, of_keys: bool) -> Tensor:
        """A packed or dense tensor as (B, S, heads, ...), this slot's batch and rows alone."""
        if self.sequence is None:
            return x[self.batch]
        s = self.sequence
        return x[None, s.k_start : s.k_stop] if of_keys else x[None, s.q_start : s.q_stop]

    def queries(self, x: Tensor, group: int) -> Tensor:
        """(..., nheads, D) of queries to (B, Sq, Hk, G, D)."""
        return self.rows(x, of_keys=False).unflatten(2, (-1, group))[:, :, self.kv_heads]

    def keys(self, x: Tensor) -> Tensor:
        """(..., nheads_kv, D) of keys to (B, Sk, Hk, D)."""
        return self.rows(x, of_keys=True)[:, :, self.kv_heads]

    def stats(self, x: Tensor, group: int) -> Tensor:
        """lse-like (B, nheads, Sq) or (nheads, total_q) to (B, Hk, G, Sq)."""
        s = self.sequence
        x = x[self.batch] if s is None else x[None, :, s.q_start : s.q_stop]
        return x.unflatten(1, (-1, group))[:, self.kv_heads]

    def bias(self, x: Tensor, group: int) -> Tensor:
        """attn_bias to (B or 1, Hk or 1, G or 1, Sq or 1, Sk or 1)."""
        if self.sequence is not None:
            s = self.sequence
            x = x[None, :, s.q_start : s.q_stop, : s.k_stop - s.k_start]
        elif x.shape[0] != 1:
            x = x[self.batch]
        if x.shape[1] == 1:
            return x.unsqueeze(2)
        return x.unflatten(1, (-1, group))[:, self.kv_heads]


def slots(
    problem: AttentionProblem, tensors: AttentionTensors, tile_elements: int
) -> Iterator[Slot]:
    """Cuts a call into slots whose score tile of ``tile_elements`` per key head stays in bounds."""
    fit = max(1, TILE_ELEMENTS // max(1, tile_elements))  # (batch, key head) pairs
    heads = min(fit, problem.nheads_kv)
    kv_slices = [slice(h, h + heads) for h in range(0, problem.nheads_kv, heads)]
    if problem.layout == VARLEN:
        for sequence in packed_sequences(problem, tensors):
            for kv in kv_slices:
                yield Slot(sequence, slice(sequence.index, sequence.index + 1), kv)
        return
    batches = max(1, fit // problem.nheads_kv)
    for b in range(0, problem.batch, batches):
        for kv in kv_slices:
            yield Slot(None, slice(b, min(b + batches, problem.batch)), kv)


def make_chunk(
    problem: AttentionProblem, tensors: AttentionTensors, slot: Slot, scratch: Scratch
) -> Chunk:
    """The views of one slot."""
    t, group = tensors, problem.group
    kv = range(*slot.kv_heads.indices(problem.nheads_kv))
    slopes = sink = None
    if t.alibi_slopes is not None:
        slopes = t.alibi_slopes if t.alibi_slopes.dim() == 2 else t.alibi_slopes[None]
        if slopes.shape[0] != 1:
            slopes = slopes[slot.batch]
        slopes = slopes.to(scratch.dtype).unflatten(1, (-1, group))[:, slot.kv_heads, :, None, None]
    if t.sink is not None:
        sink = t.sink.to(scratch.dtype).view(1, -1, group, 1)[:, slot.kv_heads]
    return Chunk(
        q=slot.queries(t.q, group),
        k=slot.keys(t.k),
        v=slot.keys(t.v),
        attn_bias=None if t.attn_bias is None else slot.bias(t.attn_bias, group),
        alibi_slopes=slopes,
        sink=sink,
        batches=range(slot.batch.start, slot.batch.stop),
        heads=range(kv.start * group, kv.stop * group),
        seed=None if t.seed is None else int(t.seed),
        mask=problem.mask,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        scratch=scratch,
    )
