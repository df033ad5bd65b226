"""The forward's out and lse: sizes, widths, layouts, both ways of loading, what is not read."""

import math

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func, testing

from .tools import (
    BAD_BOUNDS,
    FA2,
    INF,
    NAN,
    TILE,
    draw,
    guarded_memory,
    packed,
    qkv,
    with_bounds,
)


def check(inputs, engine=FA2):
    with testing.poisoned_memory():
        got = testing.run(**inputs, **engine, backward=False)
    testing.assert_within(got, testing.oracle(**inputs), testing.plain(**inputs), inputs["q"].dtype)
    return got


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (20, 5)}}
EDGES = (1, 13, TILE - 1, TILE, TILE + 1, 2 * TILE + 1)


@pytest.mark.parametrize("mask", MASKS)
def test_lengths_beside_the_tile_edges(mask, loads):
    for sq in EDGES:
        for sk in EDGES:
            check(qkv(sq, sk, h=1) | MASKS[mask])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_rows_or_no_keys(sizes):
    got = check(qkv(*sizes))
    assert (got.out == 0).all() and (got.lse == -INF).all()
    check(qkv(batch=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "widths",
    [(1, 1), (7, 3), (8, 8), (33, 33), (40, 40), (80, 96), (192, 128), (64, 256), (512, 512)],
    ids=str,
)
def test_head_dims(widths, dtype, loads):
    d, dv = widths
    check(qkv(40, 35, h=1, d=d, dv=dv, dtype=dtype) | {"causal": True})


@pytest.mark.parametrize("heads", [(1, 1), (6, 3), (6, 1), (5, 5)], ids=str)
def test_grouped_heads(heads):
    h, hk = heads
    check(qkv(20, 40, h=h, hk=hk, batch=3) | {"causal": True})


NAN_BESIDE = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "width_first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every_second_row": lambda x: torch.stack([x, x * NAN], 2).flatten(1, 2)[:, ::2],
    "every_second_column": lambda x: torch.stack([x, x * NAN], -1).flatten(3)[..., ::2],
    "part_of_wider": lambda x: torch.cat([x, x * NAN], -1)[..., : x.shape[-1]],
    "expanded_heads": lambda x: x[:, :, :1].expand_as(x),
    "expanded_rows": lambda x: x[:, :1].expand_as(x),
    "expanded_batch": lambda x: x[:1].expand_as(x),
    "expanded_width": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("layout", NAN_BESIDE)
def test_strides_of_any_kind(layout, loads):
    inputs = {name: NAN_BESIDE[layout](x) for name, x in qkv(35, 40, h=2, hk=2, batch=2).items()}
    check(inputs | {"causal": True})


@pytest.mark.parametrize("scale", [-1.5, -1e-30, 0.0, 1e-45, 2.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scales_of_any_sign_and_none(scale, softcap, causal):
    inputs = qkv() | {"softmax_scale": scale, "softcap": softcap, "causal": causal}
    check(inputs)
    if not scale and not causal:
        got = flash_attn_func(**inputs, **FA2)
        mean = inputs["v"].mean(1, keepdim=True).expand_as(inputs["q"])
        torch.testing.assert_close(got, mean, rtol=1e-5, atol=1e-6)


def test_more_queries_than_keys_leave_rows_without_keys(loads):
    got = check(qkv(2 * TILE + 5, TILE - 3) | {"causal": True})
    empty = TILE + 8
    assert (got.out[:, :empty] == 0).all() and (got.lse[..., :empty] == -INF).all()
    assert torch.isfinite(got.lse[..., empty:]).all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)
def test_what_no_row_may_see_is_not_read(garbage, loads):
    """Slack, past seqused, left of the window, right of the diagonal."""
    inputs = packed([40, 1, 33], [45, 0, 70], slack=40)
    inputs |= {"window_size": (10, 0)}
    inputs["seqused_q"] = torch.tensor([35, 1, 20], dtype=torch.int32)
    inputs["seqused_k"] = torch.tensor([33, 0, 66], dtype=torch.int32)
    rows = torch.ones(len(inputs["q"]), dtype=torch.bool)
    rows[:35] = rows[40:61] = False
    keys = torch.ones(len(inputs["k"]), dtype=torch.bool)
    keys[:33] = keys[45 + 46 - 10 : 45 + 66] = False  # row 0 of the third stands on key 46
    want = check(inputs)
    for name, hidden in (("q", rows), ("k", keys), ("v", keys)):
        inputs[name] = inputs[name].masked_fill(hidden[:, None, None], garbage)
    got = testing.run(**inputs, **FA2, backward=False)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    assert (got.out[rows] == 0).all() and (got.lse[:, rows] == -INF).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)
def test_a_key_that_a_mask_hides_from_every_row(garbage, kind, loads):
    inputs = qkv(40, 70)
    hidden = torch.zeros(70, dtype=torch.bool).index_fill(0, torch.tensor([0, 31, 32, 69]), True)
    mask = ~hidden
    if kind == "float":
        mask = torch.zeros(70).masked_fill(hidden, -INF)
    want = check(inputs | {"attn_bias": mask})
    for name in "kv":
        inputs[name][:, hidden] = garbage
    got = testing.run(**inputs, attn_bias=mask, **FA2, backward=False)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_bool_mask_rows_without_keys_and_a_sink_of_minus_infinity():
    mask = torch.ones(40, 70, dtype=torch.bool)
    mask[3], mask[35, 1:] = False, False
    got = check(qkv(40, 70) | {"attn_bias": mask})
    assert (got.out[:, 3] == 0).all() and (got.lse[..., 3] == -INF).all()
    sink = torch.tensor([-INF, 0.5])
    with_sink = check(qkv(40, 70) | {"attn_bias": mask, "sink": sink})
    assert torch.equal(with_sink.out[:, :, 0], got.out[:, :, 0])
    assert with_sink.lse[0, :, 3].tolist() == [-INF, 0.5]


def test_a_value_that_is_seen_and_not_finite_shows():
    for garbage in (NAN, INF):
        inputs = qkv(5, 40)
        inputs["v"][:, 33, :, 2] = garbage
        out = flash_attn_func(**inputs, **FA2)
        assert not torch.isfinite(out[..., 2]).any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_hundreds_of_thousands(sign):
    q = torch.full((1, 1, 1, 16), 400.0 * sign, dtype=torch.float16)
    k = torch.full((1, 35, 1, 16), 400.0, dtype=torch.float16)
    v = draw(1, 35, 1, 16, seed=1, dtype=torch.float16)
    out, lse = flash_attn_func(q, k, v, softmax_scale=0.25, return_lse=True, **FA2)
    torch.testing.assert_close(out.double(), v.double().mean(1, keepdim=True), rtol=0, atol=2e-3)
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 640000.0 * sign + math.log(35)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
def test_bad_boundaries_lead_to_no_write_outside_of_the_outputs(bounds, loads):
    with guarded_memory():
        out = flash_attn_varlen_func(**with_bounds(bounds), **FA2)
    assert torch.isfinite(out).all()
