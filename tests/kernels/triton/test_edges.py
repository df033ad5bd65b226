"""Calls of nothing, hidden NaN under softcap, and sinks that float32 rounds."""

import pytest
import torch

from tilewise import testing

from .tools import draw

ENGINES = [{"backend": "triton", "algorithm": name} for name in ("fa2", "fa1")]


@pytest.fixture(params=ENGINES, ids=lambda e: e["algorithm"])
def kernels(request):
    return request.param


def run(kernels, **inputs):
    with testing.poisoned_memory():
        got = testing.run(**inputs, **kernels)
    assert not any(x.isnan().any() for _, x in got.items())
    return got


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hidden_key_under_softcap_may_hold_anything(value, kernels):
    given = {n: draw(1, 9, 2, 16, seed=i) for i, n in enumerate("qkv")}
    sees = torch.ones(9, 9, dtype=torch.bool)
    sees[:, 4] = False
    given |= {"attn_bias": sees, "softcap": 3.0}
    want = run(kernels, **given)
    given["k"][0, 4] = given["v"][0, 4] = value
    got = run(kernels, **given)
    for name, x in got.items():
        assert torch.equal(x, getattr(want, name)), name


def test_packed_calls_without_keys_write_every_row(kernels):
    q, k, v = (draw(5, 2, 16, seed=s) for s in range(3))
    got = run(
        kernels, q=q, k=k, v=v, cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32),
        cu_seqlens_k=torch.zeros(3, dtype=torch.int32), max_seqlen_q=2, max_seqlen_k=0,
    )  # fmt: skip
    assert all((x == 0).all() for n, x in got.items() if n != "lse")


def test_packed_calls_of_no_sequence(kernels):
    q, k, v = (draw(5, 2, 16, seed=s) for s in range(3))
    none = torch.zeros(1, dtype=torch.int32)
    got = run(
        kernels, q=q, k=k, v=v, cu_seqlens_q=none, cu_seqlens_k=none, max_seqlen_q=3,
        max_seqlen_k=3, attn_bias=draw(2, 5, 3, seed=4), sink=draw(2, seed=5),
    )  # fmt: skip
    assert all((x == 0).all() for n, x in got.items() if n != "lse")


def test_a_batch_of_none(kernels):
    q, k, v = (draw(0, 3, 2, 16, seed=s) for s in range(3))
    got = run(kernels, q=q, k=k, v=v, attn_bias=draw(1, 1, 3, 3, seed=4), sink=draw(2, seed=5))
    assert (got.dbias == 0).all() and (got.dsink == 0).all()


def test_a_sink_of_float64_is_the_same_in_both_directions(kernels):
    given = {n: draw(1, 9, 2, 16, seed=i) for i, n in enumerate("qkv")}
    exact = torch.tensor([1e9 + 1.0, 2.0], dtype=torch.float64)
    got = run(kernels, **given, sink=exact)
    rounded = run(kernels, **given, sink=exact.float())
    assert torch.equal(got.dsink.float(), rounded.dsink)
