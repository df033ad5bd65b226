"""The two-pass backward: the pipelines between its warps, emulated."""

from dataclasses import replace

import pytest
import torch

from tilewise.core.features import BY_NAME
from tilewise.testing import CASES, make_inputs

from .test_fwd_sm90 import INF, NAN, packed, qkv

SUPPORTED = [c for c in CASES if all("gluon" in BY_NAME[f].bwd for f in c.features)]
# dK and dV come from the one pass, in its narrow or its wide steps, or from a kernel of their own
each_way = pytest.mark.parametrize("d", [64, 128, 256])


def ordered(inputs):
    """Narrow heads go this way when the order of additions is to be one."""
    return inputs | {"deterministic": True}


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda c: c.id)
def test_the_case_table(case, assert_gradients_agree):
    # values of another width are 8 wider, and 256 is the most
    for sq, sk, d in ((33, 49, 128), (150, 200, 64), (150, 200, 248)):
        sized = replace(case, seqlen_q=sq, seqlen_k=sk, head_dim=d)
        assert_gradients_agree(ordered(make_inputs(sized, torch.float16, "cpu")))


@each_way
@pytest.mark.parametrize("lengths", [(1, 1), (64, 128), (130, 200), (200, 330)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(causal, lengths, d, assert_gradients_agree):
    assert_gradients_agree(ordered(qkv(*lengths, d=d)) | {"causal": causal})


@each_way
@pytest.mark.parametrize(
    "window", [(40, 0), (100, 30), (0, 0), (-1, 37), (200, -1), (0, 200), (700, -1), (-1, 64)]
)
def test_windows(window, d, assert_gradients_agree):
    assert_gradients_agree(ordered(qkv(300, 300, d=d)) | {"window_size": window})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "widths",
    [(8, 8), (80, 80), (128, 128), (136, 136), (192, 192), (192, 128), (64, 256), (256, 64),
     (128, 64), (64, 128)],
    ids=lambda w: f"{w[0]}-{w[1]}",
)  # fmt: skip
def test_head_dims(widths, dtype, assert_gradients_agree):
    inputs = qkv(150, 301, d=widths[0], dv=widths[1], dtype=dtype)
    assert_gradients_agree(ordered(inputs) | {"causal": True})


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grouped_heads_and_batches(dtype, heads, assert_gradients_agree):
    h, hk = heads
    inputs = qkv(140, 170, h=h, hk=hk, batch=2, d=256, dtype=dtype)
    assert_gradients_agree(inputs | {"causal": True})


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5},
        {"softcap": 1.5, "dropout_p": 0.4, "seed": 5},
        {"alibi_slopes": torch.tensor([0.2, 0.05])},
        {"sink": torch.tensor([0.5, -1.0])},
        {"dropout_p": 0.2, "seed": 77},
        {"dropout_p": 0.9, "seed": 2**40 + 3},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_changes_scores(causal, options, assert_gradients_agree):
    assert_gradients_agree(qkv(140, 170, d=256) | {"causal": causal} | options)


@each_way
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (40, 10)}, {"dropout_p": 0.3, "seed": 9}],
    ids=str,
)
def test_packed_sequences(options, d, assert_gradients_agree):
    bounds_q, bounds_k = [0, 1, 1, 90, 345, 360], [0, 100, 130, 130, 300, 420]
    inputs = ordered(packed(bounds_q, bounds_k, slack=7, h=2, hk=1, d=d)) | options
    got = assert_gradients_agree(inputs)
    assert (got.dq[360:] == 0).all() and (got.dk[420:] == 0).all() and (got.dv[420:] == 0).all()


@each_way
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_used_rows(causal, d, assert_gradients_agree):
    inputs = packed([0, 200, 330, 400], [0, 200, 330, 400], d=d) | {
        "seqused_q": torch.tensor([65, 0, 70], dtype=torch.int32),
        "seqused_k": torch.tensor([130, 5, 0], dtype=torch.int32),
        "causal": causal,
    }
    assert_gradients_agree(ordered(inputs))


@each_way
@pytest.mark.parametrize("lengths", [(300, 120), (100, 330)])
def test_rows_without_keys_and_keys_without_rows(lengths, d, assert_gradients_agree):
    assert_gradients_agree(ordered(qkv(*lengths, d=d)) | {"window_size": (30, 20)})


@pytest.mark.parametrize("factor", [30.0, 300.0])
def test_large_logits(factor, assert_gradients_agree):
    """Scores of thousands, which a sum that starts at -lse would lose the digits of."""
    inputs = qkv(130, 200, d=256, dtype=torch.bfloat16)
    inputs["q"] = inputs["q"] * factor
    assert_gradients_agree(inputs | {"causal": True})


@each_way
@pytest.mark.parametrize("garbage", [NAN, INF])
@pytest.mark.parametrize("more", [{}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_rows_that_see_nothing_may_hold_anything(sink, more, garbage, d, assert_gradients_agree):
    """Rows 0 to 159 see no key, but with a sink have a finite lse."""
    inputs = ordered(qkv(300, 140, d=d)) | {"causal": True} | more
    if sink:
        inputs["sink"] = torch.linspace(-0.5, 0.5, inputs["q"].shape[2])
    clean = assert_gradients_agree(inputs)
    inputs["q"][:, :160] = garbage
    spoil = torch.arange(300)[:, None, None] < 160
    dirty = assert_gradients_agree(
        inputs, against=clean, spoil=lambda dout: dout.masked_fill(spoil, garbage)
    )
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(dirty, name), getattr(clean, name)), name


@each_way
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("garbage", [NAN, INF])
@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_that_nothing_sees_may_hold_anything(
    which, garbage, softcap, d, assert_gradients_agree
):
    inputs = packed([0, 100, 230], [0, 140, 400], slack=40, d=d) | {
        "seqused_k": torch.tensor([77, 131], dtype=torch.int32),
        "window_size": (50, 20),
        "softcap": softcap,
    }
    clean = assert_gradients_agree(ordered(inputs))
    seen = torch.zeros(440, dtype=torch.bool)
    for start, used, rows in ((0, 77, 100), (140, 131, 130)):
        seen[start + max(0, used - rows - 50) : start + used] = True
    inputs[which] = inputs[which].masked_fill(~seen[:, None, None], garbage)
    dirty = assert_gradients_agree(ordered(inputs), against=clean)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(dirty, name), getattr(clean, name)), name


def test_strides_that_tma_cannot_read(assert_gradients_agree):
    inputs = qkv(70, 140, d=128)
    inputs["q"] = inputs["q"][..., 1:65]
    inputs["k"] = inputs["k"][..., ::2]
    inputs["v"] = inputs["v"].transpose(1, 3).contiguous().transpose(1, 3)[..., :64]
    assert_gradients_agree(ordered(inputs))


@each_way
@pytest.mark.parametrize("only", ["dq", "dk", "dv"])
def test_only_what_is_wanted(only, d, assert_gradients_agree):
    wanted = {name: name == only for name in ("dq", "dk", "dv")}
    got = assert_gradients_agree(ordered(qkv(70, 140, d=d)), **wanted)
    assert getattr(got, only) is not None
    assert (got.dq is None) == (only != "dq") and (got.dk is None) == (only == "dq")
