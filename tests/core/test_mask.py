"""MaskSpec's formulas against brute force over every row and key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.mask import MaskSpec

lengths = st.integers(0, 12)
sides = st.one_of(st.none(), st.integers(0, 14))
masks = st.builds(MaskSpec, sides, sides)


def sees(mask, i, j, sq, sk):
    d = i + sk - sq
    return (mask.window_left is None or j >= d - mask.window_left) and (
        mask.window_right is None or j <= d + mask.window_right
    )


@st.composite
def tiles(draw, length):
    start = draw(st.integers(0, length - 1))
    return start, draw(st.integers(start + 1, length))


@st.composite
def row_tiles(draw):
    sq, sk = draw(st.integers(1, 12)), draw(lengths)
    return sq, sk, *draw(tiles(sq))


@given(masks, row_tiles())
def test_keys_of_is_the_smallest_range_of_keys_that_the_rows_see(mask, tile):
    sq, sk, m0, m1 = tile
    seen = [j for j in range(sk) if any(sees(mask, i, j, sq, sk) for i in range(m0, m1))]
    start, stop = mask.keys_of(m0, m1, sq, sk)
    assert 0 <= start <= stop <= sk
    assert list(range(start, stop)) == seen


@given(masks, row_tiles())
def test_rows_of_is_the_smallest_range_of_rows_that_see_the_keys(mask, tile):
    sk, sq, n0, n1 = tile
    seeing = [i for i in range(sq) if any(sees(mask, i, j, sq, sk) for j in range(n0, n1))]
    start, stop = mask.rows_of(n0, n1, sq, sk)
    assert 0 <= start <= stop <= sq
    assert list(range(start, stop)) == seeing


@st.composite
def both_tiles(draw):
    sq, sk = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return sq, sk, *draw(tiles(sq)), *draw(tiles(sk))


@given(masks, both_tiles())
def test_covers_says_whether_every_row_of_a_tile_sees_every_key(mask, tile):
    sq, sk, m0, m1, n0, n1 = tile
    every = all(sees(mask, i, j, sq, sk) for i in range(m0, m1) for j in range(n0, n1))
    assert mask.covers(m0, m1, n0, n1, sq, sk) == every


@pytest.mark.parametrize(
    ("given_", "left", "right"),
    [
        ((-1, -1), None, None),
        ((0, 0), 0, 0),
        ((-1, 0), None, 0),
        ((3, -1), 3, None),
        ((2, 5), 2, 5),
    ],
)
def test_from_window_reads_minus_one_as_without_limit(given_, left, right):
    assert MaskSpec.from_window(*given_) == MaskSpec(left, right)


def test_windows_as_wide_as_integers_go_hide_nothing():
    far = MaskSpec(2**31 - 1, 2**31 - 1)
    assert far.covers(0, 1000, 0, 3, 1000, 3) and far.keys_of(0, 1000, 1000, 3) == (0, 3)
