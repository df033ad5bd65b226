"""The check before a speed is printed: a provider's results against the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..arguments import Options, Packing, dense_call, packed_call
from ..backends import reference
from ..bench.providers import Provider, Shape, Triple, forward_backward, make_inputs, packing
from ..ops.schema import describe
from ..testing import excess

GATE_LENGTH = 577  # a prime; more than one tile in either direction
GATE_HEADS = 2
GATE_LENGTHS = (GATE_LENGTH, 1, 130)  # of a packed call
_SEED = 20221101
MASKS = {True: "causal", False: "none"}


@lru_cache(maxsize=8)
def _expected(shape: Shape) -> tuple[Triple, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Inputs, dout, and (oracle, plain torch) of out and the gradients, on the CPU.

    Both are computed on the shape's device: plain torch is the same device's own arithmetic.
    """
    q, k, v, dout = make_inputs(shape)
    options = Options(dropout_p=shape.dropout_p, causal=shape.causal, seed=shape.dropout_seed)
    if shape.lengths:
        tensors, scalars = packed_call(q, k, v, Packing(**packing(shape)), options)
    else:
        tensors, scalars = dense_call(q, k, v, options)
    problem = describe(tensors, scalars, needs_grad=False)

    def results(dtype: torch.dtype) -> dict[str, Tensor]:
        out, _, _ = reference.attention(problem, tensors, dtype)
        g = reference.attention_backward(problem, tensors, dout, None, dtype)
        assert g.dq is not None and g.dk is not None and g.dv is not None
        return {"out": out, "dq": g.dq, "dk": g.dk, "dv": g.dv}

    ref, twin = results(torch.float64), results(shape.torch_dtype)
    return (q, k, v), dout, {name: (ref[name].cpu(), twin[name].cpu()) for name in ref}


def _results(provider: Provider, shape: Shape, backward: bool) -> dict[str, Tensor]:
    """out, and with ``backward`` the gradients, (batch, seqlen, nheads, head_dim) on the CPU."""
    inputs, dout, _ = _expected(shape)
    q, k, v, dout = (provider.layout(x) for x in (*inputs, dout))
    attend = provider.bind(shape)
    if backward:
        out, grads = forward_backward(attend, (q, k, v), dout)
        found = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    else:
        with torch.no_grad():
            found = {"out": attend(q, k, v)}
    return {name: provider.layout(x).cpu() for name, x in found.items()}


def gate(providers: Sequence[Provider], shape: Shape, backward: bool = True) -> list[str]:
    """What is wrong with the providers by the one rule of ``testing``; empty when nothing.

    Compares out, and with ``backward`` the gradients of q, k and v, with the float64 oracle.
    """
    wrong = []
    for provider in providers:
        for name, x in _results(provider, shape, backward).items():
            ref, twin = _expected(shape)[2][name]
            error, allowed = excess(name, x, ref, twin, shape.torch_dtype)
            if not error <= allowed:
                dropout = f", dropout {shape.dropout_p:g}" if shape.dropout_p > 0 else ""
                what = f"{provider.name} {name} (mask {MASKS[shape.causal]}{dropout})"
                wrong.append(f"{what}: error {error:.1e}, allowed {allowed:.1e}")
    return wrong


def verify(provider: Provider, shape: Shape, backward: bool) -> str | None:
    """``gate`` at a small size of the same kind as ``shape``; None when nothing is wrong.

    The dropout of tilewise is checked by its seed. That of others is drawn from generators of
    their own, so they are checked without; and on normal inputs, whatever theirs are.
    """
    ours = provider.package == "tilewise"
    dropout_p = shape.dropout_p if ours else 0.0
    group = shape.nheads // shape.heads_kv
    small = replace(
        shape,
        batch=1,
        seqlen=GATE_LENGTH,
        nheads=GATE_HEADS * group,
        nheads_kv=GATE_HEADS,
        inputs=shape.inputs if ours else "randn",
        lengths=GATE_LENGTHS if shape.lengths else (),
        dropout_p=dropout_p,
        dropout_seed=_SEED if dropout_p > 0 else None,
    )
    return "; ".join(gate([provider], small, backward)) or None
