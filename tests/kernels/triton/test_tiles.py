"""Ranges of tiles against ``core.mask``, programs, rows of sequences, loading and storing."""

import random
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from tilewise.core.mask import MaskSpec
from tilewise.kernels.triton.tiles import (
    clear_slack,
    key_blocks,
    keys_of,
    load_rows,
    row_blocks,
    rows_of,
    rows_of_sequence,
    source,
    store_rows,
    tile_of_program,
    visible,
)

BLOCK = 16


@triton.jit
def ranges_kernel(
    cases, found, ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    case = cases + tl.program_id(0) * 6
    start, stop = tl.load(case), tl.load(case + 1)
    left, right = tl.load(case + 4), tl.load(case + 5)
    MASK = tl.load(case + 2), tl.load(case + 3), left if LEFT else None, right if RIGHT else None
    if ROWS:
        first, last = rows_of(start, stop, MASK)
        b0, b1, b2, b3 = row_blocks(start, stop, MASK, BLOCK)
    else:
        first, last = keys_of(start, stop, MASK)
        b0, b1, b2, b3 = key_blocks(start, stop, MASK, BLOCK)
    out = found + tl.program_id(0) * 6
    tl.store(out, first)
    tl.store(out + 1, last)
    tl.store(out + 2, b0)
    tl.store(out + 3, b1)
    tl.store(out + 4, b2)
    tl.store(out + 5, b3)


def random_cases(rows, count=120):
    rng = random.Random(5)
    cases = []
    while len(cases) < count:
        sq, sk = (rng.choice([1, 5, 15, 16, 17, 31, 40, 64, 90]) for _ in range(2))
        start = rng.randrange(0, sk if rows else sq, BLOCK)
        stop = min(start + BLOCK, sk if rows else sq)
        sides = [rng.choice([0, 1, 7, 15, 16, 17, 33, 100, 2**30]) for _ in range(2)]
        cases.append((start, stop, sq, sk, *sides))
    return cases


@pytest.mark.parametrize("right", [False, True], ids=["", "right"])
@pytest.mark.parametrize("left", [False, True], ids=["", "left"])
@pytest.mark.parametrize("rows", [False, True], ids=["keys", "rows"])
def test_ranges_are_those_of_the_mask_and_whole_tiles_are_whole(rows, left, right):
    cases = random_cases(rows)
    found = torch.full((len(cases), 6), -1, dtype=torch.int32)
    ranges_kernel[(len(cases),)](
        torch.tensor(cases, dtype=torch.int32), found, rows, left, right, BLOCK
    )
    for case, (first, last, b0, b1, b2, b3) in zip(cases, found.tolist(), strict=True):
        start, stop, sq, sk, window_left, window_right = case
        mask = MaskSpec(window_left if left else None, window_right if right else None)
        want = (mask.rows_of if rows else mask.keys_of)(start, stop, sq, sk)
        assert (first, last) == want, case
        assert b0 <= b1 <= b2 <= b3, case
        assert all(b % BLOCK == 0 for b in (b0, b1, b2, b3)), case
        if first < last:
            assert b0 <= first and last <= b3 < last + BLOCK, case
        whole = []
        for block in range(b0, b3, BLOCK):
            tile, end = (block, block + BLOCK), sq if rows else sk
            own = (start, stop)
            seen = mask.covers(*(tile + own if rows else own + tile), sq, sk) and tile[1] <= end
            if seen:
                whole.append(block)
        assert whole == list(range(b1, b2, BLOCK)), (case, (b0, b1, b2, b3), whole)


@triton.jit
def visible_kernel(
    out, sq, sk, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    seen = visible(i, j, (sq, sk, left if LEFT else None, right if RIGHT else None))
    tl.store(out + i * BLOCK + j, seen.to(tl.int8))


@pytest.mark.parametrize("lengths", [(30, 30), (30, 11), (11, 30)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, None), (5, 2), (0, 0)], ids=str)
def test_visible_is_the_definition(window, lengths):
    (left, right), (sq, sk) = window, lengths
    got = torch.zeros(32, 32, dtype=torch.int8)
    visible_kernel[(1,)](
        got, sq, sk, left or 0, right or 0, left is not None, right is not None, 32
    )
    for i in range(sq):
        d = i + sk - sq
        for j in range(32):
            want = j < sk
            want = want and (left is None or j >= d - left)
            want = want and (right is None or j <= d + right)
            assert bool(got[i, j]) == want, (i, j)


@triton.jit
def programs_kernel(out, blocks, heads, section, sectioned, LAST: tl.constexpr):
    block, head = tile_of_program(tl.program_id(0), blocks, heads, section, LAST, sectioned)
    tl.store(out + tl.program_id(0) * 2, block)
    tl.store(out + tl.program_id(0) * 2 + 1, head)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sectioned", [None, 0, 1, 2])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 7, 1), (4, 6, 4), (5, 6, 6), (2, 5, 3)], ids=str)
def test_programs_meet_each_tile_once_and_long_ones_first_in_a_section(sizes, sectioned, last):
    blocks, heads, section = sizes
    alone = None if sectioned is None else min(sectioned, heads // section) * section
    out = torch.full((blocks * heads, 2), -1, dtype=torch.int32)
    programs_kernel[(blocks * heads,)](out, blocks, heads, section, alone, last)
    found = [tuple(x) for x in out.tolist()]
    assert sorted(found) == [(b, h) for b in range(blocks) for h in range(heads)]
    starts = list(range(0, heads if alone is None else alone, section))
    starts += [heads] if alone is None else [alone, heads]
    for first, stop in pairwise(starts):
        own = [b for b, h in found if first <= h < stop]
        assert own == sorted(own, reverse=last)
        assert {h for _, h in found[first * blocks : stop * blocks]} == set(range(first, stop))


@triton.jit
def sequences_kernel(out, cu, used, seqlen, total, USED: tl.constexpr):
    start, length, n = rows_of_sequence(tl.program_id(0), cu, used if USED else None, seqlen, total)
    out += tl.program_id(0) * 3
    tl.store(out, start)
    tl.store(out + 1, length)
    tl.store(out + 2, n)


BAD = [
    [0, 3, 10], [0, 100, 200], [-5, 4, 2**31 - 1], [8, 2, -7], [-(2**31), -1, 50], [12, 12, 12],
    [0, 2**31 - 1, -(2**31)],
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("used", [None, [2, 2], [-3, 10**6], [2**31 - 1, -(2**31)]], ids=str)
@pytest.mark.parametrize("bounds", BAD, ids=str)
def test_no_boundary_leads_outside_of_the_tensor(bounds, used, dtype):
    seqlen, total = 6, 12
    out = torch.full((2, 3), -1, dtype=torch.int64)
    given = torch.tensor(used or [0, 0], dtype=dtype)
    sequences_kernel[(2,)](
        out, torch.tensor(bounds, dtype=dtype), given, seqlen, total, used is not None
    )
    for b, (start, length, n) in enumerate(out.tolist()):
        assert 0 <= start <= total and 0 <= length <= seqlen and start + length <= total
        assert 0 <= n <= length
        begin, end = (min(max(x, 0), total) for x in bounds[b : b + 2])
        assert (start, length) == (begin, min(max(end - begin, 0), seqlen))
        assert n == (length if used is None else min(max(used[b], 0), length))


@triton.jit
def copy_kernel(
    x, y, x_strides, y_strides, batch_id, head, row, first, stop, end, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start = tl.zeros((), tl.int64)
    X = source(x, x_strides, batch_id, start, head, None, False)
    Y = source(y, y_strides, batch_id, start, head, None, False)
    tile = load_rows(X, row, first, stop, ROWS, HEAD_DIM, BLOCK_D, False, True)
    store_rows(Y, row, end, tile, ROWS, HEAD_DIM, BLOCK_D)


@pytest.mark.parametrize("width", [1, 5, 16])
@pytest.mark.parametrize(
    ("row", "first", "stop", "end"),
    [(0, 0, 20, 20), (16, 18, 19, 20), (16, 0, 17, 18), (0, 3, 9, 16)],
)
def test_rows_outside_are_read_as_zero_and_never_written(row, first, stop, end, width):
    x = torch.full((2, 40, 3, 2 * width), torch.nan)[:, ::2, :, ::2]
    x[1, first:stop, 2] = torch.randn(stop - first, width)
    y = torch.full((2, 24, 3, width), 77.0)
    copy_kernel[(1,)](x, y, x.stride(), y.stride(), 1, 2, row, first, stop, end, 16, width, 16)
    want = torch.full_like(y, 77.0)
    rows = range(row, min(row + 16, end))
    for r in rows:
        want[1, r, 2] = x[1, r, 2] if first <= r < stop else 0.0
    assert torch.equal(y, want)


@pytest.mark.parametrize("step", [2**23, 2**30])
@pytest.mark.parametrize("dim", [1, 3], ids=["row", "column"])
def test_a_tile_may_span_more_than_2_31_elements(dim, step):
    """C18: addresses alone, a few pages are touched."""
    count = 16 if step == 2**23 else 4
    shape = [1, 3, 1, 3]
    shape[dim] = count
    strides = [0, 4, 0, 1]
    strides[dim] = step
    if dim == 3:
        strides[1] = 1
    buffer = torch.empty((count - 1) * step + 64, dtype=torch.float16)
    x = buffer.as_strided(shape, strides)
    x.copy_(torch.randn(shape))
    y = torch.zeros(shape, dtype=torch.float16)
    copy_kernel[(1,)](
        x, y, x.stride(), y.stride(), 0, 0, 0, 0, shape[1], shape[1], 16, shape[3], 16
    )
    assert torch.equal(x, y)
    x.fill_(0)
    copy_kernel[(1,)](
        y, x, y.stride(), x.stride(), 0, 0, 0, 0, shape[1], shape[1], 16, shape[3], 16
    )
    assert torch.equal(x, y)


@triton.jit
def slack_kernel(x, strides, cu, batch, blocks, total, WIDTH: tl.constexpr):
    block, batch_id = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    clear_slack(x, strides, batch_id, batch, 0, block, blocks, cu, total, 16, WIDTH, 16)


@pytest.mark.parametrize("end", [-3, 0, 1, 37, 99, 100, 10**6])
@pytest.mark.parametrize("blocks", [1, 3])
def test_slack_is_cleared_by_the_last_sequence_alone_and_nothing_else_is(blocks, end):
    x = torch.full((110, 1, 5), 7.0)
    cu = torch.tensor([0, 10, end], dtype=torch.int32)
    slack_kernel[(2 * blocks,)](x, (0, 5, 5, 1), cu, 2, blocks, 100, 5)
    want = torch.full_like(x, 7.0)
    want[min(max(end, 0), 100) : 100] = 0
    assert torch.equal(x, want)
