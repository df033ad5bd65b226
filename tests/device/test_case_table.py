"""The case table on a GPU: every feature, every pair, every width, against the float64 oracle."""

from dataclasses import replace

import pytest
import torch

from tilewise.testing import CASES, Case, make_inputs

from .tools import DTYPES, name_of, qkv

SINGLES = [case for case in CASES if len(case.features) < 2]
PAIRS = [case for case in CASES if len(case.features) == 2]
LENGTHS = ((200, 333), (33, 49))  # several tiles, with an end in each direction; one tile
WIDTHS = [
    (8, 8), (16, 16), (33, 33), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160),
    (192, 192), (256, 256), (320, 320), (512, 512), (192, 128), (128, 192), (64, 256), (256, 64),
    (1, 7),
]  # fmt: skip


def by_id(case):
    return case.id


def check(case, dtype, engine, assert_agrees, head_dim=64):
    for sq, sk in LENGTHS:
        sized = replace(case, seqlen_q=sq, seqlen_k=sk, head_dim=head_dim)
        got = assert_agrees(make_inputs(sized, dtype, "cuda"), engine)
        assert got.out.dtype == dtype and got.out.is_contiguous()
        assert got.lse.dtype == torch.float32
        for name, gradient in got.items():
            if name in ("dq", "dk", "dv", "dbias"):
                assert gradient.dtype == dtype and gradient.is_contiguous(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", SINGLES, ids=by_id)
def test_each_feature_alone(case, dtype, triton_engine, assert_agrees):
    check(case, dtype, triton_engine, assert_agrees)


@pytest.mark.parametrize("case", SINGLES, ids=by_id)
def test_each_feature_alone_through_either_load(case, triton_engine, loads, assert_agrees):
    check(case, torch.bfloat16, triton_engine, assert_agrees)


@pytest.mark.parametrize("case", PAIRS, ids=by_id)
def test_each_pair_of_features(case, triton_engine, small_tiles, assert_agrees):
    """What a pair means depends on neither tile nor dtype, so that what compiles is small."""
    check(case, torch.float16, triton_engine, assert_agrees)


@pytest.mark.parametrize("case", SINGLES, ids=by_id)
def test_each_feature_alone_on_narrow_heads(case, triton_engine, assert_agrees):
    check(case, torch.float16, triton_engine, assert_agrees, head_dim=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"{w[0]}-{w[1]}")
def test_head_dims(widths, dtype, triton_engine, assert_agrees):
    d, dv = widths
    assert_agrees(qkv(sq=150, sk=301, d=d, dv=dv, dtype=dtype) | {"causal": True}, triton_engine)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("d", [128, 256])
def test_bias_dropout_and_softcap_on_wide_heads(d, dtype, triton_engine, assert_agrees):
    """The kernels that need the most registers and shared memory."""
    case = Case(("causal", "softcap", "attn_bias", "dropout", "gqa", "sink"), head_dim=d)
    assert_agrees(make_inputs(replace(case, seqlen_q=150, seqlen_k=301), dtype, "cuda"),
                  triton_engine)  # fmt: skip


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_lengths_beside_every_tile_edge(mask, triton_engine, loads, assert_agrees):
    options = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window_size": (70, 9)},
    }[mask]
    edges = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    for sq in edges:
        for sk in edges:
            inputs = qkv(1, sq, sk, 2, 1, dtype=torch.float16) | options
            assert_agrees(inputs, triton_engine)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_rows_and_no_keys(sizes, triton_engine, assert_agrees):
    assert_agrees(qkv(2, *sizes) | {"causal": True}, triton_engine)
    assert_agrees(qkv(0, 4, 4), triton_engine)
