"""Dropout's mask, tile by tile: the layout of ``formats.philox``, drawn once for eight elements.

DROPOUT is (seed pointer or None, threshold, head, batch); a lane below threshold is dropped.
"""

import triton
import triton.language as tl


@triton.jit
def kept(DROPOUT, m_start, n_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of the tile at (m_start, n_start), multiples of 16, stay: (BLOCK_M, BLOCK_N).

    Numerics: Philox4x32-10 with key seed and counter (8 (row // 16) + row % 8,
    4 (col // 16) + col % 8 // 2, head, batch).
    Source: Salmon, Moraes, Dror, Shaw, SC 2011; the layout is ours.
    """
    seed, threshold, head, batch_id = DROPOUT
    c0 = (m_start // 2 + tl.arange(0, BLOCK_M // 2))[:, None]
    c1 = (n_start // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    zero = c0 * 0 + c1 * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed), c0 + zero, c1 + zero, head + zero, batch_id + zero)
    # words are (row half, column half); last dimensions: column half, row half, parity
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    low = (words & 0xFFFF).to(tl.int32) >= threshold
    high = (words >> 16).to(tl.int32) >= threshold
    keep = tl.join(low.to(tl.int8), high.to(tl.int8))  # (BLOCK_M / 2, BLOCK_N / 4, 2, 2, 2)
    keep = keep.reshape([BLOCK_M // 16, 8, BLOCK_N // 16, 4, 2, 2, 2])
    keep = keep.permute([0, 5, 1, 2, 4, 3, 6]).reshape([BLOCK_M, BLOCK_N])
    return keep != 0
