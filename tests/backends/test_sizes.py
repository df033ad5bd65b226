"""Sizes at the edges: none, one, primes, tiles and one beside; heads, widths, batches, strides."""

import itertools

import pytest
import torch

from tilewise import flash_attn_func
from tilewise.testing import run

SMALL = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 7), (7, 1), (13, 31), (31, 13), (15, 17), (17, 15)]
PRIMES = [(127, 131), (131, 127), (257, 61), (61, 257)]
TILES = [*itertools.product((511, 512, 513), (255, 256, 257)), (255, 513), (256, 512), (257, 511)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 20)},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 3)},
    "beyond": {"window_size": (1000, 2000)},
}


def draw(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)


def qkv(sq, sk, h=2, hk=2, d=8, dv=8, batch=1, dtype=torch.float32):
    return {
        "q": draw(batch, sq, h, d, dtype=dtype, seed=1),
        "k": draw(batch, sk, hk, d, dtype=dtype, seed=2),
        "v": draw(batch, sk, hk, dv, dtype=dtype, seed=3),
    }


def pair_id(pair):
    return f"{pair[0]}x{pair[1]}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", SMALL, ids=pair_id)
def test_no_rows_one_row_and_few_rows(lengths, mask, engine, assert_agrees):
    for dtype in (torch.float64, torch.bfloat16):
        assert_agrees(qkv(*lengths, dtype=dtype) | MASKS[mask], engine)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("lengths", PRIMES + TILES, ids=pair_id)
def test_primes_and_the_neighbours_of_a_tile(lengths, mask, engine, assert_agrees):
    assert_agrees(qkv(*lengths) | MASKS[mask], engine)


@pytest.mark.parametrize("lengths", [(513, 257), (257, 513)], ids=pair_id)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_tile_edges_in_other_dtypes_with_dropout_and_bias(lengths, dtype, engine, assert_agrees):
    sq, sk = lengths
    bias = draw(1, 2, sq, sk, dtype=dtype, seed=4)
    assert_agrees(
        qkv(sq, sk, dtype=dtype)
        | {"causal": True, "attn_bias": bias, "dropout_p": 0.2, "seed": 3, "softcap": 5.0},
        engine,
    )


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (40, 7), (7, 40), (600, 300)], ids=pair_id)
def test_rows_without_keys_are_zero_and_minus_infinity_exactly(lengths, engine):
    sq, sk = lengths
    inputs = qkv(sq, sk)
    got = run(**inputs, **engine, causal=True)
    empty = max(sq - sk, 0) if sk else sq
    assert (got.out[:, :empty] == 0).all() and (got.lse[..., :empty] == -torch.inf).all()
    assert (got.dq[:, :empty] == 0).all()
    assert torch.isfinite(got.lse[..., empty:]).all()
    assert all(torch.isfinite(g).all() for g in (got.out, got.dq, got.dk, got.dv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [1, 8, 33, 64, 72, 128, 256, 512])
def test_head_dims(d, dtype, engine, assert_agrees):
    assert_agrees(qkv(37, 53, d=d, dv=d, dtype=dtype) | {"causal": True}, engine)


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (8, 512), (512, 8), (64, 1), (1, 64)], ids=str)
def test_values_much_wider_or_narrower_than_keys(d, dv, engine, assert_agrees):
    assert_agrees(qkv(37, 53, d=d, dv=dv), engine)


@pytest.mark.parametrize(
    "heads", [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (12, 4), (12, 1)], ids=str
)
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_batches_and_heads(batch, heads, engine, assert_agrees):
    h, hk = heads
    assert_agrees(qkv(19, 23, h=h, hk=hk, batch=batch) | {"causal": True}, engine)


@pytest.mark.parametrize("hk", [64, 16, 1])
def test_many_heads_whose_chunks_split(hk, engine, assert_agrees):
    slopes = torch.linspace(0, 0.1, 64).expand(2, 64).clone()
    slopes[1] += 0.05
    assert_agrees(
        qkv(256, 272, h=64, hk=hk, d=4, dv=4, batch=2)
        | {"dropout_p": 0.25, "seed": -7, "alibi_slopes": slopes, "sink": draw(64, seed=9)},
        engine,
    )


def nan_like(x):
    return torch.full_like(x, torch.nan)


LAYOUTS = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "seqlen_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "width_first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every_second": lambda x: torch.stack([x, nan_like(x)], -1).flatten(-2)[..., ::2],
    "every_second_row": lambda x: torch.stack([x, nan_like(x)], 2).flatten(1, 2)[:, ::2],
    "part_of_wider": lambda x: torch.cat([x, nan_like(x)], -1)[..., : x.shape[-1]],
    "expanded_batch": lambda x: x[:1].expand_as(x),
    "expanded_heads": lambda x: x[:, :, :1].expand_as(x),
    "expanded_rows": lambda x: x[:, :1].expand_as(x),
    "expanded_width": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_any_strides_give_what_a_contiguous_copy_gives(layout, batch, engine):
    strided = {n: LAYOUTS[layout](x.clone()) for n, x in qkv(21, 35, batch=batch).items()}
    copied = {n: x.clone(memory_format=torch.contiguous_format) for n, x in strided.items()}
    got, want = (run(**x, **engine, causal=True) for x in (strided, copied))
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert a.is_contiguous(), name


def test_strided_gradients_of_outputs_are_read_as_they_lie(engine):
    q, k, v = (x.requires_grad_() for x in qkv(21, 35).values())
    out, lse = flash_attn_func(q, k, v, return_lse=True, **engine)
    dout = draw(1, 2, 8, 21, seed=5).permute(0, 3, 1, 2)
    dlse = draw(21, 2, 1, seed=6).permute(2, 1, 0)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    want = torch.autograd.grad((out, lse), (q, k, v), (dout.contiguous(), dlse.contiguous()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


BIAS_SHAPES = [
    (), (1,), (35,), (21, 1), (21, 35), (1, 21, 35), (4, 1, 1), (4, 21, 35), (1, 1, 1, 35),
    (2, 1, 1, 35), (2, 1, 21, 1), (1, 4, 21, 35), (2, 4, 1, 1), (2, 4, 21, 35),
]  # fmt: skip


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_bias_of_every_broadcast_shape(shape, kind, engine, assert_agrees):
    bias = draw(*shape, seed=4) if shape else draw(1, seed=4).reshape(())
    if kind == "bool":
        bias = bias > -0.7
    assert_agrees(qkv(21, 35, h=4, hk=2, batch=2) | {"attn_bias": bias}, engine)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30, 3.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scales_of_any_sign(scale, softcap, engine, assert_agrees):
    assert_agrees(qkv(21, 35) | {"softmax_scale": scale, "softcap": softcap}, engine)


@pytest.mark.parametrize("p", [1e-6, 0.5, 0.999])
def test_dropout_at_its_ends(p, engine, assert_agrees):
    assert_agrees(qkv(40, 50) | {"dropout_p": p, "seed": 2**63 + 5}, engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_with_one_key_each(dtype, engine, assert_agrees):
    """out is v, so that the gradients of q and k come from lse alone."""
    inputs = qkv(40, 40, dtype=dtype)
    got = assert_agrees(inputs | {"window_size": (0, 0)}, engine)
    torch.testing.assert_close(got.out, inputs["v"])


@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0, 0], [0, 5, 5, 12], [0, 1, 2, 12]], ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["all", "seqused"])
def test_packed_sequences_of_any_count_and_length(cu, used, engine, assert_agrees):
    bounds = torch.tensor(cu, dtype=torch.int32)
    inputs = {name: x[0] for name, x in qkv(12, 12, h=4, hk=2, dtype=torch.float64).items()}
    inputs |= {
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds.long(),
        "max_seqlen_q": 20,
        "max_seqlen_k": 17,
        "causal": True,
        "alibi_slopes": draw(len(cu) - 1, 4, seed=8).abs(),
    }
    if used:
        inputs |= {"seqused_q": bounds.diff() // 2, "seqused_k": (bounds.diff() + 1) // 2}
    got = assert_agrees(inputs, engine)
    past = cu[-1]
    assert (got.out[past:] == 0).all() and (got.lse[:, past:] == -torch.inf).all()
    assert (got.dq[past:] == 0).all() and (got.dk[past:] == 0).all() and (got.dv[past:] == 0).all()


def test_long_packed_sequences_cross_tiles(engine, assert_agrees):
    bounds_q = torch.tensor([0, 513, 514, 771], dtype=torch.int32)
    bounds_k = torch.tensor([0, 257, 770, 771], dtype=torch.int32)
    assert_agrees(
        {
            "q": draw(780, 4, 8, seed=1),
            "k": draw(775, 2, 8, seed=2),
            "v": draw(775, 2, 8, seed=3),
            "cu_seqlens_q": bounds_q,
            "cu_seqlens_k": bounds_k,
            "max_seqlen_q": 513,
            "max_seqlen_k": 513,
            "window_size": (300, 10),
            "dropout_p": 0.1,
            "seed": 11,
        },
        engine,
    )
