"""ALiBi's distance in dense and packed calls: C09."""

import pytest
import torch

import tilewise

from .tools import CROSS, F64, band_mask, check, distance, int32, near, noted, rand, run, zeros

pytestmark = pytest.mark.usefixtures("poisoned")

SLOPES = torch.tensor([0.5, 0.125])
LENGTHS = [(2, 5), (3, 2), (1, 4)]
CU_Q, CU_K = int32(0, 2, 5, 6), int32(0, 5, 7, 11)


def packed(backend, q, k, v, slopes, form="separate", **arguments):
    arguments = {"alibi_slopes": slopes, "return_lse": True, **arguments, **backend}
    if form == "kvpacked":
        kv = torch.stack((k, v), 1)
        return tilewise.flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 3, 5, **arguments)
    return tilewise.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 3, 5, **arguments)


@pytest.mark.parametrize("form", ["separate", "kvpacked"])
@pytest.mark.parametrize("causal", [False, True])
def test_c09_the_distance_is_each_sequences_own(causal, form, backend, dtype):
    """C09 Dao-AILab/flash-attention#907: the distance was taken from maximal lengths."""
    q = zeros(6, 2, 4, dtype=dtype)
    k, v = rand(11, 2, 4, seed=1, dtype=dtype), rand(11, 2, 4, seed=2, dtype=dtype)
    out, lse = packed(backend, q, k, v, SLOPES, form, causal=causal)
    for n, (sq, sk) in enumerate(LENGTHS):
        rows, keys = slice(CU_Q[n], CU_Q[n + 1]), slice(CU_K[n], CU_K[n + 1])
        x = -SLOPES.double()[:, None, None] * distance(sq, sk)  # scores are all zero
        x = torch.where(band_mask(sq, sk, -1, 0 if causal else -1), x, -torch.inf)
        w = torch.softmax(x, -1).nan_to_num(0.0)
        near(out[rows], torch.einsum("hij,jhd->ihd", w, v[keys].double()), dtype)
        near(lse[:, rows], torch.logsumexp(x, -1), dtype, "lse")  # not shifted by a row's constant


@pytest.mark.parametrize("form", ["separate", "kvpacked"])
def test_c09_slopes_of_each_sequence(form, backend, dtype):
    """C09 Dao-AILab/flash-attention#1585: (batch, nheads) slopes were rejected."""
    q = rand(6, 2, 4, seed=3, dtype=dtype)
    k, v = rand(11, 2, 4, seed=1, dtype=dtype), rand(11, 2, 4, seed=2, dtype=dtype)
    slopes = torch.stack([SLOPES, SLOPES * 2, SLOPES * 3])
    out, lse = packed(backend, q, k, v, slopes, form)
    for n, (sq, sk) in enumerate(LENGTHS):
        rows, keys = slice(CU_Q[n], CU_Q[n + 1]), slice(CU_K[n], CU_K[n + 1])
        bias = -slopes[n].double()[:, None, None] * distance(sq, sk)
        got = {"out": out[None, rows], "lse": lse[None, :, rows]}
        check(got, q[None, rows], k[None, keys], v[None, keys], attn_bias=bias)


@pytest.mark.parametrize("per_batch", [False, True], ids=["heads", "batch-heads"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entry", CROSS)
def test_c09_forward_and_backward(entry, causal, per_batch, backend, dtype):
    """C09: cross-attention of unequal lengths with grouped heads, all gradients."""
    for sizes in ((2, 5), (5, 2), (7, 7)):
        with noted(sizes):
            sq, sk = sizes
            q = rand(2, sq, 4, 8, seed=1, dtype=dtype)
            k, v = rand(2, sk, 2, 8, seed=2, dtype=dtype), rand(2, sk, 2, 8, seed=3, dtype=dtype)
            slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
            if per_batch:
                slopes = torch.stack([slopes, 3 * slopes])
            bias = -slopes.double().expand(2, 4)[:, :, None, None] * distance(sq, sk)
            dlse = rand(2, 4, sq, seed=4)
            seen = band_mask(sq, sk, -1, 0) if causal else None
            got = run(entry, backend, q, k, v, alibi_slopes=slopes, causal=causal, dlse=dlse)
            check(got, q, k, v, attn_bias=bias, seen=seen, dlse=dlse)


@pytest.mark.parametrize("sizes", [(600, 530), (530, 600)], ids=str)
@pytest.mark.parametrize("entry", ["dense", "varlen"])
def test_c09_across_tiles(entry, sizes, backend):
    """C09: the distance counts from the sequence's corner in every tile."""
    sq, sk = sizes
    q, k, v = (rand(1, s, 2, 8, seed=n) for n, s in enumerate((sq, sk, sk)))
    slopes = torch.tensor([0.03, 0.004], dtype=F64)
    got = run(entry, backend, q, k, v, alibi_slopes=slopes, causal=True)
    bias = -slopes[:, None, None] * distance(sq, sk)
    check(got, q, k, v, attn_bias=bias, seen=band_mask(sq, sk, -1, 0))


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 2), (2, 2), (3, 1), (3, 2, 1), ()], ids=str)
def test_c09_slopes_of_a_wrong_shape_are_refused(shape, backend):
    q, k, v = rand(6, 2, 4, seed=3), rand(11, 2, 4, seed=1), rand(11, 2, 4, seed=2)
    with pytest.raises(tilewise.InvalidInputError, match="alibi_slopes"):
        packed(backend, q, k, v, torch.ones(shape))
    with pytest.raises(tilewise.InvalidInputError, match="alibi_slopes"):
        tilewise.flash_attn_func(
            *(x.expand(3, *x.shape) for x in (q, k, v)), alibi_slopes=torch.ones(shape), **backend
        )
