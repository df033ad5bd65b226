"""The one tolerance rule.

    max|x - ref64| <= k * max|plain - ref64| + band

``ref64`` is the float64 oracle on the same (rounded) inputs, ``plain`` the same mathematics in
plain torch in the input's dtype, k = 2 for out and lse and 3 for gradients, band = 2 * eps(dtype) *
max|ref64| with float32's eps at least. For float64 inputs plain and oracle are one and the same, so
the band alone counts: 64 * eps(float64) * max|ref64|, which covers the oracle's own rounding.
Infinities must agree exactly; a NaN agrees only with a NaN of the oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .oracle import GRADIENTS, Results

K_FORWARD = 2.0
K_GRADIENT = 3.0


def band(ref: Tensor, dtype: torch.dtype) -> float:
    """What rounding the result alone may cost."""
    finite = ref[torch.isfinite(ref)].abs()
    if finite.numel() == 0:
        return 0.0
    if dtype == torch.float64:
        return 64.0 * torch.finfo(dtype).eps * float(finite.max())
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return 2.0 * eps * float(finite.max())


def _error(x: Tensor, ref: Tensor) -> float:
    """Largest difference; infinite where one is NaN or an infinity that the other is not."""
    if x.shape != ref.shape:
        raise AssertionError(f"shape {tuple(x.shape)}, the oracle's is {tuple(ref.shape)}")
    if x.numel() == 0:
        return 0.0
    x, ref = x.double(), ref.double()
    same = (x == ref) | (x.isnan() & ref.isnan())
    gap = (x - ref).abs().masked_fill(same, 0.0)
    return float(gap.nan_to_num(nan=float("inf")).max())


def excess(
    name: str, x: Tensor, ref: Tensor, plain: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """The error of x and what the rule allows it."""
    k = K_GRADIENT if name in GRADIENTS else K_FORWARD
    plain_error = _error(plain, ref)
    if plain_error == float("inf"):  # plain overflowed or lost a row: it excuses nothing
        plain_error = 0.0
    return _error(x, ref), k * plain_error + band(ref, dtype)


def assert_within(got: Results, ref: Results, plain: Results, dtype: torch.dtype) -> None:
    """Asserts the rule for every result that ``got`` has."""
    for name, x in got.items():
        expected, twin = getattr(ref, name), getattr(plain, name)
        assert expected is not None and twin is not None, f"{name}: the oracle has none"
        error, allowed = excess(name, x, expected, twin, dtype)
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
