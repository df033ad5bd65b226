"""Dropout's mask, tile by tile: the layout of ``formats.philox``.

DROPOUT is (seed pointer or None, threshold, head, batch); a lane below threshold is dropped. The
tiles are drawn in the order in which tensor cores hold an accumulator, so that each thread draws
for its own elements and nothing is exchanged.

Numerics: Philox4x32-7 with key seed and counter (8 (row // 16) + row % 8,
4 (col // 16) + col % 8 // 2, head, batch).
Source: Salmon, Moraes, Dror, Shaw, SC 2011; the layout is ours.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .pairs import factors, times

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def philox(DROPOUT, c0, c1):
    """Four words for counters (c0, c1), which broadcast: word 2 a + b is that of row half a and
    column half b of a block of 16 x 16."""
    seed, _, head, batch_id = DROPOUT
    key = tl.load(seed).to(tl.uint64)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = tl.broadcast(c0.to(tl.uint32), c1.to(tl.uint32))
    c2, c3 = c0 * 0 + tl.cast(head, tl.uint32), c0 * 0 + tl.cast(batch_id, tl.uint32)
    for _ in tl.static_range(7):
        # the two halves of a product of 64 bits come in one instruction
        x0, x2 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (x2 >> 32).to(tl.uint32) ^ c1 ^ k0, x2.to(tl.uint32)
        c2, c3 = (x0 >> 32).to(tl.uint32) ^ c3 ^ k1, x0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _words(DROPOUT, c0, c1):
    """``philox`` with two more dimensions: half of rows, half of columns."""
    w0, w1, w2, w3 = philox(DROPOUT, c0, c1)
    # two words travel as one of 64 bits: else the compiler moves each half of the draw on its own,
    # through shared memory
    pairs = tl.join(w0 | (w1.to(tl.uint64) << 32), w2 | (w3.to(tl.uint64) << 32))
    return tl.join(pairs.to(tl.uint32), (pairs >> 32).to(tl.uint32))


@triton.jit
def _spread(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What each draw has for its eight elements, where they are: (BLOCK_M, BLOCK_N)."""
    # (row block, row, column block, pair of columns, half of rows, half of columns, parity)
    x = x.reshape([BLOCK_M // 16, 8, BLOCK_N // 16, 4, 2, 2, 2])
    return x.permute([0, 4, 1, 2, 5, 3, 6]).reshape([BLOCK_M, BLOCK_N])


@triton.jit
def _words_of_tile(DROPOUT, m_start, n_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    c0 = (m_start // 2 + tl.arange(0, BLOCK_M // 2))[:, None]
    c1 = (n_start // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    return _words(DROPOUT, c0, c1)


@triton.jit
def kept(DROPOUT, m_start, n_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of the tile at (m_start, n_start), multiples of 16, stay: (BLOCK_M, BLOCK_N).

    Each draw serves eight elements.
    """
    words = _words_of_tile(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)
    lanes = _spread(tl.join(words << 16, words), BLOCK_M, BLOCK_N)  # in the upper half of 32 bits
    return lanes >= (tl.cast(DROPOUT[1], tl.uint32) << 16)


@triton.jit
def kept_transposed(DROPOUT, m_start, n_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same tile transposed, (BLOCK_N, BLOCK_M).

    A thread then holds one column of each pair, so that a draw serves four elements: to draw twice
    costs less than to exchange.
    """
    row = tl.arange(0, BLOCK_M // 2).reshape([1, 1, BLOCK_M // 16, 4, 2])
    column = tl.arange(0, BLOCK_N // 2).reshape([BLOCK_N // 16, 8, 1, 1, 1])
    words = _words(DROPOUT, m_start // 2 + row, n_start // 4 + column // 2)
    lanes = words << (16 - column % 2 * 16).to(tl.uint32).reshape([BLOCK_N // 16, 8, 1, 1, 1, 1, 1])
    # (column block, column, row block, pair of rows, parity, half of rows, half of columns)
    lanes = lanes.permute([0, 6, 1, 2, 5, 3, 4]).reshape([BLOCK_N, BLOCK_M])
    return lanes >= (tl.cast(DROPOUT[1], tl.uint32) << 16)


@triton.jit
def drop(p, keep):
    """p where keep, else 0: as a product, since the compiler would take a selection behind the
    rounding to half precision, and round and select elements one by one instead of in pairs."""
    return p * tl.where(keep, 1.0, 0.0)


@triton.jit
def dropped(
    p, DROPOUT, m_start, n_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr
):
    """The tile p at (m_start, n_start), multiples of 16, in ``dtype``, 0 where dropped."""
    # the interpreter knows no asm, also where there is a GPU
    if dtype != tl.float32 and not _INTERPRETED and cuda_capability_geq(9, 0):
        words = _words_of_tile(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)
        words = _spread(tl.join(words, words), BLOCK_M, BLOCK_N)
        p = p.to(dtype)
        return times(p, factors(p, words, DROPOUT))
    else:
        return drop(p, kept(DROPOUT, m_start, n_start, BLOCK_M, BLOCK_N)).to(dtype)
