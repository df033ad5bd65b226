"""Where FlashAttention 1 keeps a row's running results in device memory, between key blocks.

A scratch tensor is (nheads, rows, width), contiguous. Every sequence begins at a multiple of
BLOCK_M and has whole tiles to itself, so that no access needs a mask: with t rows in all, dense or
packed, t // BLOCK_M + batch tiles hold any cut into sequences.

A tile lies in the order in which tensor cores hold an accumulator: lane 4 (row % 8) + col % 8 // 2
of the warp of 16 rows row // 16 has four values of every 8 columns. So each thread reads and writes
its own 16 bytes, adjacent to its neighbours', and nothing is exchanged through shared memory.
"""

import triton
import triton.language as tl


@triton.jit
def scratch_row(batch_id, start, seqlen_q, cu_seqlens_q, BLOCK_M: tl.constexpr):
    """The row of a scratch tensor at which a sequence begins; start is its first row in q."""
    if cu_seqlens_q is None:
        start = tl.cast(batch_id, tl.int64) * seqlen_q
    return (start // BLOCK_M + batch_id) * BLOCK_M


@triton.jit
def scratch_of(x, head, rows, row, WIDTH: tl.constexpr):
    """Where one head of a scratch tensor of ``rows`` rows lies from ``row`` on."""
    return x + (tl.cast(head, tl.int64) * rows + row) * WIDTH


@triton.jit
def load_scratch(x, m_start, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The tile of rows m_start, ... of one head, (BLOCK_M, WIDTH)."""
    return tile_of(load_flat(x, m_start, BLOCK_M, WIDTH), BLOCK_M, WIDTH)


@triton.jit
def load_flat(x, m_start, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The same tile as it lies in memory, to be loaded before it is needed."""
    x += tl.cast(m_start, tl.int64) * WIDTH
    return tl.load(x + tl.arange(0, BLOCK_M * WIDTH))


@triton.jit
def tile_of(flat, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """(BLOCK_M, WIDTH) of what ``load_flat`` loaded."""
    # column // 8, row // 16, row % 8, column % 8 // 2, row % 16 // 8, column % 2
    tile = flat.reshape([WIDTH // 8, BLOCK_M // 16, 8, 4, 2, 2])
    return tile.permute([1, 4, 2, 0, 3, 5]).reshape([BLOCK_M, WIDTH])


@triton.jit
def store_scratch(x, m_start, tile, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Writes what ``load_scratch`` reads."""
    x += tl.cast(m_start, tl.int64) * WIDTH
    tile = tile.reshape([BLOCK_M // 16, 2, 8, WIDTH // 8, 4, 2])
    tile = tile.permute([3, 0, 2, 4, 1, 5]).reshape([BLOCK_M * WIDTH])
    tl.store(x + tl.arange(0, BLOCK_M * WIDTH), tile)
