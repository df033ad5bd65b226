"""Dropout of a score tile in WGMMA's order: ``kernels.triton.dropout``, drawn where it is used."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton import dropout as triton_dropout
from .twins import twin

factors = twin(triton_dropout.factors)
times = twin(triton_dropout.times)
philox = twin(triton_dropout.philox)


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
    """1 where kept, else 0, for p in half precision, which ``times`` multiplies."""
    return factors(p, _words(p, DROPOUT, m_start, n_start, False), DROPOUT)


@gluon.jit
def _turn(p, keep):
    return p * gl.where(keep, 1.0, -1.0)


@gluon.jit
def sign_transposed(p, DROPOUT, m_start, n_start):
    """p, (keys, rows), not negative, with a minus where dropped; begins at multiples of 16.

    A thread holds one column of each pair, so that a draw serves four of its elements: two halves
    of the rows, two halves of the keys.
    """
    layout: gl.constexpr = p.type.layout
    COLUMNS: gl.constexpr = p.shape[0] // 16
    ROWS: gl.constexpr = p.shape[1] // 16
    # key block, half, key; row block, half, pair, parity
    parts = gl.reshape(p, [COLUMNS, 2, 8, ROWS, 2, 4, 2])
    parts = gl.permute(parts, [0, 2, 3, 5, 6, 1, 4])
    upper, lower = gl.split(parts)  # halves of rows
    upper0, upper1 = gl.split(upper)  # halves of keys
    lower0, lower1 = gl.split(lower)

    whole: gl.constexpr = upper0.type.layout  # key block, key, row block, pair, parity
    of_0123: gl.constexpr = gl.SliceLayout(4, whole)
    of_01: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, of_0123))
    of_234: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, whole))
    of_23: gl.constexpr = gl.SliceLayout(2, of_234)
    key_block = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, of_01))[:, None]
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, of_01))[None, :]
    row_block = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_23))[:, None]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, of_23))[None, :]
    parity = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, of_234)))
    c0 = (m_start // 2 + 8 * row_block + 2 * pair)[:, :, None] + parity[None, :][None, :, :]
    c1 = (n_start // 4 + 4 * key_block + key // 2)[:, :, None][:, :, :, None][:, :, :, :, None]
    w00, w01, w10, w11 = philox(DROPOUT, c0[None, :, :, :][None, :, :, :, :], c1)

    # the half of each word that is the key's own, in its upper half
    shift = ((1 - key % 2) * 16 + 0 * key_block).to(gl.uint32)
    shift = shift[:, :, None][:, :, :, None][:, :, :, :, None]
    t = gl.cast(DROPOUT[1], gl.uint32) << 16
    upper = gl.join(_turn(upper0, (w00 << shift) >= t), _turn(upper1, (w01 << shift) >= t))
    lower = gl.join(_turn(lower0, (w10 << shift) >= t), _turn(lower1, (w11 << shift) >= t))
    parts = gl.permute(gl.join(upper, lower), [0, 5, 1, 2, 6, 3, 4])
    return gl.convert_layout(gl.reshape(parts, p.shape), layout, assert_trivial=True)
