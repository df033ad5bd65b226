"""Forward and backward where scores, biases and sinks lie far from zero."""

import pytest
import torch

from tilewise import testing

from .tools import FA1, FA2, INF, qkv

DTYPES = (torch.float32, torch.float16)
ENGINES = {"fa2": FA2, "fa1": FA1}


@pytest.fixture(params=ENGINES)
def kernels(request):
    return ENGINES[request.param]


def inputs(dtype=torch.float32, scale=1.0, sq=20, sk=70):
    drawn = qkv(sq, sk, h=1, dtype=torch.float64)
    return {n: (x * (scale if n in "qk" else 1)).to(dtype) for n, x in drawn.items()}


@pytest.mark.parametrize(
    ("scale", "dtype"), [(40.0, torch.float32), (10.0, torch.float16)], ids=str
)
def test_large_scores(scale, dtype, kernels, assert_agrees):
    """In float32 the step of an lse of thousands would show in the probabilities recomputed.

    Whole numbers, whose products are exact: the interpreter's are those of the machine's BLAS,
    which may sum q k^T in one order and k q^T in another, and that would show as well.
    """
    given = inputs(dtype, scale)
    given |= {n: given[n].round() for n in "qk"}
    assert_agrees(given | {"causal": True}, kernels)


def test_the_largest_score_comes_last(kernels, assert_agrees):
    given = inputs(sk=100)
    given["q"][..., 0] = 40.0
    given["k"][..., 0] = (torch.arange(100) // 16)[None, :, None] * 0.5
    assert_agrees(given, kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", ["finfo_min", "half_min", "-1e4", "-inf"])
def test_a_float_bias_as_mask(fill, dtype, kernels, assert_agrees):
    least = torch.finfo(dtype).min
    value = {"finfo_min": least, "half_min": least / 2}.get(fill) or float(fill)
    sees = torch.ones(20, 70, dtype=torch.bool).tril(40)
    sees[5, 1:] = False
    bias = torch.zeros(1, 1, 20, 70, dtype=dtype).masked_fill(~sees, value)
    got = assert_agrees(inputs(dtype) | {"attn_bias": bias}, kernels)
    want = testing.run(**inputs(dtype), **kernels, attn_bias=sees)
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=float(4 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30, -3e9, -2e9, -1e9, -6e4])
def test_rows_masked_by_one_large_number_throughout(value, dtype, kernels):
    """As an additive mask gives a padded row: beside 1e9 float32 has no digits left for scores."""
    bias = torch.zeros(1, 1, 20, 70)
    bias[:, :, 3:7] = value
    given = inputs(dtype)
    bias = bias if dtype == torch.float32 or value == -6e4 else bias.to(torch.bfloat16)
    got = testing.run(**given, attn_bias=bias, **kernels)
    want = testing.plain(**{n: x.float() for n, x in given.items()}, attn_bias=bias.float())
    for name, x in got.items():
        expected = getattr(want, name)
        size = 1.0 if name == "lse" else float(expected.abs().max())
        atol = 8 * torch.finfo(dtype).eps * size
        torch.testing.assert_close(x.float(), expected, rtol=1e-6, atol=atol, msg=name)


@pytest.mark.parametrize("value", [-1e4, -1e9, -1e16, -1e20, -1e30])
def test_a_sink_beside_rows_masked_by_the_same_number(value, kernels):
    """Weights depend on differences of scores: the gradients are those beside zeros."""
    given = inputs(sk=6)
    given |= {"q": given["q"] * 0, "attn_bias": torch.zeros(1, 1, 20, 1), "sink": torch.zeros(1)}
    want = testing.oracle(**given)
    given |= {"attn_bias": given["attn_bias"] + value, "sink": given["sink"] + value}
    for engine in (kernels, {"backend": "cpu"}, {"backend": "reference"}):
        got = testing.run(**given, **engine)
        for name in ("dsink", "dbias"):
            expected = getattr(want, name)
            torch.testing.assert_close(getattr(got, name).double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [1e4, 1e30, 3e38])
def test_a_large_positive_bias_takes_all_the_weight(value, kernels):
    bias = torch.zeros(20, 70)
    bias[:, 67] = value
    got = testing.run(**inputs(), attn_bias=bias, **kernels)
    torch.testing.assert_close(got.out, inputs()["v"][:, 67:68].expand_as(got.out))
    assert all(torch.isfinite(x).all() for name, x in got.items() if name != "lse")


@pytest.mark.parametrize("steep", [50.0, 1e4])
@pytest.mark.parametrize("length", [1, 7, 33, 65])
def test_scores_that_grow_behind_the_mask_do_not_matter(length, steep, kernels):
    """C28: exp comes after the mask, in the backward too."""
    given = inputs(sq=length, sk=length)
    j, i = torch.arange(length)[None], torch.arange(length)[:, None]
    rising = steep * (j - i).float()
    got, want = (
        testing.run(**given, **kernels, causal=True, attn_bias=bias)
        for bias in (rising, rising.masked_fill(j > i, 0.0))
    )
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b), name


@pytest.mark.parametrize(("slope", "dtype"), [(1.0, torch.float32), (-3.0, torch.float16)], ids=str)
def test_steep_slopes(slope, dtype, kernels, assert_agrees):
    assert_agrees(inputs(dtype) | {"alibi_slopes": torch.tensor([slope]), "causal": True}, kernels)


@pytest.mark.parametrize("sink", [-1e4, 30.0, 1e4, -INF])
def test_sinks_far_from_the_scores(sink, kernels, assert_agrees):
    assert_agrees(inputs(scale=2.0) | {"sink": torch.tensor([sink])}, kernels)


def test_values_as_large_as_the_dtype_allows(kernels, assert_agrees):
    given = inputs()
    given["v"] = given["v"] * 1e18
    assert_agrees(given, kernels)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_that_is_seen_shows(which, kernels):
    given = inputs()
    given[which][:, 6] = torch.nan
    out = testing.run(**given, **kernels, backward=False).out
    rows = out[:, 6:7] if which == "q" else out
    assert rows.isnan().all()
    if which == "q":
        others = torch.cat([out[:, :6], out[:, 7:]], 1)
        assert torch.isfinite(others).all()


def test_rows_that_see_one_key_each_give_its_value(kernels):
    given = inputs(sq=40, sk=40) | {"window_size": (0, 0)}
    got = testing.run(**given, **kernels, backward=False)
    torch.testing.assert_close(got.out, given["v"].expand_as(got.out))
