"""Code written for flash-attn runs unchanged once its names are installed."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

import tilewise
from tilewise.integrations import flash_attn as integration


@pytest.fixture(autouse=True)
def _installed():
    integration.install()
    yield
    integration.uninstall()


class Encoder(torch.nn.Module):
    """Two layers of packed self attention, as one writes them for flash-attn."""

    def __init__(self, width=32, nheads=4):
        super().__init__()
        from flash_attn.layers.rotary import RotaryEmbedding

        self.nheads = nheads
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.rotary = RotaryEmbedding(width // nheads)

    def forward(self, x, mask, causal):
        from flash_attn import flash_attn_varlen_qkvpacked_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

        batch, seqlen, width = x.shape
        for project, out in zip(self.qkv, self.out, strict=True):
            qkv = project(x).view(batch, seqlen, 3, self.nheads, width // self.nheads)
            qkv = self.rotary(qkv)
            packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, mask)
            attended = flash_attn_varlen_qkvpacked_func(
                packed, cu_seqlens, max_seqlen, 0.0, softmax_scale=0.3, causal=causal
            )
            rows = index_first_axis(x.flatten(0, 1), indices) + out(attended.flatten(1))
            x = pad_input(rows, indices, batch, seqlen)
        return x


@pytest.mark.parametrize("causal", [False, True])
def test_a_model_written_for_flash_attn(causal):
    model, x = Encoder(), torch.randn(2, 9, 32, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    out = model(x, mask, causal)
    grads = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    assert (out[1, 5:] == 0).all()

    def attend(layer, x):  # the same in plain torch
        q, k, v = model.qkv[layer](x).view(*x.shape[:2], 3, 4, 8).unbind(2)
        angle = torch.arange(9.0)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]

        def rotate(y):
            turned = torch.complex(*y.chunk(2, -1)) * turn
            return torch.cat([turned.real, turned.imag], -1)

        scores = torch.einsum("bihd,bjhd->bhij", rotate(q), rotate(k)) * 0.3
        seen = mask.bool()[:, None, None, :]
        seen = seen & torch.ones(9, 9, dtype=torch.bool).tril() if causal else seen
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return model.out[layer](torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    want = x
    for layer in range(2):
        want = (want + attend(layer, want)) * mask[..., None]
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad(want.square().sum(), [x, *model.parameters()])
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


# install


def test_every_module_resolves():
    import flash_attn
    import flash_attn.bert_padding
    import flash_attn.flash_attn_interface
    import flash_attn.layers.rotary
    import flash_attn_interface
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, flash_attn_unpadded_func

    assert flash_attn.flash_attn_func is tilewise.flash_attn_func
    assert flash_attn.flash_attn_interface.flash_attn_func is tilewise.flash_attn_func
    assert flash_attn_interface.flash_attn_func is not tilewise.flash_attn_func
    assert tuple(int(n) for n in flash_attn.__version__.split(".")) >= (2, 7, 0)
    assert importlib.util.find_spec("flash_attn") is not None
    assert callable(_flash_attn_varlen_forward) and callable(flash_attn_unpadded_func)
    public = set(dir(flash_attn.bert_padding)) | set(dir(flash_attn_interface))
    assert not public & {"torch", "Tensor", "varlen", "missing", "refuse", "split_heads", "Options"}


def test_what_is_not_there_raises_by_name():
    import flash_attn
    import flash_attn_interface

    with pytest.raises(ImportError, match="flash_attn_triton"):
        from flash_attn import flash_attn_triton  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.ops"):
        importlib.import_module("flash_attn.ops.fused_dense")
    with pytest.raises(AttributeError, match=r"flash_attn\.no_such_function"):
        flash_attn.no_such_function  # noqa: B018
    assert not hasattr(flash_attn, "flash_attn_triton")
    x = torch.randn(1, 4, 1, 8)
    for module in (flash_attn, flash_attn_interface):
        with pytest.raises(tilewise.UnsupportedError, match="flash_attn_with_kvcache"):
            module.flash_attn_with_kvcache(x, x, x)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn.bert_padding", "flash_attn_interface"])
def test_the_real_one_is_not_replaced(name, monkeypatch):
    integration.uninstall()
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(tilewise.UnsupportedError, match=f"{name} is imported already"):
        integration.install()
    integration.uninstall()
    assert name in sys.modules
    others = [x for x in sys.modules if x.startswith("flash_attn") and x != name]
    assert not others


def test_install_and_uninstall_again():
    import flash_attn

    integration.install()
    assert sys.modules["flash_attn"] is flash_attn
    integration.uninstall()
    integration.uninstall()
    assert importlib.util.find_spec("flash_attn") is None


# Cases of the public functions


def test_c03_c07_alignment_and_window():
    import flash_attn
    import flash_attn_interface

    q, k, v = torch.zeros(1, 2, 1, 4), torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4)
    for module in (flash_attn, flash_attn_interface):
        out = module.flash_attn_func(q, k, v, causal=True)
        torch.testing.assert_close(out[0, 0, 0], v[0, :4, 0].mean(0))
        out = module.flash_attn_func(q, k, v, causal=True, window_size=(2, 0))
        torch.testing.assert_close(out[0, 0, 0], v[0, 1:4, 0].mean(0))
        torch.testing.assert_close(out[0, 1, 0], v[0, 2:5, 0].mean(0))


def test_c13_boundaries_of_packed_rows():
    import flash_attn
    import flash_attn_interface

    cu = torch.tensor([0, 3, 5, 7, 10], dtype=torch.int32)
    q, k, v = (torch.randn(2, 5, 2, 4) for _ in range(3))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    same = (documents[:, :, None] == documents[:, None])[:, None]
    want = tilewise.flash_attn_func(q, k, v, causal=True, attn_bias=same)
    for module in (flash_attn, flash_attn_interface):
        out = module.flash_attn_varlen_func(*flat, cu, cu, 3, 3, causal=True)
        torch.testing.assert_close(out.view(2, 5, 2, 4), want)


# FlashAttention-3's module


def test_the_fourth_argument_is_the_scale():
    import flash_attn_interface as fa3

    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    want = tilewise.flash_attn_func(q, k, v, softmax_scale=0.7, causal=True)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, 0.7, True), want)
    _, lse = fa3.flash_attn_func(q, k, v, 0.7, True, return_attn_probs=True)
    assert lse.shape == (1, 2, 6)
    torch.testing.assert_close(
        fa3.flash_attn_func(q, k, v, num_splits=3), fa3.flash_attn_func(q, k, v)
    )
    qkv = torch.stack([q, k, v], 2)
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(qkv, 0.7, True), want)
    grouped = torch.cat([q, k[:, :, :1], v[:, :, :1]], 2)
    want = tilewise.flash_attn_func(q, k[:, :, :1], v[:, :, :1])
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(grouped, num_heads_q=2), want)
    with pytest.raises(tilewise.InvalidInputError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(grouped)
    for name in ("qv", "q_descale", "attention_chunk"):
        with pytest.raises(tilewise.UnsupportedError, match=name):
            fa3.flash_attn_func(q, k, v, **{name: torch.ones(1)})


def test_used_lengths_in_the_packed_function():
    import flash_attn_interface as fa3

    q, k, v = (torch.randn(7, 2, 8) for _ in range(3))
    cu, used = torch.tensor([0, 3, 7]), torch.tensor([2, 4])
    got = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, None, used, 0.5)
    want = tilewise.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, softmax_scale=0.5, seqused_k=used)
    torch.testing.assert_close(got, want)


# Forward and backward apart


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_a_ring(packed, version):
    """Parts of the keys, joined by lse; gradients from the joined out and lse."""
    import flash_attn_interface as fa3
    from flash_attn import flash_attn_interface as fa2

    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 8, 2, 8))
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    options = {
        "softmax_scale": 0.4,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
    }
    further = {"dropout_p": 0.0, "alibi_slopes": None}
    if packed:
        where = {"cu_seqlens_q": torch.tensor([0, 8, 16]), "cu_seqlens_k": cu}
        where |= {"max_seqlen_q": 8, "max_seqlen_k": 4}
    else:
        where = {}

    def shaped(x):
        return x.flatten(0, 1) if packed else x

    def forward(k, v):
        if version == 3:
            return fa3._flash_attn_forward(shaped(q), k, v, **where, **options)[:2]
        if packed:
            return fa2._flash_attn_varlen_forward(
                shaped(q), k, v, **where, causal=False, **options, **further
            )[:2]
        return fa2._flash_attn_forward(
            q, k, v, causal=False, return_softmax=False, **options, **further
        )[:2]

    halves = [(shaped(k[:, s]), shaped(v[:, s])) for s in (slice(4), slice(4, 8))]
    with torch.no_grad():
        out, lse = tilewise.merge_attention([forward(*half) for half in halves])
    want = tilewise.flash_attn_func(q, k, v, softmax_scale=0.4)
    torch.testing.assert_close(out, shaped(want))
    dout = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), dout)
    dq = torch.zeros_like(shaped(q))
    for s, half in zip((slice(4), slice(4, 8)), halves, strict=True):
        parts = [torch.empty_like(x) for x in (shaped(q), *half)]
        given = (shaped(dout), shaped(q), *half, out, lse)
        if version == 3:
            places = dict(zip(("dq", "dk", "dv"), parts, strict=True))
            fa3._flash_attn_backward(*given, **where, **places, **options)
        elif packed:
            fa2._flash_attn_varlen_backward(
                *given, *parts, **where, causal=False, deterministic=False, **options, **further
            )
        else:
            fa2._flash_attn_backward(
                *given, *parts, causal=False, deterministic=False, **options, **further
            )
        dq += parts[0]
        for part, grad in zip(parts[1:], wanted[1:], strict=True):
            torch.testing.assert_close(part, shaped(grad[:, s]))
    torch.testing.assert_close(dq, shaped(wanted[0]))


def test_halves_compile():
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    def both(q, k, v, dq, dk, dv):
        options = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True}
        out, lse, *_ = _flash_attn_forward(q, k, v, **options)
        _flash_attn_backward(out, q, k, v, out, lse, dq, dk, dv, **options)
        return out, dq, dk, dv

    inputs = [torch.randn(1, 6, 2, 8) for _ in range(3)]
    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        results.append(function(*inputs, *(torch.zeros_like(x) for x in inputs)))
    torch.testing.assert_close(*results)


def test_dropout_in_halves():
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    options = {"softmax_scale": None, "causal": True, "softcap": 2.0}
    out, lse, _, state = _flash_attn_forward(q, k, v, 0.4, **options)
    assert not out.requires_grad
    want = tilewise.flash_attn_func(q, k, v, 0.4, causal=True, softcap=2.0, seed=int(state[0]))
    torch.testing.assert_close(out, want.detach())
    parts = [torch.empty_like(x) for x in (q, k, v)]
    delta = _flash_attn_backward(out, q, k, v, out, lse, *parts, 0.4, **options, rng_state=state)
    torch.testing.assert_close(parts, list(torch.autograd.grad(want, (q, k, v), want.detach())))
    torch.testing.assert_close(delta, out.square().sum(-1).mT)
    with pytest.raises(tilewise.UnsupportedError, match="rng_state"):
        _flash_attn_backward(out, q, k, v, out, lse, *parts, 0.4, **options)
    with pytest.raises(tilewise.UnsupportedError, match="return_softmax"):
        _flash_attn_forward(q, k, v, 0.4, **options, return_softmax=True)


def test_names_of_the_first_version():
    from flash_attn.flash_attn_interface import (
        flash_attn_unpadded_func,
        flash_attn_unpadded_kvpacked_func,
        flash_attn_unpadded_qkvpacked_func,
    )

    qkv = torch.randn(7, 3, 2, 8)
    q, k, v = qkv.unbind(1)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    want = tilewise.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, 0.0, 0.3, True)
    got = [
        flash_attn_unpadded_func(q, k, v, cu, cu.clone(), 4, 4, 0.0, 0.3, True),
        flash_attn_unpadded_kvpacked_func(q, qkv[:, 1:], cu, cu, 4, 4, 0.0, 0.3, True),
        flash_attn_unpadded_qkvpacked_func(qkv, cu, 4, 0.0, 0.3, True),
    ]
    for out in got:
        assert torch.equal(out, want)
    other = torch.tensor([0, 2, 7], dtype=torch.int32)
    flash_attn_unpadded_func(q, k, v, cu, other, 4, 5, 0.0)
    with pytest.raises(tilewise.UnsupportedError, match="cu_seqlens_k"):
        flash_attn_unpadded_func(q, k, v, cu, other, 4, 5, 0.0, causal=True)
    with pytest.raises(tilewise.UnsupportedError, match="return_attn_probs"):
        flash_attn_unpadded_func(q, k, v, cu, cu, 4, 4, 0.0, return_attn_probs=True)


# bert_padding


def test_padding_round_trip():
    from flash_attn import bert_padding

    x = torch.randn(3, 4, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    packed, places, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert cu.tolist() == [0, 3, 7, 7] and used.tolist() == [2, 4, 0] and longest == 4
    assert torch.equal(packed, torch.cat([x[0, :3], x[1]]))
    back = bert_padding.pad_input(packed, places, 3, 4)
    assert torch.equal(back, x * (mask + unused)[..., None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, (mask + unused)[..., None].expand_as(x).float())
    rows = bert_padding.index_first_axis(x.flatten(0, 1), places)
    assert torch.equal(rows, packed)
    assert torch.equal(bert_padding.index_put_first_axis(rows, places, 12), back.flatten(0, 1))
    rows, residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), places)
    assert torch.equal(rows, packed) and torch.equal(residual, x.flatten(0, 1))


def test_padding_of_concatenated_sequences():
    from flash_attn.bert_padding import unpad_input_for_concatenated_sequences

    x = torch.arange(12.0).view(2, 6, 1)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, places, cu, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 11] and longest == 6 and cu.dtype == torch.int32
    assert places.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert torch.equal(packed.flatten(), places.float())


# Rotary embeddings


def rotated(x, cos, sin, interleaved, places):
    """By complex numbers, one row at a time."""
    width = 2 * cos.shape[1]
    a, b = (x[..., :width:2], x[..., 1:width:2]) if interleaved else x[..., :width].chunk(2, -1)
    turn = torch.complex(cos, sin)[places][..., None, :]
    y = torch.complex(a, b) * turn
    pair = torch.stack([y.real, y.imag], -1).flatten(-2) if interleaved else None
    turned = pair if interleaved else torch.cat([y.real, y.imag], -1)
    return torch.cat([turned, x[..., width:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "each"])
def test_rotary(interleaved, offsets):
    from flash_attn.layers.rotary import apply_rotary_emb

    x = torch.randn(2, 5, 3, 10, requires_grad=True)
    angle = torch.randn(12, 4)
    shift = torch.tensor([1, 6]) if offsets == "each" else offsets
    places = torch.arange(5)[None] + (shift[:, None] if offsets == "each" else shift)
    table, weights = (angle.cos(), angle.sin(), interleaved), torch.randn_like(x)
    inner = x * 1
    want = rotated(x, *table, places.expand(2, 5))
    got = apply_rotary_emb(x, *table, seqlen_offsets=shift)
    written = apply_rotary_emb(inner, *table, inplace=True, seqlen_offsets=shift)
    assert written is inner
    wanted = torch.autograd.grad((want * weights).sum(), x)
    for found in (got, written):
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), x), wanted)


def test_rotary_of_packed_rows():
    from flash_attn.layers.rotary import apply_rotary_emb

    x, angle = torch.randn(9, 2, 8), torch.randn(7, 4)
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)  # one sequence is empty, one row is slack
    got = apply_rotary_emb(x, angle.cos(), angle.sin(), cu_seqlens=cu, max_seqlen=5)
    places = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    want = rotated(x[:8], angle.cos(), angle.sin(), False, places)
    torch.testing.assert_close(got[:8], want)
    shifted = apply_rotary_emb(
        x, angle.cos(), angle.sin(), seqlen_offsets=torch.tensor([2, 0, 1]), cu_seqlens=cu
    )
    places = torch.tensor([2, 3, 4, 1, 2, 3, 4, 5])
    torch.testing.assert_close(shifted[:8], rotated(x[:8], angle.cos(), angle.sin(), False, places))


def test_rotary_of_packed_tensors():
    from flash_attn.layers.rotary import (
        apply_rotary_emb,
        apply_rotary_emb_kv_,
        apply_rotary_emb_qkv_,
    )

    angle, other = torch.randn(5, 4), torch.randn(5, 4)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    turned_q = apply_rotary_emb(q, angle.cos(), angle.sin())
    turned_k = apply_rotary_emb(k, other.cos(), other.sin())
    qkv = torch.cat([q, k, v], 2)
    found = apply_rotary_emb_qkv_(
        qkv, angle.cos(), angle.sin(), other.cos(), other.sin(), num_heads_q=4
    )
    assert found is qkv
    torch.testing.assert_close(qkv, torch.cat([turned_q, turned_k, v], 2))
    qkv = torch.stack([q, q, q], 2)
    apply_rotary_emb_qkv_(qkv, angle.cos(), angle.sin())
    torch.testing.assert_close(qkv, torch.stack([turned_q, turned_q, q], 2))
    kv = torch.stack([k, v], 2)
    apply_rotary_emb_kv_(kv, other.cos(), other.sin())
    torch.testing.assert_close(kv, torch.stack([turned_k, v], 2))


@pytest.mark.parametrize("scale_base", [None, 16])
def test_rotary_modules_depend_on_distance_alone(scale_base):
    from flash_attn.layers.rotary import RotaryEmbedding

    layer = RotaryEmbedding(8, scale_base=scale_base)
    assert not layer.state_dict()
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    rows = [x.expand(1, 6, 1, 8).contiguous() for x in (q, k)]
    turned_q, kv = layer(rows[0], torch.stack([rows[1], rows[1]], 2))
    scores = torch.einsum("bihd,bjhd->ij", turned_q, kv[:, :, 0])
    for offset in range(-5, 6):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    later, _ = layer(q.clone(), torch.stack([k, k], 2), seqlen_offset=2, max_seqlen=6)
    torch.testing.assert_close(later[:, 0], turned_q[:, 2])
    with pytest.raises(tilewise.InvalidInputError, match="max_seqlen"):
        layer(torch.randn(1, 2, 3, 1, 8), seqlen_offset=torch.tensor([1]))


def test_rotary_refuses_positions_beyond_its_tables():
    from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_torch, rotate_half

    x, angle = torch.randn(1, 4, 1, 8), torch.randn(4, 4)
    with pytest.raises(tilewise.InvalidInputError, match="cos"):
        apply_rotary_emb(x, angle.cos(), angle.sin(), seqlen_offsets=1)
    with pytest.raises(tilewise.InvalidInputError, match="cos"):
        apply_rotary_emb(x[..., :6], angle.cos(), angle.sin())
    for interleaved in (False, True):
        torch.testing.assert_close(
            apply_rotary_emb_torch(x, angle.cos(), angle.sin(), interleaved),
            apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved),
        )
    assert rotate_half(torch.tensor([1.0, 2, 3, 4])).tolist() == [-3, -4, 1, 2]
    assert rotate_half(torch.tensor([1.0, 2, 3, 4]), True).tolist() == [-2, 1, -4, 3]


@pytest.mark.parametrize("offsets", [-1, torch.tensor([0, -2]), torch.tensor([0, 30])], ids=str)
def test_rotary_positions_that_are_not_there(offsets):
    from flash_attn.layers.rotary import apply_rotary_emb

    x, cos = torch.randn(2, 5, 1, 8), torch.randn(16, 4)
    with pytest.raises(tilewise.InvalidInputError):
        apply_rotary_emb(x, cos, cos, seqlen_offsets=offsets)
