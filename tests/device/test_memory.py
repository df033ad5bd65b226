"""What stands in memory where no row may look, any strides, and no memory that grows as N x N."""

import pytest
import torch

from tilewise import flash_attn_func, testing

from .tools import DTYPES, draw, name_of, packed, qkv, results, same_bits

GARBAGE = {"nan": torch.nan, "inf": torch.inf, "minus_inf": -torch.inf}


@pytest.fixture(autouse=True)
def _poisoned():
    with testing.poisoned_memory():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_slack_rows_and_rows_past_seqused_are_not_read(garbage, dtype, triton_engine, loads):
    found = []
    used = [150, 0, 60]
    for value in (0.0, GARBAGE[garbage]):
        inputs = packed([200, 3, 90], [200, 3, 90], dtype=dtype, slack=70)
        dout = draw(*inputs["q"].shape, seed=4, dtype=dtype)
        past = torch.cat([torch.arange(150, 200), torch.arange(200, 203), torch.arange(263, 363)])
        for x in (inputs["q"], inputs["k"], inputs["v"], dout):
            x[past.cuda()] = value
        seqused = torch.tensor(used, dtype=torch.int32, device="cuda")
        inputs |= {"seqused_q": seqused, "seqused_k": seqused, "window_size": (100, 30)}
        found.append(results(inputs, dout, **triton_engine))
    same_bits(found[1], found[0])
    for name in ("out", "dq", "dk", "dv"):
        assert (found[0][name][past.cuda()] == 0).all(), name
        assert torch.isfinite(found[0][name]).all(), name


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_keys_that_a_mask_hides_from_every_row(garbage, kind, triton_engine, loads):
    found = []
    hidden = torch.tensor([0, 17, 64, 65, 200, 332], device="cuda")
    for value in (0.0, GARBAGE[garbage]):
        inputs = qkv()
        inputs["k"][:, hidden] = value
        inputs["v"][:, hidden] = value
        mask = torch.ones(333, dtype=torch.bool, device="cuda").index_fill(0, hidden, False)
        if kind == "float":
            mask = torch.zeros(333, device="cuda").masked_fill(~mask, -torch.inf)
        found.append(results(inputs | {"attn_bias": mask}, **triton_engine))
    same_bits(found[1], found[0])
    assert all(torch.isfinite(x).all() for x in found[0].values())
    assert (found[0]["dk"][:, hidden] == 0).all() and (found[0]["dv"][:, hidden] == 0).all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_keys_left_of_every_window(garbage, triton_engine, loads):
    found = []
    for value in (0.0, GARBAGE[garbage]):
        inputs = qkv(sq=100, sk=333)
        for name in "kv":
            inputs[name][:, :213] = value  # row 0 stands on key 233 and sees from key 213 on
        found.append(results(inputs, window_size=(20, 0), **triton_engine))
    same_bits(found[1], found[0])
    assert all(torch.isfinite(x).all() for x in found[0].values())


def nan_beside(x, dim):
    return torch.stack([x, torch.full_like(x, torch.nan)], dim + 1).flatten(dim, dim + 1)


LAYOUTS = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "seqlen_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "width_first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every_second_column": lambda x: nan_beside(x, 3)[..., ::2],
    "every_second_row": lambda x: nan_beside(x, 1)[:, ::2],
    "part_of_wider": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., :64],
    "one_element_in": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "expanded_batch": lambda x: x[:1].expand_as(x),
    "expanded_heads": lambda x: x[:, :, :1].expand_as(x),
    "expanded_rows": lambda x: x[:, :1].expand_as(x),
    "expanded_width": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_what_a_contiguous_copy_gives(layout, triton_engine, loads):
    strided = {n: LAYOUTS[layout](x) for n, x in qkv().items()}
    copied = {n: x.clone(memory_format=torch.contiguous_format) for n, x in strided.items()}
    dout = LAYOUTS[layout](draw(2, 200, 4, 64, seed=4))
    got = results(strided, dout, causal=True, **triton_engine)
    want = results(copied, dout.contiguous(), causal=True, **triton_engine)
    for name, x in got.items():
        assert x.is_contiguous(), name
        # rows by pointers and rows by TMA go through different instructions: a rounding apart
        ulp = 2 * torch.finfo(x.dtype).eps * want[name].abs().max().item()
        torch.testing.assert_close(
            x, want[name], rtol=0, atol=ulp, msg=lambda m, n=name: f"{n}: {m}"
        )


BIAS_SHAPES = [
    (1, 1, 1, 333), (2, 1, 1, 333), (2, 1, 200, 1), (1, 4, 200, 333), (2, 4, 1, 1), (1, 1, 1, 1),
    (2, 4, 200, 333), (1, 1, 200, 333),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_of_every_broadcast_shape(shape, dtype, triton_engine, assert_agrees):
    bias = draw(*shape, seed=4, dtype=dtype)
    assert_agrees(qkv(dtype=dtype) | {"attn_bias": bias}, triton_engine)
    assert_agrees(qkv(dtype=dtype) | {"attn_bias": bias > -0.7}, triton_engine)


def test_rows_without_keys_are_exact(triton_engine, loads):
    got = results(qkv(sq=333, sk=200), causal=True, **triton_engine)
    assert (got["out"][:, :133] == 0).all() and (got["lse"][..., :133] == -torch.inf).all()
    assert (got["dq"][:, :133] == 0).all()
    assert all(torch.isfinite(got[n]).all() for n in ("out", "dq", "dk", "dv"))


@pytest.mark.alone
@pytest.mark.parametrize("extra", ["plain", "bias_row", "bool_row"])
def test_memory_grows_with_the_length_and_not_its_square(extra, triton_engine):
    """C26: scores alone would take 4 GiB, keys and values for each head 64 MiB."""
    length, heads = 8192, 32
    inputs = qkv(1, length, length, heads, 2)
    if extra == "bias_row":
        inputs["attn_bias"] = draw(1, 1, 1, length, seed=4)
    elif extra == "bool_row":
        inputs["attn_bias"] = draw(1, 1, 1, length, seed=4) > -1
    with torch.no_grad():
        flash_attn_func(**inputs, **triton_engine)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = results(inputs, **triton_engine)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    # dout, and what the backward keeps beside its results: lse's like, in float32
    expected = sum(x.numel() * x.element_size() for x in got.values())
    expected += inputs["q"].numel() * 2 + 4 * heads * length * 4
    if triton_engine["algorithm"] == "fa1":  # the first paper's running results, in float32
        expected += heads * length * (64 + 2) * 4
    assert grown < expected + 2**24
