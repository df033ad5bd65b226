"""Drawing inputs, and running the kernels of some gradients alone."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func, repeats, testing
from tilewise.ops import kinds
from tilewise.testing.oracle import cotangents

FA2 = {"backend": "triton", "algorithm": "fa2"}
FA1 = {"backend": "triton", "algorithm": "fa1"}
TILE = 32  # of queries and of keys, in the interpreter
NAN, INF = torch.nan, torch.inf


def draw(*shape, seed, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)


def qkv(sq=33, sk=49, h=2, hk=1, d=16, dv=None, batch=1, dtype=torch.float32):
    dv = d if dv is None else dv
    return {
        "q": draw(batch, sq, h, d, seed=1, dtype=dtype),
        "k": draw(batch, sk, hk, d, seed=2, dtype=dtype),
        "v": draw(batch, sk, hk, dv, seed=3, dtype=dtype),
    }


def packed(lengths_q, lengths_k, slack=5, h=2, hk=1, d=16, dtype=torch.float32):
    bounds = [
        torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0)).to(torch.int32)
        for n in (lengths_q, lengths_k)
    ]
    return {
        "q": draw(sum(lengths_q) + slack, h, d, seed=1, dtype=dtype),
        "k": draw(sum(lengths_k) + slack, hk, d, seed=2, dtype=dtype),
        "v": draw(sum(lengths_k) + slack, hk, d, seed=3, dtype=dtype),
        "cu_seqlens_q": bounds[0],
        "cu_seqlens_k": bounds[1],
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }


def gradients(inputs, names, dout=None, engine=FA2):
    """The gradients of the named inputs alone, so that only their kernels run; NaN where unwritten.

    The cotangents are those of ``testing.oracle``; with ``dout`` given, that of lse is zero.
    """
    given = {n: x.detach().requires_grad_() if n in names else x for n, x in inputs.items()}
    function = flash_attn_varlen_func if "cu_seqlens_q" in inputs else flash_attn_func
    with testing.poisoned_memory():
        out, lse = function(**given, **engine, return_lse=True)
        drawn, dlse = cotangents(out, lse)
        weights = (drawn, dlse) if dout is None else (dout, torch.zeros_like(lse))
        found = torch.autograd.grad((out, lse), [given[n] for n in names], weights)
    renamed = {"attn_bias": "dbias", "sink": "dsink"}
    return {renamed.get(n, f"d{n}"): g for n, g in zip(names, found, strict=True)}


def check(inputs, names, engine=FA2):
    """Those gradients against the oracle."""
    got = gradients(inputs, names, engine=engine)
    ref, plain = testing.oracle(**inputs), testing.plain(**inputs)
    for name, x in got.items():
        y, twin = getattr(ref, name), getattr(plain, name)
        error, allowed = testing.excess(name, x, y, twin, inputs["q"].dtype)
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    return got


BAD_BOUNDS = ([0, 10**6, 60], [-5, 70, 60], [50, 20, 60], [2**31 - 1, -(2**31), 60])


def with_bounds(bounds):
    """A packed call of boundaries that lead outside or overlap; a device's are not checked."""
    inputs = packed([20, 40], [20, 40], slack=10)
    for side in "qk":
        inputs[f"cu_seqlens_{side}"] = torch.tensor(bounds, dtype=torch.int32)
        inputs[f"max_seqlen_{side}"] = 64
    return inputs


@contextmanager
def guarded_memory(margin=4096):
    """Inside, what torch gives uninitialised lies between numbers that nothing may write."""
    buffers = []

    def guarded(shape, dtype):
        count = math.prod(shape)
        buffer = torch.full((count + 2 * margin,), 77.0, dtype=dtype)
        buffers.append((buffer, count))
        return buffer[margin : margin + count].view(shape)

    def empty(*shape, dtype=None, device=None):
        shape = tuple(shape[0]) if isinstance(shape[0], (tuple, torch.Size)) else shape
        return guarded(shape, dtype)

    def empty_strided(shape, stride, dtype=None, device=None):
        found = guarded(shape, dtype)
        assert found.stride() == tuple(stride)
        return found

    with pytest.MonkeyPatch.context() as patch:
        # what is kept of calls before has allocators of its own
        patch.setattr(kinds, "_kinds", {})
        patch.setattr(repeats, "_known", {})
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_strided", empty_strided)
        yield
    assert buffers, "nothing was allocated"
    for buffer, count in buffers:
        assert (buffer[:margin] == 77).all() and (buffer[margin + count :] == 77).all()
