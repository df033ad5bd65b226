"""Where a tile lies: programs to tiles, sequences to rows, rows to addresses, windows to ranges.

MASK is (seqlen_q, seqlen_k, window_left, window_right), a window side that is None is without
limit. Row i stands on the diagonal key d = i + seqlen_k - seqlen_q and sees keys
d - window_left <= j <= d + window_right, as in ``core.mask``. All ranges are half open.

SOURCE is where the rows of one head of one sequence lie: (pointer, row stride, column stride), or
with TMA (descriptor of (batch, seqlen, heads, head_dim), batch, first row, head).
"""

import triton
import triton.language as tl

# Rows of lse and delta in the backward come in whole blocks of this many, a multiple of BLOCK_M.
STATISTICS_BLOCK: tl.constexpr = tl.constexpr(128)


@triton.jit
def tile_of_program(
    program, num_blocks, num_heads, section, LONGEST_LAST: tl.constexpr, sectioned=None
):
    """The block and the head, counted over batch and heads, of one program of a flat grid.

    Heads go in sections, whose keys and values fit in the L2 cache together; within a section the
    block varies slowest, so that the longest tiles start first (Dao 2023, section 3.2; the order is
    ours). LONGEST_LAST says that higher blocks have more to do. Beyond the first ``sectioned``
    heads, a multiple of ``section``, all others are one section.
    """
    first = program // (section * num_blocks) * section
    width = section
    if sectioned is not None:
        first = tl.minimum(first, sectioned)
        if first == sectioned:
            width = num_heads
    width = tl.minimum(width, num_heads - first)
    within = program - first * num_blocks
    block = within // width
    if LONGEST_LAST:
        block = num_blocks - 1 - block
    return block, first + within % width


@triton.jit
def rows_of_program(num_blocks, nheads):
    """The block of rows, head and sequence of a program that only passes over memory.

    Heads vary fastest, since those of a row are neighbours in memory, and the last rows come first:
    they are what the kernel before left in the L2 cache.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    return block // nheads % num_blocks, block % nheads, block // nheads // num_blocks


@triton.jit
def rows_of_sequence(batch_id, cu_seqlens, seqused, seqlen, total):
    """First row, rows and used rows of a sequence; dense sequences start at row 0.

    Boundaries are clamped to the tensor, so that no value of cu_seqlens leads outside it.
    """
    if cu_seqlens is None:
        start = tl.cast(0, tl.int64)
        length = seqlen
        used = seqlen
    else:
        start = tl.load(cu_seqlens + batch_id).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), total)
        stop = tl.load(cu_seqlens + batch_id + 1).to(tl.int64)
        length = tl.minimum(tl.maximum(stop, start), total) - start
        length = tl.minimum(length, seqlen).to(tl.int32)
        used = length
    if seqused is not None:
        used = tl.minimum(tl.maximum(tl.load(seqused + batch_id).to(tl.int32), 0), length)
    return start, length, used


@triton.jit
def source(x, strides, batch_id, start, head, cu_seqlens, USE_TMA: tl.constexpr):
    """SOURCE of one head of one sequence; strides are (batch, row, head, column)."""
    if USE_TMA:
        # a packed tensor is one batch entry
        return x, batch_id if cu_seqlens is None else 0, tl.cast(start, tl.int32), head
    else:
        base = x + tl.cast(batch_id, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
        return base + start * strides[1], strides[1], strides[3]


@triton.jit
def statistics_of(x, batch_id, head, nheads, seqlen_q, total_q, start, cu_seqlens_q):
    """Where lse or delta of one head of one sequence lies: (batch, nheads, seqlen_q), contiguous,
    or (nheads, total_q) when packed."""
    if cu_seqlens_q is None:
        return x + (tl.cast(batch_id, tl.int64) * nheads + head) * seqlen_q
    else:
        return x + tl.cast(head, tl.int64) * total_q + start


@triton.jit
def padded_statistics_of(
    x,
    batch_id,
    batch,
    head,
    nheads,
    seqlen_q,
    total_q,
    start,
    cu_seqlens_q,
    USE_TMA: tl.constexpr,
):
    """Where the backward's own statistics of one head of one sequence lie: in a (parts, heads,
    rows) tensor in which each sequence begins at a multiple of STATISTICS_BLOCK and is filled up
    to one.

    Returns (pointer, distance of parts), or with TMA (descriptor of the tensor as a matrix, line,
    first column, lines of a part).
    """
    lines = nheads
    if cu_seqlens_q is None:
        lines = batch * nheads
        line = batch_id * nheads + head
        rows = tl.cdiv(seqlen_q, STATISTICS_BLOCK) * STATISTICS_BLOCK
        first = tl.zeros((), tl.int64)
    else:
        line = head
        rows = (total_q // STATISTICS_BLOCK + batch) * STATISTICS_BLOCK
        first = (start // STATISTICS_BLOCK + batch_id) * STATISTICS_BLOCK
    if USE_TMA:
        return x, line, tl.cast(first, tl.int32), lines
    else:
        return x + tl.cast(line, tl.int64) * rows + first, tl.cast(lines, tl.int64) * rows


@triton.jit
def load_statistics(
    STATISTICS, m_start, BLOCK_M: tl.constexpr, USE_TMA: tl.constexpr, PART: tl.constexpr = 0
):
    """Statistics of rows m_start, ..., (BLOCK_M,)."""
    if USE_TMA:
        line = STATISTICS[1] + PART * STATISTICS[3]
        return STATISTICS[0].load([line, STATISTICS[2] + m_start]).reshape([BLOCK_M])
    else:
        base = STATISTICS[0] + PART * STATISTICS[1]
        return tl.load(base + m_start + tl.arange(0, BLOCK_M))


@triton.jit
def accumulate(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b, in float32.

    A product of float32 tiles is summed for itself first. Else one chain of additions would run
    through all tiles, and the result's error grow with their number; tensor cores sum in pieces.
    """
    if a.dtype == tl.float32:
        # an fma, since the compiler would make acc + a b that chain
        return tl.fma(acc, 1.0, tl.dot(a, b, input_precision=PRECISION))
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_rows(
    SOURCE,
    row,
    first,
    stop,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Rows row, row + 1, ... as (ROWS, BLOCK_D); columns from HEAD_DIM on are zero.

    With CHECK, rows outside [first, stop) are zero; else all must exist, except that TMA fills
    what lies past a dense tensor with zeros.
    """
    offs_r = tl.arange(0, ROWS)
    if USE_TMA:
        tile = SOURCE[0].load([SOURCE[1], SOURCE[2] + row, SOURCE[3], 0])
        tile = tile.reshape([ROWS, BLOCK_D])
        if CHECK:
            inside = (row + offs_r >= first) & (row + offs_r < stop)
            tile = tl.where(inside[:, None], tile, 0.0)
    else:
        offs_d = tl.arange(0, BLOCK_D)
        base = SOURCE[0] + tl.cast(row, tl.int64) * SOURCE[1]
        # in 64 bits: rows or columns of one tile may lie more than 2^31 elements apart
        pointers = base + offs_r[:, None].to(tl.int64) * SOURCE[1]
        pointers += offs_d[None, :].to(tl.int64) * SOURCE[2]
        if CHECK:
            inside = ((row + offs_r >= first) & (row + offs_r < stop))[:, None]
            if HEAD_DIM != BLOCK_D:
                inside = inside & (offs_d < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    SOURCE,
    row,
    stop,
    tile,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes (ROWS, BLOCK_D) to rows row, row + 1, ... below stop; SOURCE is of pointers."""
    offs_r = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    base = SOURCE[0] + tl.cast(row, tl.int64) * SOURCE[1]
    pointers = base + offs_r[:, None].to(tl.int64) * SOURCE[1]
    pointers += offs_d[None, :].to(tl.int64) * SOURCE[2]
    inside = ((row + offs_r < stop)[:, None]) & ((offs_d < HEAD_DIM)[None, :])
    tl.store(pointers, tile.to(SOURCE[0].dtype.element_ty), mask=inside)


@triton.jit
def clear_slack(
    x,
    strides,
    batch_id,
    batch,
    head,
    block,
    num_blocks,
    cu_seqlens,
    total,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Zeroes the rows of one head past the last packed sequence, shared out among its programs."""
    if cu_seqlens is not None:
        if batch_id == batch - 1:
            end = tl.load(cu_seqlens + batch).to(tl.int64)
            end = tl.minimum(tl.maximum(end, 0), total)
            slack = (total - end).to(tl.int32)
            rows = source(x, strides, batch_id, end, head, cu_seqlens, False)
            nothing = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for row in range(block * ROWS, slack, num_blocks * ROWS):
                store_rows(rows, row, slack, nothing, ROWS, HEAD_DIM, BLOCK_D)


@triton.jit
def keys_of(m_start, m_stop, MASK):
    """The smallest range of keys outside which rows [m_start, m_stop) see nothing."""
    seqlen_q, seqlen_k, window_left, window_right = MASK
    shift = seqlen_k - seqlen_q
    start = 0
    stop = seqlen_k
    if window_left is not None:
        start = tl.minimum(tl.maximum(m_start + shift - window_left, 0), seqlen_k)
    if window_right is not None:
        stop = tl.minimum(tl.maximum(m_stop + shift + window_right, start), seqlen_k)
    return start, stop


@triton.jit
def sees_a_key(i, MASK):
    """Whether there is a key that row i sees, for a tensor of rows."""
    seqlen_q, seqlen_k, window_left, window_right = MASK
    d = i + (seqlen_k - seqlen_q)
    first, last = d * 0, d * 0 + (seqlen_k - 1)
    if window_left is not None:
        first = tl.maximum(d - window_left, first)
    if window_right is not None:
        last = tl.minimum(d + window_right, last)
    return (first <= last) & (i < seqlen_q)


@triton.jit
def rows_of(n_start, n_stop, MASK):
    """The smallest range of rows outside which no row sees a key of [n_start, n_stop)."""
    seqlen_q, seqlen_k, window_left, window_right = MASK
    shift = seqlen_k - seqlen_q
    start = 0
    stop = seqlen_q
    if window_right is not None:
        start = tl.minimum(tl.maximum(n_start - shift - window_right, 0), seqlen_q)
    if window_left is not None:
        stop = tl.minimum(tl.maximum(n_stop - shift + window_left, start), seqlen_q)
    return start, stop


@triton.jit
def key_blocks(m_start, m_stop, MASK, BLOCK_N: tl.constexpr):
    """Where the loop over keys of rows [m_start, m_stop) starts, and its three parts end.

    Returns multiples of BLOCK_N n0 <= n1 <= n2 <= n3: the tiles of [n1, n2) are seen whole, those
    of [n0, n1) and [n2, n3) are cut by the window or by the end of the keys.
    """
    seqlen_q, seqlen_k, window_left, window_right = MASK
    shift = seqlen_k - seqlen_q
    start, stop = keys_of(m_start, m_stop, MASK)
    n0 = start // BLOCK_N * BLOCK_N
    n3 = tl.cdiv(stop, BLOCK_N) * BLOCK_N
    n1 = n0
    n2 = seqlen_k // BLOCK_N * BLOCK_N
    if window_left is not None:
        n1 = tl.maximum(m_stop - 1 + shift - window_left, 0)
        n1 = tl.minimum(tl.maximum(tl.cdiv(n1, BLOCK_N) * BLOCK_N, n0), n3)
    if window_right is not None:
        n2 = tl.minimum(tl.maximum(m_start + shift + window_right + 1, 0) // BLOCK_N * BLOCK_N, n2)
    return n0, n1, tl.minimum(tl.maximum(n2, n1), n3), n3


@triton.jit
def row_blocks(n_start, n_stop, MASK, BLOCK_M: tl.constexpr):
    """As ``key_blocks``, for the loop over the rows that see keys [n_start, n_stop)."""
    seqlen_q, seqlen_k, window_left, window_right = MASK
    shift = seqlen_k - seqlen_q
    start, stop = rows_of(n_start, n_stop, MASK)
    m0 = start // BLOCK_M * BLOCK_M
    m3 = tl.cdiv(stop, BLOCK_M) * BLOCK_M
    m1 = m0
    m2 = seqlen_q // BLOCK_M * BLOCK_M
    if window_right is not None:
        m1 = tl.maximum(n_stop - 1 - shift - window_right, 0)
        m1 = tl.minimum(tl.maximum(tl.cdiv(m1, BLOCK_M) * BLOCK_M, m0), m3)
    if window_left is not None:
        m2 = tl.minimum(tl.maximum(n_start - shift + window_left + 1, 0) // BLOCK_M * BLOCK_M, m2)
    return m0, m1, tl.minimum(tl.maximum(m2, m1), m3), m3


@triton.jit
def visible(i, j, MASK):
    """Whether row i sees key j, for tensors of indices that broadcast; keys past the end never."""
    seqlen_q, seqlen_k, window_left, window_right = MASK
    d = i + (seqlen_k - seqlen_q)
    seen = j < seqlen_k
    if window_left is not None:
        seen = seen & (j >= d - window_left)
    if window_right is not None:
        seen = seen & (j <= d + window_right)
    return seen
