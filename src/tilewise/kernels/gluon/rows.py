"""Tiles of rows on their way into shared memory and out of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .tma import async_load, async_store


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
    # 16 x 64 at a time, since a producer has few registers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for r in gl.static_range(0, ROWS, 16):
        if (at + r < first) | (at + r + 16 > stop):
            j = at + r + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            inside = (j >= first) & (j < stop)
            for c in gl.static_range(0, WIDTH, 64):
                part = tile.slice(r, 16, dim=0).slice(c, 64, dim=1)
                part.store(gl.where(inside[:, None], part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def load_seen(
    desc, entry, row, head, into, full, clear, cleared, at, first, stop, MAY_CLEAR: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Loads a tile, whose arrival ``full`` tells; rows outside of [first, stop) become 0. They may
    hold anything, and 0 times NaN is NaN. Returns ``cleared``, the uses of ``clear`` so far."""
    if MAY_CLEAR:
        whole = (at >= first) & (at + ROWS <= stop)
    else:
        whole: gl.constexpr = True
    if whole:
        mbarrier.expect(full, ROWS * WIDTH * 2)
        async_load(desc, [entry, row, head, 0], full, into)
    elif MAY_CLEAR:
        load_clear(desc, entry, row, head, into, clear, cleared, at, first, stop, ROWS, WIDTH)
        mbarrier.arrive(full, count=1)
        cleared += 1
    return cleared


@gluon.jit
def load_with_statistic(
    desc, desc_statistic, entry, row, head, line, column, into, into_statistic, full, clear,
    cleared, at, first, stop, MAY_CLEAR: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """``load_seen`` of Q or dO with the statistic of each row."""
    if MAY_CLEAR:
        whole = (at >= first) & (at + ROWS <= stop)
    else:
        whole: gl.constexpr = True
    if whole:
        mbarrier.expect(full, ROWS * WIDTH * 2 + ROWS * 4)
        async_load(desc, [entry, row, head, 0], full, into)
        async_load(desc_statistic, [line, column], full, into_statistic)
    elif MAY_CLEAR:
        load_clear(desc, entry, row, head, into, clear, cleared, at, first, stop, ROWS, WIDTH)
        mbarrier.expect(full, ROWS * 4)
        async_load(desc_statistic, [line, column], full, into_statistic)
        cleared += 1
    return cleared


@gluon.jit
def store_tile(
    desc, pointer, strides, x, buffer, entry, start, at, length, head, PACKED: gl.constexpr,
    COLUMN: gl.constexpr = 0,
):  # fmt: skip
    """Begins to write rows at, at + 1, ... of a sequence, below ``length``, from ``COLUMN`` on,
    through shared memory by TMA, which stops at a dense tensor's end; a packed sequence's last rows
    go by pointers."""
    if PACKED:
        if at + x.shape[0] <= length:
            _store_whole(desc, x, buffer, 0, start + at, head, COLUMN)
        else:
            _store_rows(pointer, strides, x, start, at, length, head, desc.shape[3], COLUMN)
    else:
        _store_whole(desc, x, buffer, entry, at, head, COLUMN)


@gluon.jit
def _store_whole(desc, x, buffer, entry, row, head, COLUMN: gl.constexpr):
    buffer.reshape([x.shape[0], x.shape[1]]).store(x)
    fence_async_shared()
    async_store(desc, [entry, row, head, COLUMN], buffer)


@gluon.jit
def _store_rows(pointer, strides, x, start, at, length, head, width, COLUMN: gl.constexpr):
    layout: gl.constexpr = x.type.layout
    r = at + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    c = COLUMN + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    row = (start + r).to(gl.int64) * strides[1]
    pointers = pointer + head * strides[2] + row[:, None] + c[None, :]
    gl.store(pointers, x, mask=(r < length)[:, None] & (c < width)[None, :])


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
