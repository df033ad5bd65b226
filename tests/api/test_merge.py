"""merge_attention: parts over disjoint keys join into the whole."""

import itertools

import pytest
import torch

from tilewise import InvalidInputError, flash_attn_func, flash_attn_varlen_func, merge_attention

F64 = torch.float64


def qkv(dtype=F64):
    return [torch.randn(2, s, 2, 8, dtype=F64).to(dtype).requires_grad_() for s in (5, 12, 12)]


def halves(q, k, v, cuts=(0, 3, 3, 12), **options):
    return [
        flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True, **options)
        for a, b in itertools.pairwise(cuts)
    ]


def test_parts_join_into_the_whole_with_gradients(engine):
    leaves = qkv()
    results = []
    for out, lse in (
        merge_attention(halves(*leaves, **engine)),
        flash_attn_func(*leaves, return_lse=True, **engine),
    ):
        gradients = torch.autograd.grad((out.cos().sum() + lse.sin().sum()), leaves)
        results.append((out, lse, *gradients))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_sink_belongs_to_one_part():
    q, k, v = qkv()
    sink = torch.randn(2, dtype=F64, requires_grad=True)
    first = flash_attn_func(q, k[:, :4], v[:, :4], sink=sink, return_lse=True)
    second = flash_attn_func(q, k[:, 4:], v[:, 4:], return_lse=True)
    got, want = (
        merge_attention([first, second]),
        flash_attn_func(q, k, v, sink=sink, return_lse=True),
    )
    torch.testing.assert_close(got, want)
    a, b = (torch.autograd.grad(x[0].cos().sum() + x[1].sum(), sink)[0] for x in (got, want))
    torch.testing.assert_close(a, b)


def test_an_empty_part_changes_nothing():
    q, k, v = qkv()
    (whole,) = halves(q, k, v, (0, 12))
    empty = flash_attn_func(q, k[:, :0], v[:, :0], return_lse=True)
    torch.testing.assert_close(merge_attention([empty, whole, empty]), whole)
    torch.testing.assert_close(merge_attention([whole]), whole)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_an_empty_part_changes_nothing_whatever_its_out_holds(garbage):
    leaves = qkv()
    results = []
    for fill in (0.0, garbage):
        first, second = halves(*leaves, (0, 4, 12))
        nothing = (
            torch.full_like(first[0], fill).requires_grad_(),
            torch.full_like(first[1], -torch.inf).requires_grad_(),
        )
        out, lse = merge_attention([first, nothing, second])
        found = torch.autograd.grad(out.cos().sum() + lse.sum(), (*leaves, *nothing))
        results.append((out, lse, *found))
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(dirty, clean)
    assert (results[1][-1] == 0).all() and (results[1][-2] == 0).all()


def test_some_rows_empty_in_one_part():
    """Causal attention over the second half of the keys leaves the first rows without any."""
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=F64, requires_grad=True) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    parts = [
        flash_attn_func(q, k[:, s], v[:, s], attn_bias=mask[:, s], return_lse=True)
        for s in (slice(0, 3), slice(3, 6))
    ]
    assert (parts[1][1][..., :3] == -torch.inf).all()
    got, want = merge_attention(parts), flash_attn_func(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        *(torch.autograd.grad(x[0].cos().sum(), (q, k, v)) for x in (got, want)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_all_parts_empty_give_zero_and_minus_infinity():
    out = torch.full((1, 3, 2, 4), torch.nan, dtype=F64, requires_grad=True)
    lse = torch.full((1, 2, 3), -torch.inf, dtype=F64, requires_grad=True)
    got, got_lse = merge_attention([(out, lse), (out, lse)])
    assert (got == 0).all() and (got_lse == -torch.inf).all()
    found = torch.autograd.grad(got.sum(), (out, lse), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in found)


def test_packed_shapes():
    q, k, v = (torch.randn(9, 2, 4, dtype=F64) for _ in range(3))
    cu_q = torch.tensor([0, 4, 9])
    whole = flash_attn_varlen_func(q, k, v, cu_q, cu_q, 5, 5, return_lse=True)
    parts = []
    for lo, hi in ((0, 2), (2, 5)):
        picked = [i for a, b in ((0, 4), (4, 9)) for i in range(a, b) if lo <= i - a < hi]
        cu_k = torch.tensor([0, min(hi, 4) - lo, min(hi, 4) - lo + hi - lo])
        parts.append(
            flash_attn_varlen_func(q, k[picked], v[picked], cu_q, cu_k, 5, 5, return_lse=True)
        )
    torch.testing.assert_close(merge_attention(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_distant_scales(dtype):
    q, k, v = (x.detach() for x in qkv(dtype))
    out, lse = merge_attention(halves(q, k, v))
    assert out.dtype == dtype and lse.dtype == torch.float32
    want, want_lse = flash_attn_func(q, k, v, return_lse=True)
    band = 4 * torch.finfo(dtype).eps * float(want.float().abs().max())
    torch.testing.assert_close(out, want, rtol=0, atol=band)
    torch.testing.assert_close(lse, want_lse)
    far = merge_attention([(out, lse - 5000), (want, want_lse + 5000)])
    assert torch.equal(far[0], want)
    torch.testing.assert_close(far[1], want_lse + 5000)


def test_the_order_of_parts_does_not_matter():
    parts = halves(*(x.detach() for x in qkv()), (0, 1, 5, 12))
    torch.testing.assert_close(merge_attention(parts), merge_attention(parts[::-1]))
    nested = merge_attention([merge_attention(parts[:2]), parts[2]])
    torch.testing.assert_close(nested, merge_attention(parts))


def test_gradients_of_merging_by_finite_differences():
    parts = [
        (
            torch.randn(1, 2, 2, 3, dtype=F64, requires_grad=True),
            torch.randn(1, 2, 2, dtype=F64, requires_grad=True),
        )
        for _ in range(3)
    ]

    def merge(*flat):
        return merge_attention(list(zip(flat[::2], flat[1::2], strict=True)))

    assert torch.autograd.gradcheck(merge, [x for part in parts for x in part])
    assert torch.autograd.gradgradcheck(merge, [x for part in parts for x in part])


BAD = {
    "none": (lambda o, s: [], "parts: got no parts"),
    "other_out": (lambda o, s: [(o, s), (o[:, :2], s[..., :2])], r"parts\[1\]: got out of shape"),
    "transposed_lse": (lambda o, s: [(o, s.mT)], r"parts\[0\]: got lse of shape"),
    "two_dimensions": (lambda o, s: [(o[0, 0], s[0])], r"parts\[0\]: got out of shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_shapes_are_named(name):
    parts, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        merge_attention(parts(torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)))
