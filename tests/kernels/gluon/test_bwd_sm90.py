"""The one-pass backward: the pipeline between its warps, emulated."""

import pytest
import torch

from .test_fwd_sm90 import qkv


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 128), (130, 200), (200, 330)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(causal, lengths, d, assert_gradients_agree):
    assert_gradients_agree(qkv(*lengths, d=d) | {"causal": causal})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [(40, 0), (100, 30), (0, 0), (-1, 37), (200, -1)])
def test_windows(window, d, assert_gradients_agree):
    assert_gradients_agree(qkv(300, 300, d=d) | {"window_size": window})


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
        {"sink": torch.tensor([0.3, -1.0])},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
def test_what_changes_scores(options, d, assert_gradients_agree):
    assert_gradients_agree(qkv(140, 170, d=d) | {"causal": True} | options)
