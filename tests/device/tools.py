"""What the tests on a GPU share: drawing inputs there, runs as tuples, equality of bits."""

from __future__ import annotations

import torch

from tilewise import flash_attn_func, flash_attn_varlen_func, testing

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def draw(*shape, seed, dtype=torch.bfloat16, device="cuda"):
    """The same numbers on every device."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(device, dtype)


def fill(x, seed):
    """Fills x, however large, in place."""
    gen = torch.Generator(x.device).manual_seed(seed)
    return x.normal_(generator=gen)


def qkv(batch=2, sq=200, sk=333, h=4, hk=2, d=64, dv=None, dtype=torch.bfloat16, device="cuda"):
    dv = d if dv is None else dv
    return {
        "q": draw(batch, sq, h, d, seed=1, dtype=dtype, device=device),
        "k": draw(batch, sk, hk, d, seed=2, dtype=dtype, device=device),
        "v": draw(batch, sk, hk, dv, seed=3, dtype=dtype, device=device),
    }


def packed(lengths_q, lengths_k, h=4, hk=2, d=64, dtype=torch.bfloat16, device="cuda", slack=3):
    """A packed call with slack rows."""
    bounds = [
        torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0)).to(device, torch.int32)
        for n in (lengths_q, lengths_k)
    ]
    return {
        "q": draw(sum(lengths_q) + slack, h, d, seed=1, dtype=dtype, device=device),
        "k": draw(sum(lengths_k) + slack, hk, d, seed=2, dtype=dtype, device=device),
        "v": draw(sum(lengths_k) + slack, hk, d, seed=3, dtype=dtype, device=device),
        "cu_seqlens_q": bounds[0],
        "cu_seqlens_k": bounds[1],
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }


def results(inputs, dout=None, dlse=None, **options):
    """out, lse and the gradients of q, k, v, attn_bias and sink as far as there are any: a dict."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in inputs.items()
        if name in ("q", "k", "v", "attn_bias", "sink") and x.is_floating_point()
    }
    function = flash_attn_varlen_func if "cu_seqlens_q" in inputs else flash_attn_func
    out, lse = function(**{**inputs, **leaves}, **options, return_lse=True)
    dout = torch.ones_like(out) if dout is None else dout
    outputs, weights = (out,), (dout,)
    if dlse is not None:
        outputs, weights = (out, lse), (dout, dlse)
    found = torch.autograd.grad(outputs, list(leaves.values()), weights)
    gradients = {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def same_bits(got, want):
    """Equal bits, NaN and the sign of zero included."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        y = want[name].to(x.device)
        assert x.dtype == y.dtype and x.shape == y.shape, name
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name


def within(name, x, ref, plain):
    """The tolerance rule for one tensor."""
    error, allowed = testing.excess(name, x, ref, plain, x.dtype)
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
