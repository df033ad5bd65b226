"""flash-attn 2.8's names, order and defaults, and the packed forms."""

import inspect

import pytest
import torch

import tilewise

REQUIRED = inspect.Parameter.empty
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
# as written in flash_attn/flash_attn_interface.py of flash-attn 2.8
FLASH_ATTN = {
    "flash_attn_func": dict.fromkeys(("q", "k", "v"), REQUIRED) | TAIL,
    "flash_attn_qkvpacked_func": {"qkv": REQUIRED} | TAIL,
    "flash_attn_kvpacked_func": dict.fromkeys(("q", "kv"), REQUIRED) | TAIL,
    "flash_attn_varlen_func": dict.fromkeys(
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED
    )
    | TAIL
    | {"block_table": None},
    "flash_attn_varlen_qkvpacked_func": dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), REQUIRED)
    | TAIL,
    "flash_attn_varlen_kvpacked_func": dict.fromkeys(
        ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED
    )
    | TAIL,
}


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_positional_arguments_are_flash_attn_s(name):
    parameters = inspect.signature(getattr(tilewise, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == list(FLASH_ATTN[name].items())
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters if p not in positional)


def test_every_public_name_is_there():
    assert sorted(tilewise.__all__) == tilewise.__all__
    assert all(hasattr(tilewise, name) for name in tilewise.__all__)
    assert set(FLASH_ATTN) <= set(tilewise.__all__)


OPTIONS = {
    "plain": {},
    "all": {
        "dropout_p": 0.3,
        "softmax_scale": 0.7,
        "causal": True,
        "window_size": (3, 2),
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.1, 0.2]),
        "deterministic": True,
        "seed": 4,
        "sink": torch.tensor([0.3, -0.3]),
        "return_lse": True,
    },
    "probs": {"return_attn_probs": True, "causal": True},
}


def assert_equal(got, want):
    for a, b in zip(
        *((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_forms_equal_separate_tensors(options):
    q, k, v = (torch.randn(2, 7, 2, 8) for _ in range(3))
    want = tilewise.flash_attn_func(q, k, v, **options)
    assert_equal(tilewise.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options), want)
    assert_equal(tilewise.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), want)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = q[0], k[0], v[0]
    want = tilewise.flash_attn_varlen_func(q, k, v, cu, cu, 4, 5, **options)
    kv = torch.stack([k, v], 1)
    assert_equal(tilewise.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 4, 5, **options), want)
    want = tilewise.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, **options)
    qkv = torch.stack([q, k, v], 1)
    assert_equal(tilewise.flash_attn_varlen_qkvpacked_func(qkv, cu, 4, **options), want)


def test_positional_options_reach_their_place():
    q, k, v = (torch.randn(2, 7, 2, 8) for _ in range(3))
    slopes = torch.tensor([0.1, 0.2])
    values = (0.0, 0.7, True, (3, 2), 2.0, slopes, True, True)
    want = tilewise.flash_attn_func(q, k, v, **dict(zip(TAIL, values, strict=True)))
    assert_equal(tilewise.flash_attn_func(q, k, v, *values), want)
    assert_equal(tilewise.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *values), want)
    assert_equal(tilewise.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *values), want)
    cu = torch.tensor([0, 3, 7])
    q, k, v = q[0], k[0], v[0]
    want = tilewise.flash_attn_varlen_func(
        q, k, v, cu, cu, 4, 4, **dict(zip(TAIL, values, strict=True))
    )
    assert_equal(tilewise.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, *values), want)
    qkv, kv = torch.stack([q, k, v], 1), torch.stack([k, v], 1)
    assert_equal(tilewise.flash_attn_varlen_qkvpacked_func(qkv, cu, 4, *values), want)
    assert_equal(tilewise.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 4, 4, *values), want)


def test_packed_forms_send_gradients_to_the_packed_tensor():
    qkv = torch.randn(2, 7, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(
        tilewise.flash_attn_qkvpacked_func(qkv, causal=True).cos().sum(), qkv
    )
    parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    want = torch.autograd.grad(tilewise.flash_attn_func(*parts, causal=True).cos().sum(), parts)
    assert torch.equal(got, torch.stack(want, 2))


@pytest.mark.parametrize("shape", [(2, 7, 2, 2, 8), (2, 7, 3, 8), (7, 3, 2, 8)], ids=str)
def test_wrongly_packed_tensors_are_named(shape):
    with pytest.raises(tilewise.InvalidInputError, match=r"qkv: got shape .* \(batch, seqlen, 3,"):
        tilewise.flash_attn_qkvpacked_func(torch.zeros(shape))
    with pytest.raises(tilewise.InvalidInputError, match="kv: got NoneType"):
        tilewise.flash_attn_kvpacked_func(torch.zeros(2, 7, 2, 8), None)


def test_block_table_is_refused():
    x, cu = torch.zeros(4, 1, 8), torch.tensor([0, 4])
    with pytest.raises(tilewise.UnsupportedError, match="block_table"):
        tilewise.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, block_table=torch.zeros(1, 1))
