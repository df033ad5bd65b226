"""FlashAttention-3's forward: the pipeline between its warps, emulated."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tilewise.core.features import BY_NAME
from tilewise.testing import CASES, make_inputs

INF, NAN = float("inf"), float("nan")
SUPPORTED = [c for c in CASES if all("gluon" in BY_NAME[f].fwd for f in c.features)]


def qkv(sq, sk, h=2, hk=1, d=64, dv=None, batch=1, dtype=torch.float16):
    def draw(seed, *shape):
        gen = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=gen).to(dtype)

    dv = dv or d
    return {
        "q": draw(1, batch, sq, h, d),
        "k": draw(2, batch, sk, hk, d),
        "v": draw(3, batch, sk, hk, dv),
    }


def packed(bounds_q, bounds_k, slack=0, **more):
    longest = [max(b - a for a, b in pairwise(x)) for x in (bounds_q, bounds_k)]
    dense = qkv(bounds_q[-1] + slack, bounds_k[-1] + slack, **more)
    return {name: x[0] for name, x in dense.items()} | {
        "cu_seqlens_q": torch.tensor(bounds_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(bounds_k, dtype=torch.int32),
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
    }


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda c: c.id)
def test_the_case_table(case, assert_forward_agrees):
    for sq, sk in ((33, 49), (300, 333)):
        sized = replace(case, seqlen_q=sq, seqlen_k=sk, head_dim=64)
        assert_forward_agrees(make_inputs(sized, torch.float16, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "widths",
    [(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128),
     (64, 256), (256, 64), (128, 64), (64, 128), (128, 256)],
    ids=lambda w: f"{w[0]}-{w[1]}",
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims(widths, causal, dtype, assert_forward_agrees):
    assert_forward_agrees(
        qkv(150, 301, d=widths[0], dv=widths[1], dtype=dtype) | {"causal": causal}
    )


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "window", [(-1, 0), (0, 0), (5, 0), (64, 0), (100, 30), (0, 200), (700, -1), (-1, 64), (-1, 37)]
)
@pytest.mark.parametrize(
    "lengths", [(1, 1), (64, 64), (256, 256), (70, 333), (333, 70), (129, 640)]
)
def test_windows(lengths, window, d, assert_forward_agrees):
    assert_forward_agrees(qkv(*lengths, d=d) | {"window_size": window})


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 10)}], ids=str)
def test_packed_sequences(options, d, assert_forward_agrees):
    bounds_q, bounds_k = [0, 1, 1, 90, 345, 409, 414], [0, 100, 130, 130, 300, 556, 560]
    inputs = packed(bounds_q, bounds_k, slack=7, h=2, hk=2, d=d) | options
    got = assert_forward_agrees(inputs)
    assert (got.out[414:] == 0).all() and (got.lse[:, 414:] == -INF).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_used_rows(causal, assert_forward_agrees):
    inputs = packed([0, 200, 330, 400], [0, 200, 330, 400], d=64) | {
        "seqused_q": torch.tensor([65, 0, 70], dtype=torch.int32),
        "seqused_k": torch.tensor([130, 5, 0], dtype=torch.int32),
        "causal": causal,
    }
    assert_forward_agrees(inputs)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_no_row_sees_may_hold_anything(which, garbage, forward):
    inputs = packed([0, 100, 230], [0, 140, 400], slack=40, d=64) | {
        "seqused_k": torch.tensor([77, 131], dtype=torch.int32),
        "window_size": (50, 20),
    }
    want = forward(**inputs)
    seen = torch.zeros(440, dtype=torch.bool)
    for start, used, rows in ((0, 77, 100), (140, 131, 130)):
        seen[start + max(0, used - rows - 50) : start + used] = True
    inputs[which] = inputs[which].masked_fill(~seen[:, None, None], garbage)
    got = forward(**inputs)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grows", ["towards the first key", "towards the last", "in one key"])
def test_the_reference_moves_when_it_must(grows, dtype, d, assert_forward_agrees):
    """Blocks are taken from the last: scores of hundreds in the first keys come late."""
    inputs = qkv(70, 700, d=d, dtype=dtype)
    j = torch.arange(700.0)
    factor = {
        "towards the first key": 1 + 10 * (700 - j) / 700,
        "towards the last": 1 + 10 * j / 700,
        "in one key": torch.where(j == 3, 60.0, 1.0),
    }[grows]
    inputs["k"] = (inputs["k"] * factor[:, None, None]).to(dtype)
    assert_forward_agrees(inputs | {"softmax_scale": 1.0})
    assert_forward_agrees(inputs | {"causal": True})


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_with_scores_of_hundreds_beside_others(dtype, d, assert_forward_agrees):
    """By 16, a warp's, and one by one."""
    i = torch.arange(130)
    large = (i // 16 % 2 == 0) & (i < 64) | (i % 5 == 0)
    inputs = qkv(130, 700, d=d, dtype=dtype)
    inputs["q"] = inputs["q"] * torch.where(large, 150.0, 1.0)[:, None, None].to(dtype)
    assert_forward_agrees(inputs)
    assert_forward_agrees(inputs | {"causal": True, "window_size": (300, 0)})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "steps",
    [
        [80, 196, 207],
        [80, 194, 204],
        [100, 90],
        [-90, 20, 200],
        [300, 180, 420],
        [-300, -90, 250],
        [80, 186, 229],
        [80, 192, 292],
        [-100, 54, 216],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["", "small values"])
def test_scores_that_jump(small, dtype, steps, d, assert_forward_agrees):
    """Base 2, block by block as they are visited, the second one long, one key in the last."""
    size = 1.0 if not small else 2.0**-12 if dtype == torch.float16 else 2.0**-50
    levels = [steps[0], *[steps[1]] * 15, *steps[2:]]
    inputs = qkv(64, 64 * len(levels), d=d, dtype=dtype)
    inputs["q"] = torch.zeros_like(inputs["q"]).index_fill_(-1, torch.tensor([0]), 1.0)
    scores = torch.tensor(levels[::-1], dtype=torch.float32).repeat_interleave(64)
    scores[1 : 64 * (len(steps) - 2)] = 0.0
    inputs["k"] = torch.zeros_like(inputs["k"])
    inputs["k"][..., 0] = scores[:, None].to(dtype)
    inputs["v"] = (inputs["v"] + 2.0 * (torch.arange(len(scores)) // 64)[:, None, None]) * size
    inputs["v"] = inputs["v"].to(dtype)
    assert_forward_agrees(inputs | {"softmax_scale": 0.6931471805599453})


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("slopes", [[0.2, -0.05], [100.0, 1.0]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (60, 100)},
        {"causal": True, "softcap": 1.5},
        {"dropout_p": 0.3, "seed": 1234567890123},
    ],
    ids=str,
)
def test_alibi(options, slopes, d, assert_forward_agrees):
    """On both sides of the diagonal, which more keys than rows, or fewer, move."""
    slopes = {"alibi_slopes": torch.tensor(slopes)}
    for lengths in ((140, 333), (333, 140)):
        assert_forward_agrees(qkv(*lengths, d=d) | slopes | options)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_alibi_of_used_rows(options, assert_forward_agrees):
    inputs = packed([0, 200, 330, 400], [0, 200, 330, 400], d=64) | {
        "seqused_q": torch.tensor([65, 0, 70], dtype=torch.int32),
        "seqused_k": torch.tensor([130, 5, 0], dtype=torch.int32),
        "alibi_slopes": torch.tensor([0.2, -0.05]),
    }
    assert_forward_agrees(inputs | options)


@pytest.mark.parametrize("sink", [-INF, -1e4, 0.0, 30.0, 1e4])
def test_sinks_far_from_the_scores(sink, assert_forward_agrees):
    inputs = qkv(70, 65) | {"sink": torch.tensor([sink, 0.5]), "causal": True}
    assert_forward_agrees(inputs)


def test_a_nan_that_is_seen_shows(forward):
    inputs = qkv(130, 200)
    inputs["q"][:, 6] = NAN
    out = forward(**inputs).out
    assert out[:, 6].isnan().all() and torch.isfinite(out[:, :6]).all()
    assert torch.isfinite(out[:, 7:]).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_other_scales(scale, assert_forward_agrees):
    assert_forward_agrees(qkv(70, 140) | {"softmax_scale": scale, "causal": True})


def test_strides_that_tma_cannot_read(assert_forward_agrees):
    inputs = qkv(70, 140, d=128)
    inputs["q"] = inputs["q"][..., 1:65]
    inputs["k"] = inputs["k"][..., ::2]
    inputs["v"] = inputs["v"].transpose(1, 3).contiguous().transpose(1, 3)[..., :64]
    assert_forward_agrees(inputs)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("garbage", [NAN, INF, 3e4])
def test_rows_that_are_not_used_have_no_say_in_any_bit(garbage, d, forward):
    """They share warps with rows that are."""
    inputs = packed([0, 100, 230], [0, 140, 400], slack=40, d=d, dtype=torch.bfloat16) | {
        "seqused_q": torch.tensor([37, 101], dtype=torch.int32),
    }
    clean = forward(**inputs)
    used = torch.zeros(270, dtype=torch.bool)
    used[:37] = used[100:201] = True
    inputs["q"] = inputs["q"].masked_fill(~used[:, None, None], garbage)
    dirty = forward(**inputs)
    assert torch.equal(dirty.out[used], clean.out[used])
    assert torch.equal(dirty.lse[:, used], clean.lse[:, used])
