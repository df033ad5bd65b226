"""What the public functions return: lse, probabilities, shapes and dtypes."""

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func
from tilewise.testing import Case, make_inputs

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_dtypes_of_out_and_lse(dtype, engine):
    q, k, v = (torch.randn(2, s, h, d).to(dtype) for s, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 3)))
    out, lse = flash_attn_func(q, k, v, return_lse=True, **engine)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.shape == (2, 5, 4, 3) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.dtype == statistics
    assert torch.equal(flash_attn_func(q, k, v, **engine), out)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 7, 7])
    out, lse = flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 3, 7, return_lse=True, **engine)
    assert out.shape == (5, 4, 3) and out.dtype == dtype
    assert lse.shape == (4, 5) and lse.dtype == statistics
    assert (out[2:] == 0).all() and (lse[:, 2:] == -torch.inf).all()


def test_lse_is_the_natural_logarithm_of_the_sum_of_exponentials(engine):
    q, k, v = (torch.randn(1, s, 1, 8, dtype=torch.float64) for s in (5, 7, 7))
    _, lse = flash_attn_func(q, k, v, softmax_scale=0.3, return_lse=True, **engine)
    want = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.3).logsumexp(-1)
    torch.testing.assert_close(lse, want)


FEATURES = [
    (),
    ("causal",),
    ("window", "gqa"),
    ("dropout",),
    ("sink",),
    ("attn_bias", "softcap"),
    ("bool_mask",),
    ("alibi",),
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "+".join(f) or "plain")
def test_probabilities_reproduce_out(features, engine):
    inputs = make_inputs(Case(features, seqlen_q=9, seqlen_k=12, head_dim=8), torch.float64)
    out, lse, probs = flash_attn_func(**inputs, return_attn_probs=True, **engine)
    v = inputs["v"].repeat_interleave(4 // inputs["v"].shape[2], 2)
    assert probs.shape == (2, 4, 9, 12) and probs.dtype == torch.float64
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probs, v), out)
    assert not probs.requires_grad and (probs >= 0).all()
    if features != ("dropout",):
        share = 1.0
        if features == ("sink",):
            share = 1 - torch.exp(inputs["sink"][:, None] - lse)
        seen = (lse != -torch.inf).double()
        torch.testing.assert_close(probs.sum(-1), seen * share)
    else:
        dropped = (probs == 0).double().mean()
        assert 0.2 < dropped < 0.4


def test_probabilities_of_packed_calls_are_zero_past_each_sequence(engine):
    q, k, v = (torch.randn(9, 2, 4, dtype=torch.float64) for _ in range(3))
    cu_q, cu_k = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 2, 5, 9])
    out, lse, probs = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 6, 7, causal=True, return_attn_probs=True, **engine
    )
    assert probs.shape == (3, 2, 6, 7)
    for b, (q0, q1, k0, k1) in enumerate(((0, 3, 0, 2), (3, 3, 2, 5), (3, 8, 5, 9))):
        assert (probs[b, :, q1 - q0 :] == 0).all() and (probs[b, :, :, k1 - k0 :] == 0).all()
        mine = probs[b, :, : q1 - q0, : k1 - k0]
        torch.testing.assert_close(torch.einsum("hij,jhd->ihd", mine, v[k0:k1]), out[q0:q1])
        seen = (lse[:, q0:q1] != -torch.inf).double()
        torch.testing.assert_close(mine.sum(-1), seen)


def test_probabilities_leave_gradients_alone():
    q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse, probs = flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)
    assert not probs.requires_grad
    got = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    # one seed serves both: the weights that were dropped are those of the gradient
    torch.testing.assert_close(got[2], probs.sum(2).transpose(1, 2)[..., None].expand_as(v))


def test_probabilities_under_autocast_are_as_of_inputs_cast_first():
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        _, _, probs = flash_attn_func(q, k, v, return_attn_probs=True)
    _, _, want = flash_attn_func(*(x.bfloat16() for x in (q, k, v)), return_attn_probs=True)
    assert torch.equal(probs, want)


def test_equal_bits_run_to_run(engine):
    q, k, v = (torch.randn(2, 300, 4, 16, requires_grad=True) for _ in range(3))
    runs = []
    for _ in range(2):
        out, lse = flash_attn_func(
            q, k, v, causal=True, deterministic=True, return_lse=True, **engine
        )
        runs.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_nothing_that_was_given_is_changed(engine):
    inputs = make_inputs(Case(("attn_bias", "sink")), torch.float32)
    before = {n: x.clone() for n, x in inputs.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    out = flash_attn_func(**leaves, **engine)
    dout = torch.randn_like(out)
    kept = dout.clone()
    out.backward(dout)
    assert torch.equal(dout, kept)
    for name, x in leaves.items():
        assert torch.equal(x, before[name]), name
