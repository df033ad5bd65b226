"""The one-pass backward: the pipeline between its warps, emulated."""

import pytest
import torch

from tilewise.arguments import Options, dense_call
from tilewise.backends.gluon import bwd, bwd_two_pass, counters
from tilewise.ops.schema import describe

from . import emulator
from .test_fwd_sm90 import INF, NAN, packed, qkv


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 128), (130, 200), (200, 330)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(causal, lengths, d, assert_gradients_agree):
    assert_gradients_agree(qkv(*lengths, d=d) | {"causal": causal})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [(40, 0), (100, 30), (0, 0), (-1, 37), (200, -1)])
def test_windows(window, d, assert_gradients_agree):
    assert_gradients_agree(qkv(300, 300, d=d) | {"window_size": window})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("programs", [1, 2, 7, 132])
@pytest.mark.parametrize("at_once", [False, True], ids=["", "at once"])
def test_any_number_of_programs(at_once, programs, d, monkeypatch, assert_gradients_agree):
    """Each takes many tiles, or one, or there are more than tiles; some tiles do not exist."""
    monkeypatch.setattr(emulator, "side_by_side", at_once)
    monkeypatch.setattr(counters, "_multiprocessors", lambda index: programs)
    bounds = [0, 130, 130, 131, 460, 460, 600]
    assert_gradients_agree(packed(bounds, bounds, h=2, hk=1, d=d) | {"causal": True})
    assert_gradients_agree(qkv(140, 290, h=2, hk=2, d=d))


@pytest.mark.parametrize("d", [8, 40, 80])
def test_other_widths(d, assert_gradients_agree):
    assert_gradients_agree(qkv(150, 301, d=d) | {"causal": True})


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grouped_heads_and_batches(dtype, heads, assert_gradients_agree):
    h, hk = heads
    assert_gradients_agree(qkv(140, 170, h=h, hk=hk, batch=2, dtype=dtype) | {"causal": True})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5},
        {"alibi_slopes": torch.tensor([0.2, 0.05])},
        {"alibi_slopes": torch.tensor([0.2, -0.05]), "causal": False},
        {"sink": torch.tensor([0.3, -1.0])},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
        {"dropout_p": 0.3, "seed": 1234567890123},
    ],
    ids=str,
)
def test_what_changes_scores(options, d, assert_gradients_agree):
    assert_gradients_agree(qkv(140, 170, d=d) | {"causal": True} | options)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(64, 64), (16, 130)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "dropout_p"), [(torch.float16, 0.99), (torch.bfloat16, 0.99999)], ids=str
)
def test_dropout_that_leaves_next_to_nothing(dtype, dropout_p, lengths, d, assert_gradients_agree):
    """dS of a row without a weight is -P dlse, and the kernels make it times 1 - dropout_p."""
    inputs = qkv(*lengths, d=d, dtype=dtype)
    assert_gradients_agree(inputs | {"dropout_p": dropout_p, "seed": 3})


@pytest.mark.parametrize("d", [64, 256])
def test_float16_of_more_dropout_is_not_for_these_kernels(d):
    options = Options(dropout_p=0.999, seed=3)
    for dtype, taken in ((torch.float16, False), (torch.bfloat16, True)):
        problem = describe(*dense_call(**qkv(8, 8, d=d, dtype=dtype), options=options), True)
        assert (bwd.takes(problem) or bwd_two_pass.takes(problem)) == taken


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 10)}], ids=str)
def test_packed_sequences(options, d, assert_gradients_agree):
    bounds_q, bounds_k = [0, 1, 1, 90, 345, 360], [0, 100, 130, 130, 300, 420]
    inputs = packed(bounds_q, bounds_k, slack=7, h=2, hk=1, d=d) | options
    got = assert_gradients_agree(inputs)
    assert (got.dq[360:] == 0).all() and (got.dk[420:] == 0).all() and (got.dv[420:] == 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_used_rows(causal, assert_gradients_agree):
    inputs = packed([0, 200, 330, 400], [0, 200, 330, 400], d=64) | {
        "seqused_q": torch.tensor([65, 0, 70], dtype=torch.int32),
        "seqused_k": torch.tensor([130, 5, 0], dtype=torch.int32),
        "causal": causal,
    }
    assert_gradients_agree(inputs)


@pytest.mark.parametrize("lengths", [(300, 120), (100, 330)])
def test_rows_without_keys_and_keys_without_rows(lengths, assert_gradients_agree):
    assert_gradients_agree(qkv(*lengths) | {"window_size": (30, 20)})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("garbage", [NAN, INF])
@pytest.mark.parametrize("more", [{}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_rows_that_see_nothing_may_hold_anything(sink, more, garbage, d, assert_gradients_agree):
    """Rows 0 to 159 see no key, but with a sink have a finite lse."""
    inputs = qkv(300, 140, d=d) | {"causal": True} | more
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
