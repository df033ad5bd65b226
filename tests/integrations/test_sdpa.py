"""torch's contract of scaled_dot_product_attention, and torch's own calls run on tilewise."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import tilewise
from tilewise.integrations import aten, halves, sdpa
from tilewise.integrations.sdpa import scaled_dot_product_attention


def by_torch(*arguments, **further):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*arguments, **further)


def assert_same(q, k, v, mask=None, **further):
    """out and all gradients equal torch's own mathematics, in float64."""
    results = []
    for function in (scaled_dot_product_attention, by_torch):
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        bias = mask
        if mask is not None and mask.is_floating_point():
            bias = mask.double().requires_grad_()
            leaves.append(bias)
        out = function(*leaves[:3], attn_mask=bias, **further)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        results.append((out.detach(), *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    return results[0][0]


def qkv(seqlen_q=5, seqlen_k=7, lead=(2, 4), lead_k=None, head_dim=8, head_dim_v=8):
    lead_k = lead if lead_k is None else lead_k
    return (
        torch.randn(*lead, seqlen_q, head_dim),
        torch.randn(*lead_k, seqlen_k, head_dim),
        torch.randn(*lead_k, seqlen_k, head_dim_v),
    )


@pytest.mark.parametrize("lead", [(), (3,), (2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_number_of_dimensions(lead, is_causal):
    out = assert_same(*qkv(lead=lead, head_dim_v=6), is_causal=is_causal)
    assert out.shape == (*lead, 5, 6)


@pytest.mark.parametrize("seqlens", [(1, 1), (5, 5), (1, 7), (3, 7), (7, 3), (7, 1), (140, 70)])
def test_c03_causal_is_aligned_top_left(seqlens):
    q, k, v = qkv(*seqlens)
    out = assert_same(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0].double())


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(5, 7), (7,), (1, 7), (5, 1), (4, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (1, 4, 1, 7), (1, 1)],
    ids=str,
)
def test_masks_broadcast(shape, kind):
    mask = torch.rand(shape) > 0.3 if kind == torch.bool else torch.randn(shape)
    if kind == torch.bool:
        mask[..., 0] = True
    assert_same(*qkv(), mask)


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 5, 7), (2, 1, 1, 5, 7), (2, 3, 4, 5, 7)], ids=str)
def test_masks_of_more_dimensions(shape):
    assert_same(*qkv(lead=(2, 3, 4)), torch.randn(shape))


def test_leading_dimensions_broadcast():
    assert_same(*qkv(lead=(3, 4), lead_k=(1, 4)))
    assert_same(*qkv(lead=(1, 4), lead_k=(3, 4)))
    assert_same(*qkv(lead=(2, 1, 4), lead_k=(3, 4)), is_causal=True)
    assert_same(*qkv(lead=(2, 4), lead_k=(2, 1)))  # one head of keys
    assert_same(*qkv(lead=(2, 1), lead_k=(2, 4)))  # and one of queries


@pytest.mark.parametrize("nheads_kv", [1, 2, 4])
def test_grouped_heads(nheads_kv):
    q, k, v = qkv(lead_k=(2, nheads_kv))
    assert_same(q, k, v, enable_gqa=True)
    assert_same(q, k, v, torch.randn(4, 5, 7), enable_gqa=True)
    if nheads_kv == 2:
        with pytest.raises(tilewise.InvalidInputError, match="enable_gqa"):
            scaled_dot_product_attention(q, k, v)
    with pytest.raises(tilewise.InvalidInputError, match="enable_gqa"):
        scaled_dot_product_attention(q[:, :3], *qkv(lead=(2, 2))[1:], enable_gqa=True)


def test_scale():
    assert_same(*qkv(), scale=0.3)
    assert_same(*qkv(), scale=0.0)


def test_c01_rows_without_keys_are_zero():
    q, k, v = (x.requires_grad_() for x in qkv(4, 4))
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, 0] = mask[1, :2] = True
    for given in (mask, torch.zeros(4, 4).masked_fill(~mask, -math.inf)):
        out = scaled_dot_product_attention(q, k, v, given)
        assert (out[:, :, 2:] == 0).all()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.isfinite(g).all() for g in grads)
        assert (grads[0][:, :, 2:] == 0).all() and (grads[1][:, :, 2:] == 0).all()


def test_c03_and_others_are_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    for name, arguments in {
        "attn_mask": (q, k, v, torch.ones(3, 7, dtype=torch.bool)),
        "key": (q, k[:, :3], v[:, :3]),
        "query": (q[0, 0, 0], k, v),
    }.items():
        with pytest.raises(tilewise.InvalidInputError, match=name):
            scaled_dot_product_attention(*arguments)
    with pytest.raises(tilewise.InvalidInputError, match="attn_bias"):
        scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.long))
    with pytest.raises(tilewise.InvalidInputError, match="key"):
        scaled_dot_product_attention(q, qkv(lead=(3, 4))[1], v)
    with pytest.raises(tilewise.InvalidInputError, match="dropout_p"):
        scaled_dot_product_attention(q, k, v, dropout_p=1.0)


def test_dropout():
    q, k, v = qkv(64, 64)
    torch.manual_seed(3)
    out = scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25)
    assert 0 < out.std() < 0.3 and abs(out.mean() - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = (x.to(dtype) for x in qkv(64, 64))
    want = by_torch(*(x.double() for x in (q, k, v)), is_causal=True)
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == dtype
    assert (out - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()


def test_compiles():
    q, k, v = (x.requires_grad_() for x in qkv())
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for mask, causal in ((None, True), (torch.randn(2, 1, 5, 7), False)):
        got, want = (
            f(q, k, v, mask, 0.0, causal) for f in (compiled, scaled_dot_product_attention)
        )
        torch.testing.assert_close(got, want)


# activate


@pytest.fixture
def active(monkeypatch):
    """How often the halves ran, with tilewise in torch's place."""
    calls = {"forward": 0, "backward": 0}
    for name in calls:
        found = getattr(halves, name)

        def counted(*arguments, name=name, found=found):
            calls[name] += 1
            return found(*arguments)

        monkeypatch.setattr(halves, name, counted)
    sdpa.activate()
    yield calls
    sdpa.deactivate()


@pytest.mark.parametrize(
    ("further", "mask"),
    [
        ({}, None),
        ({"is_causal": True}, None),
        ({"scale": 0.4}, None),
        ({}, (2, 1, 5, 7)),
        ({}, (5, 7)),
    ],
    ids=str,
)
def test_torchs_calls_run_on_tilewise(active, further, mask):
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = None if mask is None else torch.randn(mask)
    results = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **further)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert active == {"forward": 1, "backward": 1}
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("seqlens", [(7, 3), (3, 7)])
def test_torchs_causal_calls_stay_top_left(active, seqlens):
    q, k, v = (x.requires_grad_() for x in qkv(*seqlens))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert active == {"forward": 1, "backward": 1}
    want = by_torch(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), (q, k, v)))


def test_deactivate_restores():
    q, k, v = qkv()
    before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    on_gpus = [f"aten::{f.__name__}" for f in (*aten.SHARED, *aten.CUDA)]
    had = [has(name, "CUDA") for name in on_gpus]
    for _ in range(2):
        sdpa.activate()
        sdpa.activate()  # once more changes nothing
        assert torch_attention.current_flash_attention_impl() == "tilewise"
        assert all(has(name, "CUDA") for name in on_gpus)
        sdpa.deactivate()
        sdpa.deactivate()
    assert torch_attention.current_flash_attention_impl() is None
    assert [has(name, "CUDA") for name in on_gpus] == had
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), before)


def test_compiled_torch_calls(active):
    """Strides are those that torch promises to its compiler, for any layout of the inputs."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True)  # inductor checks them
    plain = qkv(5, 5)
    rows_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain)
    for inputs in (plain, rows_first):
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = []
        for call in (compiled, attend):
            out = call(*leaves)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        torch.testing.assert_close(*results)
    assert active["forward"] == active["backward"] == 4


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
def test_varlen_attn_runs_on_a_cpu(active, window):
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    q, k, v = (x.requires_grad_() for x in (torch.randn(9, 4, 8), *torch.randn(2, 9, 2, 8)))
    out, lse = varlen_attn(
        q, k, v, cu, cu, 5, 5, window_size=window, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    want, want_lse = tilewise.flash_attn_varlen_func(
        q, k, v, cu, cu, 5, 5, window_size=window, return_lse=True
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), (q, k, v)))
    assert active == {"forward": 1, "backward": 1}


def test_a_layer_of_torch(active):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
    x = torch.randn(2, 6, 32, requires_grad=True)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    got = layer(x, src_key_padding_mask=padding)
    assert active["forward"] == 1
    sdpa.deactivate()
    torch.testing.assert_close(got[~padding], layer(x, src_key_padding_mask=padding)[~padding])


# The operators for GPUs, on CPU tensors: what dispatches to them there is torch's


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_dense_operators(dropout_p, is_causal):
    q, k, v = qkv(5, 5, lead_k=(2, 2))
    found = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)
    assert found[0].stride() == torch.empty_like(q).stride()
    assert found[6].dtype == torch.uint64 and found[6].shape == (2,)
    grads = aten._scaled_dot_product_flash_attention_backward(
        2 * found[0], q, k, v, *found[:2], *found[2:6], dropout_p, is_causal, *found[6:8]
    )
    seed = int(found[6].view(torch.int64)[0])
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.flash_attn_func(
        *leaves, dropout_p, causal=is_causal, seed=seed, return_lse=True
    )
    torch.testing.assert_close(found[0].transpose(1, 2), out)
    torch.testing.assert_close(found[1], lse)
    want = torch.autograd.grad(out.square().sum(), leaves)
    for got, grad, x in zip(grads, want, (q, k, v), strict=True):
        torch.testing.assert_close(got.transpose(1, 2), grad)
        assert got.stride() == torch.empty_like(x).stride()


def test_the_operators_without_autograd():
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    found = aten._flash_attention_forward(
        q, k, v, None, None, 6, 6, 0.0, True, False, window_size_left=2, num_splits=1
    )
    want = tilewise.flash_attn_func(q, k, v, causal=True, window_size=(2, -1))
    torch.testing.assert_close(found[0], want)
    out = torch.empty_like(q)
    lse = aten._flash_attention_forward_no_dropout_inplace(
        out, q, k, v, None, None, 6, 6, 0.0, True, False, window_size_left=2
    )
    assert torch.equal(out, found[0]) and torch.equal(lse, found[1])


@pytest.mark.parametrize(
    "further",
    [{"block_table": torch.zeros(2, 1)}, {"seqused_k": torch.ones(2)}, {"some_new_one": 1}],
    ids=lambda x: next(iter(x)),
)
def test_operators_refuse_what_they_have_not(further):
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(tilewise.UnsupportedError, match=next(iter(further))):
        aten._flash_attention_forward(q, q, q, None, None, 6, 6, 0.0, True, False, **further)
    with pytest.raises(tilewise.UnsupportedError, match="return_debug_mask"):
        aten._flash_attention_forward(q, q, q, None, None, 6, 6, 0.0, True, True)
    cu = torch.tensor([0, 6])
    with pytest.raises(tilewise.InvalidInputError, match="cum_seq_k"):
        aten._flash_attention_forward(q[0], q[0], q[0], cu, None, 6, 6, 0.0, True, False)
