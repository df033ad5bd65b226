"""delta and lse as the backward's loops read them."""

import math
from itertools import pairwise

import pytest
import torch

from tilewise.backends.base import AttentionTensors
from tilewise.backends.triton import bwd, launch
from tilewise.kernels.triton.tiles import STATISTICS_BLOCK
from tilewise.ops.schema import Scalars, describe

from .tools import NAN, draw, guarded_memory

BLOCK = int(STATISTICS_BLOCK)
INF = math.inf


def statistics(q, dout, out, lse, dlse=None, bias=None, bounds=None, used=None, longest=None):
    """lse, its parts added in float64, and delta: (heads or batch * heads, padded rows)."""
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    seqused = None if used is None else torch.tensor(used, dtype=torch.int32)
    t = AttentionTensors(
        q, q, q, bias, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=seqused, seqused_k=seqused
    )
    length = q.shape[1] if longest is None else longest
    s = Scalars(length, length, 0.0, 0.25, 0.0, -1, -1, False, "triton", "fa2")
    problem = describe(t, s, needs_grad=True)
    lse_padded, delta = (make() for make in bwd.statistics(problem, q))
    dlse = None if dlse is None else dlse.contiguous()
    call = dict(zip(bwd.GIVEN, (*t, out, lse, dout, dlse), strict=True))
    call |= {"lse_padded": lse_padded, "delta": delta}
    for one in bwd.preprocess(problem, call):
        one(call)
    parts = lse_padded.double().unflatten(0, (-1, delta.shape[0]))
    assert parts.shape[0] == (2 if launch.natural(problem) else 1)
    return parts.sum(0), delta


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_dense(length, dtype, with_dlse, with_bias):
    out, dout, q = (draw(2, length, 3, 24, seed=s, dtype=dtype) for s in range(3))
    dout = torch.stack([dout, dout * NAN], -1)[..., 0]  # of other strides than out
    # natural, beside a bias and in float32, lse comes in float64, and none of its digits is lost
    natural = with_bias or dtype == torch.float32
    lse = draw(2, 3, length, seed=4, dtype=torch.float64 if natural else torch.float32)
    exact = 1e-12 if natural else 1e-6
    lse[1, 2, 0] = -INF
    dlse = draw(3, 2, length, seed=5).transpose(0, 1) if with_dlse else None
    bias = torch.zeros(1, 1, 1, 1) if with_bias else None
    with guarded_memory():
        got_lse, got_delta = statistics(q, dout, out, lse, dlse, bias)
    want = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    if dlse is not None:
        want = want - dlse
    want[1, 2, 0] = 0
    unit = 1.0 if natural else math.log2(math.e)
    wanted_lse = (lse.double() * unit).masked_fill(lse == -INF, INF)
    rows = got_delta.unflatten(0, (2, 3))
    torch.testing.assert_close(rows[..., :length].double(), want, rtol=1e-5, atol=1e-5)
    assert (rows[..., length:] == 0).all()
    rows = got_lse.unflatten(0, (2, 3))
    torch.testing.assert_close(rows[..., :length].double(), wanted_lse, rtol=exact, atol=exact)
    assert (rows[..., length:] == INF).all()


@pytest.mark.parametrize("used", [None, [40, 0, 1, 3]], ids=["all", "seqused"])
def test_packed(used):
    bounds = [0, BLOCK + 7, BLOCK + 7, BLOCK + 9, BLOCK + 20]
    total = bounds[-1] + 5
    out, dout, q = (draw(total, 2, 16, seed=s) for s in range(3))
    lse = draw(2, total, seed=4)
    used_rows = used or [b - a for a, b in pairwise(bounds)]
    hidden = torch.ones(total, dtype=torch.bool)
    for start, n in zip(bounds, used_rows, strict=False):
        hidden[start : start + n] = False
    for x in (out, dout):
        x[hidden] = NAN
    lse[:, hidden] = NAN
    with guarded_memory():
        got_lse, got_delta = statistics(
            q, dout, out, lse, bounds=bounds, used=used, longest=BLOCK + 7
        )
    want = (out.double() * dout.double()).sum(-1).T
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        first, rows = (start // BLOCK + n) * BLOCK, used_rows[n]
        padded = -(-(stop - start) // BLOCK) * BLOCK
        own, own_lse = got_delta[:, first : first + padded], got_lse[:, first : first + padded]
        wanted = want[:, start : start + rows]
        torch.testing.assert_close(own[:, :rows].double(), wanted, rtol=1e-5, atol=1e-5)
        assert (own[:, rows:] == 0).all() and (own_lse[:, rows:] == INF).all()
        wanted = lse[:, start : start + rows].double()
        torch.testing.assert_close(own_lse[:, :rows].double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "bounds", [[0, 10**6, 60], [-5, 70, 60], [50, 20, 60], [0, 0, 0], [70, 70, 70]], ids=str
)
def test_boundaries_that_lead_outside_or_overlap_write_nothing_outside(bounds):
    out, dout, q = (draw(70, 2, 16, seed=s) for s in range(3))
    with guarded_memory():
        statistics(q, dout, out, draw(2, 70, seed=4), bounds=bounds, longest=2 * BLOCK)
