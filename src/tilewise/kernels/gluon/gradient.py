"""What the backward kernels share: where a block and its statistics are.

SIZES is (batch, nheads, group, seqlen_q, seqlen_k, total_q, total_k, blocks, section, window_left,
window_right), PACKED is (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k); MASK and SCORE are as
in ``triton.tiles`` and ``triton.score``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton import tiles
from .twins import twin

row_blocks = twin(tiles.row_blocks)
rows_of_sequence = twin(tiles.rows_of_sequence)
tile_of_program = twin(tiles.tile_of_program)
STATISTICS_BLOCK: gl.constexpr = tiles.STATISTICS_BLOCK


@gluon.jit
def block_of_keys(tile, SIZES, PACKED, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Block of keys number ``tile``: head and sequence, and the row blocks that see it."""
    batch, _, group, seqlen_q, seqlen_k, total_q, total_k, num_n_blocks, section, left, right = (
        SIZES
    )
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = PACKED
    nheads_kv = SIZES[1] // group
    n_block, head_id = tile_of_program(tile, num_n_blocks, batch * nheads_kv, section, False)
    batch_id = head_id // nheads_kv
    start_q, _length_q, used_q = rows_of_sequence(
        batch_id, cu_seqlens_q, seqused_q, seqlen_q, total_q
    )
    start_k, length_k, used_k = rows_of_sequence(
        batch_id, cu_seqlens_k, seqused_k, seqlen_k, total_k
    )
    MASK = used_q, used_k, left, right
    n_start = n_block * BLOCK_N
    m0, m1, m2, m3 = row_blocks(n_start, gl.minimum(n_start + BLOCK_N, used_k), MASK, BLOCK_M)
    if n_start + BLOCK_N > used_k:
        m1, m2 = m3, m3  # the end of the keys cuts every tile
    if n_start >= used_k:
        m3 = m0
    return (
        batch_id, head_id % nheads_kv, n_start, start_q.to(gl.int32), used_q,
        start_k.to(gl.int32), length_k, used_k, m0, m1, m2, m3,
    )  # fmt: skip


@gluon.jit
def statistics_place(batch_id, head, start_q, SIZES, PACKED):
    """Line and first column of a head's statistics, and the columns of a line; see
    ``tiles.padded_statistics_of``."""
    BLOCK: gl.constexpr = STATISTICS_BLOCK
    if PACKED[0] is None:
        return batch_id * SIZES[1] + head, 0, gl.cdiv(SIZES[3], BLOCK) * BLOCK
    else:
        columns = (SIZES[5] // BLOCK + SIZES[0]) * BLOCK
        return head, (start_q // BLOCK + batch_id) * BLOCK, columns


@gluon.constexpr_function
def _statistics_layout(block_m):
    """Each thread has runs of four values, 16 bytes; its place in a warp's quad says which."""
    registers = [[0, 1], [0, 2]]
    registers += [[0, 16 << i] for i in range((block_m // 16).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [1, block_m])


@gluon.jit
def statistics(buffer, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """A statistic of each row as columns of a transposed score tile: (1, BLOCK_M) of ``layout``.

    In memory they stand by 16: pair of columns, half, parity, as ``bwd_preprocess`` writes them.
    """
    x = buffer.load(_statistics_layout(BLOCK_M))
    x = gl.permute(gl.reshape(x, [1, BLOCK_M // 16, 4, 2, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(x, [1, BLOCK_M]), layout, assert_trivial=True)


@gluon.jit
def place_of_row(r):
    """Where among the statistics of its block of 16 rows that of row r stands."""
    return r // 16 * 16 + r % 8 // 2 * 4 + r // 8 % 2 * 2 + r % 2
