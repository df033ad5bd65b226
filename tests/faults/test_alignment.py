"""Which corner the diagonal ends in, and how far a window reaches: C02, C03, C06."""

import math

import pytest
import torch

from .tools import (
    CROSS,
    F64,
    INF,
    SELF,
    all_empty,
    all_zero,
    band_mask,
    check,
    expected,
    near,
    noted,
    plain_twin,
    rand,
    run,
    zeros,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("entry", CROSS)
def test_c02_more_queries_than_keys_under_causal(entry, backend, dtype):
    """C02 Dao-AILab/flash-attention#1778: loop bounds from a negative seqlen_k - seqlen_q."""
    q = zeros(1, 5, 1, 4, dtype=dtype)
    k, v = rand(1, 2, 1, 4, seed=1, dtype=dtype), rand(1, 2, 1, 4, seed=2, dtype=dtype)
    got = run(entry, backend, q, k, v, causal=True)
    assert all_zero(got["out"][0, :3])
    near(got["out"][0, 3], v[0, 0].double(), dtype)
    near(got["out"][0, 4], v[0].double().mean(0), dtype)
    near(got["lse"][0, 0], [-INF, -INF, -INF, 0.0, math.log(2)], dtype, "lse")
    assert all_zero(got["dq"][0, :3])
    near(got["dv"][0, :, 0], torch.tensor([[1.5], [0.5]]).expand(2, 4), dtype, "dv")
    check(got, q, k, v, seen=band_mask(5, 2, -1, 0))


@pytest.mark.parametrize("entry", CROSS)
def test_c03_fewer_queries_than_keys_end_in_the_bottom_right_corner(entry, backend, dtype):
    """C03 pytorch/pytorch#108108: a decode step must see the whole past, not its first key."""
    q = zeros(1, 2, 1, 4, dtype=dtype)
    k, v = rand(1, 5, 1, 4, seed=3, dtype=dtype), rand(1, 5, 1, 4, seed=4, dtype=dtype)
    got = run(entry, backend, q, k, v, causal=True)
    near(got["out"][0, 0], v[0, :4].double().mean(0), dtype)
    near(got["out"][0, 1], v[0].double().mean(0), dtype)
    near(got["lse"][0, 0], [math.log(4), math.log(5)], dtype, "lse")
    weights = [9 / 20] * 4 + [1 / 5]
    near(got["dv"][0, :, 0], torch.tensor(weights, dtype=F64)[:, None].expand(5, 4), dtype, "dv")
    check(got, q, k, v, seen=band_mask(2, 5, -1, 0))


@pytest.mark.parametrize("entry", ["dense", "varlen_kvpacked"])
@pytest.mark.parametrize("sizes", [(257, 129), (129, 257), (600, 530), (530, 600)], ids=str)
def test_c02_causal_of_unequal_lengths_across_tiles(entry, sizes, backend, dtype):
    """C02, across tiles: zero queries average the keys up to the diagonal."""
    sq, sk = sizes
    q = zeros(1, sq, 1, 4, dtype=dtype)
    k, v = rand(1, sk, 1, 4, seed=1, dtype=dtype), rand(1, sk, 1, 4, seed=2, dtype=dtype)
    got = run(entry, backend, q, k, v, causal=True)
    visible = (torch.arange(sq) + sk - sq + 1).clamp(min=0)
    hidden = visible == 0
    assert all_zero(got["out"][0, hidden]) and all_empty(got["lse"][0, 0, hidden])
    assert all_zero(got["dq"][0, hidden])
    means = v.double()[0, :, 0].cumsum(0) / torch.arange(1, sk + 1)[:, None]
    seen = torch.arange(sk)[None, :] < visible[:, None]
    plain = plain_twin(q, k, v, seen=seen)
    some = ~hidden
    near(got["out"][0, some, 0], means[visible[some] - 1], dtype, "out", plain["out"][0, some, 0])
    near(got["lse"][0, 0, some], visible[some].double().log(), dtype, "lse")
    shares = (seen / visible.clamp(min=1)[:, None].double()).sum(0)
    shares = shares[:, None].expand(sk, 4)
    near(got["dv"][0, :, 0], shares, dtype, "dv", plain["dv"][0, :, 0])


@pytest.mark.parametrize("entry", ["dense", "varlen"])
@pytest.mark.parametrize("window", [(7, 3), (300, 0), (-1, 40), (40, -1)], ids=str)
@pytest.mark.parametrize("sizes", [(600, 530), (530, 600)], ids=str)
def test_c02_windows_of_unequal_lengths_across_tiles(entry, sizes, window, backend):
    """C02, across tiles, with scores that differ and both window sides."""
    sq, sk = sizes
    q, k, v = rand(1, sq, 2, 8, seed=1), rand(1, sk, 1, 8, seed=2), rand(1, sk, 1, 8, seed=3)
    got = run(entry, backend, q, k, v, window_size=window)
    seen = band_mask(sq, sk, *window)
    hidden = ~seen.any(1)
    assert all_zero(got["out"][0, hidden]) and all_empty(got["lse"][0, :, hidden])
    assert all_zero(got["dq"][0, hidden])
    unseen = ~seen.any(0)
    assert all_zero(got["dk"][0, unseen]) and all_zero(got["dv"][0, unseen])
    check(got, q, k, v, seen=seen)


SIDES = (5, 6, 100, 2**31 - 1, 2**31, 2**63 - 1, 2**70)


@pytest.mark.parametrize("entry", CROSS)
def test_c06_a_window_side_wider_than_everything_hides_nothing(entry, backend, dtype):
    """C06 Dao-AILab/flash-attention#895: an over-wide side clipped wrongly, or overflowing."""
    for side in SIDES:
        with noted(side):
            k, v = rand(1, 2, 1, 4, seed=1, dtype=dtype), rand(1, 2, 1, 4, seed=2, dtype=dtype)
            q = rand(1, 6, 1, 4, seed=3, dtype=dtype)
            for window in ((-1, side), (side, -1), (side, side)):
                got = run(entry, backend, q, k, v, window_size=window)
                check(got, q, k, v)
            q, k, v = (
                k,
                rand(1, 6, 1, 4, seed=4, dtype=dtype),
                rand(1, 6, 1, 4, seed=5, dtype=dtype),
            )
            for window in ((-1, side), (side, -1), (side, side)):
                got = run(entry, backend, q, k, v, window_size=window)
                check(got, q, k, v)


@pytest.mark.parametrize("side", [2**31 - 1, 2**63 - 1, 2**70])
def test_c06_one_side_near_and_the_other_without_end(side, backend):
    """C06: the far side overflows while the near side needs the mask."""
    q, k, v = (rand(1, s, 1, 4, seed=s) for s in (5, 7, 7))
    for window, plain in (((0, side), (0, -1)), ((side, 0), (-1, 0)), ((side, 1), (-1, 1))):
        got = run("dense", backend, q, k, v, window_size=window)
        check(got, q, k, v, seen=band_mask(5, 7, *plain))


@pytest.mark.parametrize("entry", CROSS)
def test_c06_a_right_side_that_hides_one_pair(entry, backend, dtype):
    """C06: 6 queries, 2 keys: right = 4 hides key 1 from row 0; (0, 0) is the diagonal."""
    q = zeros(1, 6, 1, 4, dtype=dtype)
    k, v = rand(1, 2, 1, 4, seed=1, dtype=dtype), rand(1, 2, 1, 4, seed=2, dtype=dtype)
    got = run(entry, backend, q, k, v, window_size=(-1, 4))
    near(got["out"][0, 0], v[0, 0].double(), dtype)
    near(got["out"][0, 1:], v[0].double().mean(0).expand(5, 1, 4), dtype)
    near(got["dv"][0, :, 0], torch.tensor([[3.5], [2.5]]).expand(2, 4), dtype, "dv")
    got = run(entry, backend, q, k, v, window_size=(0, 0))
    assert all_zero(got["out"][0, :4]) and all_empty(got["lse"][0, 0, :4])
    assert all_zero(got["dq"][0, :4])
    near(got["out"][0, 4:], v[0].double(), dtype)
    near(got["lse"][0, 0, 4:], [0.0, 0.0], dtype, "lse")
    near(got["dv"][0], torch.ones(2, 1, 4), dtype, "dv")


@pytest.mark.parametrize("entry", SELF)
def test_c06_causal_sets_the_right_side_to_zero(entry, backend):
    """C06: causal with a window keeps the left side and is no contradiction."""
    q, k, v = (rand(1, 9, 2, 8, seed=s) for s in (1, 2, 3))
    got = run(entry, backend, q, k, v, causal=True, window_size=(3, 5))
    check(got, q, k, v, seen=band_mask(9, 9, 3, 0))


def test_the_mask_by_hand_is_the_definition():
    assert band_mask(2, 3, 0, 0).tolist() == [[False, True, False], [False, False, True]]
    assert band_mask(3, 2, -1, 0).tolist() == [[False, False], [True, False], [True, True]]
    assert band_mask(2, 3, -1, -1).all()
    right = expected(zeros(1, 2, 1, 4), zeros(1, 3, 1, 4), torch.ones(1, 3, 1, 4, dtype=F64))
    assert torch.equal(right["out"], torch.ones(1, 2, 1, 4, dtype=F64))
