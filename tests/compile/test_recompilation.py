"""A kernel, once compiled, serves every length, batch size and head count."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise

KERNELS = ("fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq", "fa1_fwd", "fa1_bwd")
# (batch, nheads, nheads_kv, seqlen_q, seqlen_k)
SHAPES = (
    (2, 4, 4, 1024, 1024),
    (1, 4, 4, 1024, 1024),
    (2, 1, 1, 1024, 1024),
    (2, 3, 3, 1000, 1000),
    (2, 6, 3, 1024, 1024),
    (1, 3, 1, 17, 1000),
    (2, 4, 4, 1, 1024),
    (2, 4, 4, 1024, 1),
    (1, 1, 1, 1, 1),
    (3, 4, 2, 16, 17),
    (64, 16, 16, 2048, 2048),
)
CALLS = (
    {},
    {"mask": "causal"},
    {"mask": "window"},
    {"features": ["softcap", "dropout"]},
    {"features": ["varlen"]},
    {"features": ["alibi"]},
)


def keys(compiler: Callable[..., Any], **call: Any) -> dict[str, dict[str, Any]]:
    """For each kernel launched, what Triton finds it by, and the shapes that want it."""
    found: dict[str, dict[str, Any]] = {}
    for shape in SHAPES:
        names = ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k")
        for launched in compiler(ask="keys", **call, **dict(zip(names, shape, strict=True))):
            of_kernel = found.setdefault(launched["name"], {})
            of_kernel.setdefault(launched["key"], []).append(shape)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_key_of_a_kernel_has_no_size(
    kernel: str, call: dict[str, Any], head_dim: int, compiler: Callable[..., Any]
) -> None:
    for name, found in keys(compiler, kernel=kernel, head_dim=head_dim, **call).items():
        # a backward leaves out rows that the window gives no key: by pointers, not by TMA
        every_row_sees = [[x for x in shapes if x[3] <= x[4]] for shapes in found.values()]
        assert sum(map(bool, every_row_sees)) == 1, f"{name} is compiled anew for {every_row_sees}"
        assert len(found) <= (2 if "mask" in call and "bwd" in kernel else 1), found


@pytest.mark.compile
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_keys_of_an_odd_width_are_few(kernel: str, compiler: Callable[..., Any]) -> None:
    """Where a head's width is no multiple of 16, a row's stride is one for some head counts."""
    for name, found in keys(compiler, kernel=kernel, head_dim=40).items():
        assert len(found) <= 4, f"{name}: {list(found.values())}"


@pytest.mark.compile
@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq"])
def test_the_keys_beside_a_bias_are_few(kernel: str, compiler: Callable[..., Any]) -> None:
    """The strides of a bias are lengths: multiples of 16, others, or of a single key."""
    for name, found in keys(compiler, kernel=kernel, features=["attn_bias"]).items():
        assert len(found) <= 5, f"{name}: {list(found.values())}"


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_no_launch_recompiles(algorithm: str) -> None:
    files = {
        "fa2": ("fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"),
        "fa1": ("fa1_fwd", "bwd_preprocess", "fa1_bwd"),
    }[algorithm]
    modules = [importlib.import_module(f"tilewise.kernels.triton.{name}") for name in files]
    kernels = [
        x
        for module in modules
        for name, x in vars(module).items()
        if name.endswith("_kernel") and hasattr(x, "device_caches")
    ]
    assert len(kernels) == len(files)

    def compiled() -> list[int]:
        return [sum(len(c[0]) for c in kernel.device_caches.values()) for kernel in kernels]

    def run(batch: int, nheads: int, nheads_kv: int, seqlen_q: int, seqlen_k: int) -> None:
        def make(rows: int, heads: int) -> torch.Tensor:
            x = torch.randn(batch, rows, heads, 64, device="cuda", dtype=torch.float16)
            return x.requires_grad_()

        q, k, v = make(seqlen_q, nheads), make(seqlen_k, nheads_kv), make(seqlen_k, nheads_kv)
        out = tilewise.flash_attn_func(q, k, v, causal=True, backend="triton", algorithm=algorithm)
        out.sum().backward()

    run(*SHAPES[0])
    run(2, 4, 4, 1024, 1)  # rows without keys, as above
    before = compiled()
    assert min(before) >= 1
    for shape in SHAPES[1:-1]:
        run(*shape)
    assert compiled() == before
