"""Tiles of rows on their way into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .tma import async_load


@gluon.jit
def load_clear(
    desc, entry, row, head, into, clear, parity, at, first, stop, ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Loads a tile by TMA, waits for it, and zeroes its rows outside of [first, stop).

    For a producer of one warp; whoever it tells afterwards sees the zeros.

    Args:
        desc, entry, row, head: where the tile is.
        into: shared memory.
        clear, parity: an mbarrier for this alone, and how often it was used so far.
        at: number of the tile's first row, as first and stop count.
    """
    mbarrier.expect(clear, ROWS * WIDTH * 2)
    async_load(desc, [entry, row, head, 0], clear, into)
    mbarrier.wait(clear, parity & 1)
    tile = into.reshape([ROWS, WIDTH])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for r in gl.static_range(0, ROWS, 16):
        if (at + r < first) | (at + r + 16 > stop):
            rows = tile.slice(r, 16, dim=0)
            j = at + r + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            inside = (j >= first) & (j < stop)
            rows.store(gl.where(inside[:, None], rows.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def clear_slack(out, out_strides, cu_seqlens, batch, total, HEADS, WIDTH):
    """Zeroes the rows past the last packed sequence, shared out among the programs."""
    end = gl.load(cu_seqlens + batch).to(gl.int64)
    end = gl.minimum(gl.maximum(end, 0), total)
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    for row in range(end + gl.program_id(0), total, gl.num_programs(0)):
        for c in range(0, HEADS * WIDTH, 1024):
            column = c + gl.arange(0, 1024, layout=layout)
            nothing = gl.zeros([1024], out.dtype.element_ty, layout)
            gl.store(out + row * out_strides[1] + column, nothing, mask=column < HEADS * WIDTH)
