"""The case table: every feature of ``core.features`` alone, and every pair once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.features import FEATURES

# Pairs that mean nothing together: one bias argument, seqused only exists in packed calls.
_EXCLUSIVE = ({"attn_bias", "bool_mask"},)
# Not arguments of the mathematics: tested on their own.
_NOT_CASES = {"attn_probs"}


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one call and the features that it uses."""

    features: tuple[str, ...] = ()
    batch: int = 2
    seqlen_q: int = 33
    seqlen_k: int = 49
    nheads: int = 4
    head_dim: int = 16
    seed: int = 0

    @property
    def id(self) -> str:
        """A readable name for a test."""
        return "+".join(self.features) or "plain"


def _rand(case: Case, salt: int, *shape: int) -> Tensor:
    gen = torch.Generator().manual_seed(1000 * case.seed + salt)
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def _bias_shape(case: Case) -> tuple[int, ...]:
    if "varlen" in case.features or "seqused" in case.features:
        total_q = int(_boundaries(case, case.seqlen_q)[-1]) + 1
        return (case.nheads, total_q, case.seqlen_k)
    return (case.batch, case.nheads, case.seqlen_q, case.seqlen_k)


def _boundaries(case: Case, longest: int) -> Tensor:
    """Sequences of the full length, of none and of about half."""
    lengths = torch.tensor([longest, 0, longest // 2, 1][: max(case.batch, 3)])
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


_ARGUMENTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "causal": lambda c: {"causal": True},
    "window": lambda c: {"window_size": (c.seqlen_k // 3, c.seqlen_q // 5)},
    "softcap": lambda c: {"softcap": 1.5},
    "alibi": lambda c: {"alibi_slopes": _rand(c, 11, c.nheads).abs().float() / 8},
    "attn_bias": lambda c: {"attn_bias": _rand(c, 12, *_bias_shape(c))},
    "bool_mask": lambda c: {"attn_bias": _rand(c, 13, *_bias_shape(c)) > -0.5},
    "sink": lambda c: {"sink": _rand(c, 14, c.nheads)},
    "dropout": lambda c: {"dropout_p": 0.3, "seed": 1234567890123},
    "gqa": lambda c: {},
    "head_dim_v": lambda c: {},
    "varlen": lambda c: {},
    "seqused": lambda c: {},
    "deterministic": lambda c: {"deterministic": True},
}


def feature_arguments(case: Case) -> dict[str, Any]:
    """The keyword arguments that the case's features stand for, packing excepted; float64."""
    merged: dict[str, Any] = {}
    for name in case.features:
        merged.update(_ARGUMENTS[name](case))
    return merged


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Everything ``testing.run`` takes for the case: q, k, v and keyword arguments.

    Floating inputs are rounded to ``dtype``; slopes and sinks stay float32 (float64 for float64).
    """
    nheads_kv = case.nheads // 2 if "gqa" in case.features else case.nheads
    head_dim_v = case.head_dim + 8 if "head_dim_v" in case.features else case.head_dim
    arguments = feature_arguments(case)
    if "varlen" in case.features or "seqused" in case.features:
        cu_q, cu_k = _boundaries(case, case.seqlen_q), _boundaries(case, case.seqlen_k)
        lead_q: tuple[int, ...] = (int(cu_q[-1]) + 1,)  # with slack rows
        lead_k: tuple[int, ...] = (int(cu_k[-1]) + 2,)
        arguments |= {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": case.seqlen_q,
            "max_seqlen_k": case.seqlen_k,
        }
        if "seqused" in case.features:
            for name, cu in (("seqused_q", cu_q), ("seqused_k", cu_k)):
                arguments[name] = (cu.diff() * 2 // 3).to(torch.int32)
    else:
        lead_q, lead_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    inputs: dict[str, Any] = {
        "q": _rand(case, 1, *lead_q, case.nheads, case.head_dim),
        "k": _rand(case, 2, *lead_k, nheads_kv, case.head_dim),
        "v": _rand(case, 3, *lead_k, nheads_kv, head_dim_v),
        **arguments,
    }
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            if x.is_floating_point():
                x = x.to(statistics if name in ("sink", "alibi_slopes") else dtype)
            inputs[name] = x.to(device)
    return inputs


def _table() -> tuple[Case, ...]:
    names = [f.name for f in FEATURES if f.name not in _NOT_CASES]
    pairs = [pair for pair in itertools.combinations(names, 2) if set(pair) not in _EXCLUSIVE]
    return (Case(), *(Case((name,)) for name in names), *(Case(pair) for pair in pairs))


CASES: tuple[Case, ...] = _table()
