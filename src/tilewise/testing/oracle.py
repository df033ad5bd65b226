"""One call with all its results, by a backend, by the float64 oracle and by plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..arguments import Options, Packing, dense_call, packed_call
from ..backends import reference
from ..ops.schema import describe

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(slots=True)
class Results:
    """out, lse and the gradients of <out, dout> + <lse, dlse>; None where there is none."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsink: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of everything that is there."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value


def cotangents(out: Tensor, lse: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Fixed normal dout and dlse, in the dtypes of out and lse."""
    gen = torch.Generator().manual_seed(seed)
    dout, dlse = (torch.randn(x.shape, generator=gen, dtype=torch.float64) for x in (out, lse))
    return dout.to(out.device, out.dtype), dlse.to(lse.device, lse.dtype)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def run(q: Tensor, k: Tensor, v: Tensor, *, backward: bool = True, **arguments: Any) -> Results:
    """``flash_attn_func``, or the varlen function when there is a cu_seqlens_q: all results."""
    leaves = {
        name: x.detach().requires_grad_(backward)
        for name, x in {"q": q, "k": k, "v": v, **arguments}.items()
        if name in ("q", "k", "v", "attn_bias", "sink") and _is_float(x)
    }
    call = {**arguments, **leaves, "return_lse": True}
    function = flash_attn_varlen_func if "cu_seqlens_q" in arguments else flash_attn_func
    out, lse = cast(tuple[Tensor, Tensor], function(**call))
    results = Results(out.detach(), lse.detach())
    if backward:
        found = torch.autograd.grad((out, lse), list(leaves.values()), cotangents(out, lse))
        names = {"attn_bias": "dbias", "sink": "dsink"}
        for name, grad in zip(leaves, found, strict=True):
            setattr(results, names.get(name, f"d{name}"), grad)
    return results


def oracle(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Results:
    """The reference in float64 on the same inputs, with cotangents rounded like the call's."""
    return _reference(q, k, v, torch.float64, arguments)


def plain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Results:
    """The same mathematics in plain torch, materialised, in the inputs' dtype."""
    return _reference(q, k, v, q.dtype, arguments)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, arguments: dict[str, Any]
) -> Results:
    arguments = {
        name: x for name, x in arguments.items() if name not in ("backward", "backend", "algorithm")
    }
    packing = {name: arguments.pop(name) for name in Packing._fields if name in arguments}
    options = Options(**arguments)
    if packing:
        tensors, scalars = packed_call(q, k, v, Packing(**packing), options)
    else:
        tensors, scalars = dense_call(q, k, v, options)
    with torch.no_grad():
        problem = describe(tensors, scalars, needs_grad=False)
        out, lse, _ = reference.attention(problem, tensors, dtype)
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        like_out, like_lse = out.to(q.dtype), lse.to(lse_dtype)
        dout, dlse = cotangents(like_out, like_lse)
        g = reference.attention_backward(problem, tensors, dout, dlse, dtype)
    dbias = None if g.dbias is None else g.dbias.reshape(arguments["attn_bias"].shape)
    return Results(out, lse, g.dq, g.dk, g.dv, dbias, g.dsink)
