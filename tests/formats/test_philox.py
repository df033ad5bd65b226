"""Dropout's numbers: Random123's known answers, the layout element by element, tiles, rate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.formats.philox import keep_mask, philox4x32, threshold

# kat_vectors of Random123: philox4x32 7, counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def slow_philox(counter, key):
    """Philox4x32-7 in Python integers, from the paper."""
    x, k = list(counter), list(key)
    for _ in range(7):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(b >> 32) ^ x[1] ^ k[0], b % 2**32, (a >> 32) ^ x[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(x)


def slow_keep(seed, p, batch, head, row, col):
    """One element of the mask, by the layout that formats.philox states."""
    counter = (8 * (row // 16) + row % 8, 4 * (col // 16) + (col % 8) // 2, head, batch)
    words = slow_philox(counter, (seed % 2**32, (seed >> 32) % 2**32))
    lanes = [half for w in words for half in (w % 65536, w // 65536)]
    return lanes[4 * (row % 16 // 8) + 2 * (col % 16 // 8) + col % 2] >= round(p * 65536)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers_of_random123(counter, key, result):
    words = philox4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) for w in words) == result
    assert slow_philox(counter, key) == result


@given(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
def test_any_counter_and_key(counter, key):
    words = philox4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) for w in words) == slow_philox(counter, key)


spans = st.tuples(st.integers(0, 70), st.integers(0, 40)).map(lambda t: range(t[0], t[0] + t[1]))


@settings(max_examples=15)
@given(st.integers(-(2**63), 2**64 - 1), st.sampled_from([0.0, 0.1, 0.5, 0.999]), spans, spans)
def test_tiles_are_the_layout_element_by_element(seed, p, rows, cols):
    batches, heads = range(3, 5), range(1, 3)
    got = keep_mask(seed, p, batches=batches, heads=heads, rows=rows, cols=cols)
    assert got.dtype == torch.bool and got.shape == (2, 2, len(rows), len(cols))
    want = [
        [[[slow_keep(seed, p, b, h, i, j) for j in cols] for i in rows] for h in heads]
        for b in batches
    ]
    assert got.tolist() == want


@given(spans, spans, st.integers(0, 2), st.integers(0, 3))
def test_a_tile_is_the_slice_of_the_whole(rows, cols, batch, head):
    whole = keep_mask(9, 0.4, batches=range(3), heads=range(4), rows=range(120), cols=range(120))
    tile = keep_mask(
        9, 0.4, batches=range(batch, batch + 1), heads=range(head, head + 1), rows=rows, cols=cols
    )
    want = whole[batch, head, rows.start : rows.stop, cols.start : cols.stop]
    assert torch.equal(tile[0, 0], want)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_rate(p):
    n = 1024
    kept = keep_mask(1, p, batches=range(1), heads=range(2), rows=range(n), cols=range(n))
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float((~kept).float().mean()) - p) <= 4 * deviation + 1e-5


def test_thresholds():
    assert [threshold(p) for p in (0.0, 0.5, 1 / 65536, 0.3)] == [0, 32768, 1, 19661]


def test_every_part_of_the_position_and_of_the_seed_counts():
    one = {"batches": range(1), "heads": range(1), "rows": range(64), "cols": range(64)}
    base = keep_mask(5, 0.5, **one)
    for changed in (
        {"batches": range(1, 2)},
        {"heads": range(1, 2)},
        {"rows": range(64, 128)},
        {"cols": range(64, 128)},
    ):
        assert abs(float((keep_mask(5, 0.5, **one | changed) ^ base).float().mean()) - 0.5) < 0.05
    for seed in (6, 5 + 2**32, -5, 5 - 2**63):
        assert abs(float((keep_mask(seed, 0.5, **one) ^ base).float().mean()) - 0.5) < 0.05


def test_negative_seeds_are_their_64_bits():
    one = {"batches": range(1), "heads": range(1), "rows": range(32), "cols": range(32)}
    assert torch.equal(keep_mask(-3, 0.5, **one), keep_mask(2**64 - 3, 0.5, **one))


def test_elements_are_not_correlated_with_their_neighbours():
    kept = keep_mask(3, 0.5, batches=range(1), heads=range(1), rows=range(512), cols=range(512))[
        0, 0
    ]
    signs = kept.double() * 2 - 1
    for rows, cols in ((0, 1), (1, 0), (8, 0), (0, 8), (0, 2), (16, 0), (8, 8)):
        pairs = signs[: 512 - rows, : 512 - cols] * signs[rows:, cols:]
        assert abs(float(pairs.mean())) < 5 / 512
