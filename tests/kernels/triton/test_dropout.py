"""The mask of one tile, bit by bit, against ``formats.philox``."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.formats.philox import keep_mask, threshold
from tilewise.kernels.triton.dropout import kept, kept_transposed


@triton.jit
def kept_kernel(
    out, seed, threshold, head, batch, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    keep = kept((seed, threshold, head, batch), m, n, BLOCK_M, BLOCK_N)
    i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + i * BLOCK_N + j, keep.to(tl.int8))


@triton.jit
def kept_transposed_kernel(
    out, seed, threshold, head, batch, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    keep = kept_transposed((seed, threshold, head, batch), m, n, BLOCK_M, BLOCK_N)
    i, j = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
    tl.store(out + i * BLOCK_N + j, keep.to(tl.int8))


SEEDS = (0, 1, 2**31, 2**32 + 5, 1234567890123, -1, -(2**63), 2**63 - 1)


@pytest.mark.parametrize("kernel", [kept_kernel, kept_transposed_kernel], ids=["", "transposed"])
@pytest.mark.parametrize("block", [(16, 16), (32, 16), (16, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_element_is_kept_or_dropped_as_defined(seed, block, kernel):
    for place in ((0, 0, 0, 0), (64, 32, 3, 5), (4096, 16, 70, 65539), (2**20, 2**21, 1, 0)):
        m, n, head, batch = place
        got = torch.full(block, -1, dtype=torch.int8)
        kernel[(1,)](got, torch.tensor([seed]), threshold(0.4), head, batch, m, n, *block)
        want = keep_mask(
            seed,
            0.4,
            batches=range(batch, batch + 1),
            heads=range(head, head + 1),
            rows=range(m, m + block[0]),
            cols=range(n, n + block[1]),
        )[0, 0]
        assert torch.equal(got.bool(), want), place


@pytest.mark.parametrize("p", [2.0**-17, 1e-4, 0.5, 0.9, 1 - 2.0**-16])
def test_thresholds_from_none_to_almost_all(p):
    got = torch.full((64, 64), -1, dtype=torch.int8)
    kept_kernel[(1,)](got, torch.tensor([7]), threshold(p), 0, 0, 0, 0, 64, 64)
    one = range(1)
    want = keep_mask(7, p, batches=one, heads=one, rows=range(64), cols=range(64))[0, 0]
    assert torch.equal(got.bool(), want)
    assert abs(float(got.float().mean()) - (1 - p)) < 0.03
