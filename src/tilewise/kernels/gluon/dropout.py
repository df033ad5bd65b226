"""Dropout of a score tile in WGMMA's order: ``kernels.triton.dropout``, drawn where it is used."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton import dropout as triton_dropout
from ..triton import pairs
from .twins import twin

philox = twin(triton_dropout.philox)
factors = twin(pairs.factors)
marked = twin(pairs.marked)
positive = twin(pairs.positive)


@gluon.jit
def _words(p, DROPOUT, m_start, n_start, SHIFTED: gl.constexpr):
    """The word in which an element of p, (64, BLOCK_N), has its lane; p begins at (m_start,
    n_start), multiples of 16. Of two neighbours the first has the lower lane, which lies in the
    upper half too if ``SHIFTED``.

    A draw serves the eight elements of a thread in a block of 16 x 16: two rows, two halves of the
    columns, two neighbours.
    """
    layout: gl.constexpr = p.type.layout
    ROWS: gl.constexpr = p.shape[0] // 16
    COLUMNS: gl.constexpr = p.shape[1] // 16
    # row block, half, row; column block, half, pair, parity: how p lies, of which one element
    # stands for a draw's eight
    parts = gl.permute(gl.reshape(p, [ROWS, 2, 8, COLUMNS, 2, 4, 2]), [0, 2, 3, 5, 1, 4, 6])
    whole: gl.constexpr = gl.split(gl.split(gl.split(parts)[0])[0])[0].type.layout
    of_012: gl.constexpr = gl.SliceLayout(3, whole)
    of_01: gl.constexpr = gl.SliceLayout(2, of_012)
    of_23: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, whole))
    row_block = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_01))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, of_01))
    c0 = m_start // 2 + 8 * row_block[:, None] + row[None, :]
    column_block = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, of_23))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, of_23))
    c1 = n_start // 4 + 4 * column_block[:, None] + pair[None, :]
    w00, w01, w10, w11 = philox(
        DROPOUT, c0[:, :, None][:, :, :, None], c1[None, :, :][None, :, :, :]
    )
    words = gl.join(gl.join(w00, w10), gl.join(w01, w11))  # half of rows, half of columns
    words = gl.join(words << 16 if SHIFTED else words, words)
    words = gl.reshape(gl.permute(words, [0, 4, 1, 2, 5, 3, 6]), p.shape)
    return gl.convert_layout(words, layout, assert_trivial=True)


@gluon.jit
def kept(p, DROPOUT, m_start, n_start):
    """Which elements of p, (64, BLOCK_N), at (m_start, n_start), multiples of 16, stay."""
    t = gl.cast(DROPOUT[1], gl.uint32) << 16
    return _words(p, DROPOUT, m_start, n_start, True) >= t


@gluon.jit
def keep_factors(p, DROPOUT, m_start, n_start):
    """1 where an element stays, else 0, for p in half precision: a factor for ``pairs.times``."""
    return factors(p, _words(p, DROPOUT, m_start, n_start, False), DROPOUT)


# A thread and the one four lanes on have one pair of columns and two rows of each pair. Each draws
# for one of the rows; what they exchange are the lanes of two words, which make one.
_EXCHANGE: gl.constexpr = gl.constexpr(
    "{ .reg .b32 x, y, a, b, c; prmt.b32 x, $4, $5, $8; prmt.b32 y, $6, $7, $8; "
    "shfl.sync.bfly.b32 x, x, 4, 0x1f, 0xffffffff; shfl.sync.bfly.b32 y, y, 4, 0x1f, 0xffffffff; "
    "prmt.b32 a, $4, x, $9; prmt.b32 b, $5, x, $10; prmt.b32 c, $6, y, $9; "
    "prmt.b32 $3, $7, y, $10; mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; }"
)


@gluon.jit
def _exchange(w00, w01, w10, w11, odd):
    """Of words drawn by a thread of an even key for the first row of a pair, by one of an ``odd``
    key for the second: its key's lanes of both rows, the first in the lower half."""
    theirs = gl.where(odd, 0x5410, 0x7632)
    first = gl.where(odd, 0x3254, 0x5410)
    second = gl.where(odd, 0x3276, 0x7610)
    return gl.inline_asm_elementwise(
        _EXCHANGE, "=r,=r,=r,=r,r,r,r,r,r,r,r", [w00, w01, w10, w11, theirs, first, second],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def keep_factors_transposed(p, DROPOUT, m_start, n_start):
    """``keep_factors`` for p transposed, (keys, rows), at (n_start, m_start).

    A thread holds one column of each pair, so that two threads share the draws of both.
    """
    layout: gl.constexpr = p.type.layout
    COLUMNS: gl.constexpr = p.shape[0] // 16
    ROWS: gl.constexpr = p.shape[1] // 16
    # key block, half, key; row block, half, pair, parity
    parts = gl.permute(gl.reshape(p, [COLUMNS, 2, 8, ROWS, 2, 4, 2]), [0, 2, 3, 5, 1, 4, 6])
    whole: gl.constexpr = gl.split(gl.split(gl.split(parts)[0])[0])[0].type.layout
    of_01: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, whole))
    of_23: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, whole))
    key_block = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, of_01))[:, None]
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, of_01))[None, :]
    row_block = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_23))[:, None]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, of_23))[None, :]
    parity = (key % 2 + 0 * key_block)[:, :, None][:, :, :, None]
    c0 = (m_start // 2 + 8 * row_block + 2 * pair)[None, :, :][None, :, :, :] + parity
    c1 = (n_start // 4 + 4 * key_block + key // 2)[:, :, None][:, :, :, None]
    w00, w01, w10, w11 = philox(DROPOUT, c0, c1)
    odd = gl.broadcast(parity == 1, w00 == w00)[0]
    w00, w01, w10, w11 = _exchange(w00, w01, w10, w11, odd)
    words = gl.join(gl.join(w00, w10), gl.join(w01, w11))  # half of rows, half of keys
    words = gl.permute(gl.join(words, words), [0, 5, 1, 2, 4, 3, 6])
    words = gl.convert_layout(gl.reshape(words, p.shape), layout, assert_trivial=True)
    return factors(p, words, DROPOUT)


@gluon.jit
def ds_of_marked(p, dp, minus_delta):
    """dS = P (Z dP - delta) in float32, of P as ``marked`` leaves it."""
    return gl.maximum(p, 0.0) * dp + gl.abs(p) * minus_delta
