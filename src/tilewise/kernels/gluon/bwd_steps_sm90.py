"""What the steps of the one-pass backward share; a step is a block of rows, by a warpgroup.

``bwd_narrow_sm90`` has those of heads up to 64 wide, ``bwd_wide_sm90`` those of wider ones; each
has how a tile begins and ends too.

TENSORS  (q, k, v, dout, lse, delta, dq, dk, dv): TMA descriptors; lse, delta and dq are the
         backward's own, in the orders that ``statistics`` and ``in_register_order`` say. delta
         is over dropout's scale, which dQ and dK take in the end. Without
         dq, which is None then, a step has dK and dV alone, and no warpgroup waits for the other
BUFFERS  (q, dout, k, v, lse, delta, ds, dq, tile): shared memory; q, dout, lse and delta are
         rings of blocks of rows, k two halves of 64 keys of two tiles, v of two (narrow heads) or
         one, ds the halves of two blocks of rows
BARRIERS (k_full, v_full, q_full, dout_full, empty, ds_full, clear, k_empty, tile_full,
          tile_empty, v_empty)
OPERANDS (softmax_scale, grad_scale, softcap, alibi_slopes, slope_strides, seed,
          dropout_threshold, keep_scale)
GIVEN    (TENSORS, BUFFERS, BARRIERS, SIZES, PACKED, OPERANDS); SIZES and PACKED are as in
         ``gradient``
TILE     (BLOCK_D, STAGES, APPROX_TANH, ORDER)
PLACE    (batch_id, head, start_q, n_start, keys, begin, slope, MASK): where a warpgroup's tiles
         lie, K's halves in shared memory, how far into its rows a tile begins, ALiBi's slope
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ..triton import score
from .dropout import keep_factors_transposed
from .gradient import statistics, statistics_place
from .ptx import exp2
from .score import scores
from .softmax import hide, to_m
from .twins import twin

slope_of = twin(score.slope_of)

ROWS: gl.constexpr = gl.constexpr(64)
KEYS: gl.constexpr = gl.constexpr(128)


@gluon.jit
def slope_at(OPERANDS, batch_id, head):
    """ALiBi's slope of a head; without ALiBi any number."""
    if OPERANDS[3] is None:
        slope = 0.0
    else:
        slope = slope_of(OPERANDS[3], OPERANDS[4], batch_id, head)
    return slope


@gluon.jit
def place_of_dq(PLACE, m_start, GIVEN, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """Where a block's share of dQ begins in rows of 32."""
    line, first, columns = statistics_place(PLACE[0], PLACE[1], PLACE[2], GIVEN[3], GIVEN[4])
    return (line * columns + first + m_start) * (TILE[0] // 32) + CONSUMER * TILE[0]


@gluon.jit
def in_register_order(dq, WIDTH: gl.constexpr):
    """A WGMMA accumulator (64, WIDTH) as (2 WIDTH, 32): the same registers, named so that each
    thread has runs of 16 bytes and eight threads 128 of them; ``bwd_convert`` undoes it."""
    x = gl.reshape(
        dq, [4, 2, 8, WIDTH // 8, 4, 2]
    )  # warp, half, row, block of columns, pair, parity
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [2 * WIDTH, 32])


@gluon.jit
def next_stage(st, parity, STAGES: gl.constexpr):
    """The next place of the ring. The loop carries them: of a count there would be an index for
    each shared address."""
    if STAGES == 2:
        return st ^ 1, parity ^ st
    else:
        last = st == STAGES - 1
        return gl.where(last, 0, st + 1), gl.where(last, parity ^ 1, parity)


@gluon.jit
def rows_of_stage(BUFFERS, st, BLOCK_D: gl.constexpr):
    """Q and dO of a place of the ring."""
    q = BUFFERS[0].index(st).reshape([ROWS, BLOCK_D])
    return q, BUFFERS[1].index(st).reshape([ROWS, BLOCK_D])


@gluon.jit
def issue_s(k, st, GIVEN, TILE: gl.constexpr):
    """S^T = K Q^T, in flight."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    q, _do = rows_of_stage(GIVEN[1], st, TILE[0])
    nothing = gl.full([64, ROWS], 0.0, gl.float32, s_layout)
    return warpgroup_mma(k, q.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def keys_of_warpgroup(keys, GIVEN, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """The warpgroup's half of K."""
    return GIVEN[1][2].index(keys + CONSUMER).reshape([64, TILE[0]])


@gluon.jit
def start_of_dp(delta, GIVEN, layout: gl.constexpr):
    """dP starts at -delta, unless dropout comes between them."""
    start = gl.full([64, ROWS], 0.0, gl.float32, layout)
    if GIVEN[5][5] is None:
        start = gl.broadcast(statistics(delta, ROWS, layout), start)[0]
    return start


@gluon.jit
def kept_by_dropout(m_start, GIVEN, PLACE, layout: gl.constexpr):
    """Z^T: 1 where dropout keeps a weight, else 0; it needs no scores and is ready before them."""
    dtype: gl.constexpr = GIVEN[0][0].dtype
    DROPOUT = GIVEN[5][5], GIVEN[5][6], PLACE[1], PLACE[0]
    like = gl.full([64, ROWS], 0.0, dtype, layout)
    return keep_factors_transposed(like, DROPOUT, m_start, PLACE[3])


@gluon.jit
def weights(x, lse, m_start, GIVEN, PLACE, cut, APPROX_TANH: gl.constexpr):
    """P^T of a block of rows from S^T, and the factor of softcap."""
    layout: gl.constexpr = x.type.layout
    OPERANDS = GIVEN[5]
    SCORE = (
        OPERANDS[0],
        OPERANDS[2],
        None if OPERANDS[3] is None else PLACE[6],
        None,
        None,
        0,
        0,
        None,
    )
    s, dcap = scores(x, m_start, PLACE[3], SCORE, PLACE[7], True, APPROX_TANH)
    if cut:
        i = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        j = PLACE[3] + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        s = hide(s, i[None, :], j[:, None], PLACE[7])
    return exp2(to_m(s, SCORE) - lse), dcap


@gluon.jit
def dq_of(ds_s, k_s, keys, bit, zero, CONSUMER: gl.constexpr, BLOCK_D: gl.constexpr):
    """dS K over both halves of the keys, in flight: half of dQ's columns for each warpgroup."""
    WIDTH: gl.constexpr = BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    k0 = k_s.index(keys + zero).reshape([64, BLOCK_D]).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    k1 = k_s.index(keys + 1 + zero).reshape([64, BLOCK_D]).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    nothing = gl.full([64, WIDTH], 0.0, gl.float32, layout)
    ds0 = ds_s.index(bit * 2).permute([1, 0])
    dq = warpgroup_mma(ds0, k0, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(ds_s.index(bit * 2 + 1).permute([1, 0]), k1, dq, is_async=True)
