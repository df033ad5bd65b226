"""What can compute attention on a GPU, found by import: torch's kernels, flash-attn's, ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial

from torch import Tensor
from torch.nn.attention import SDPBackend

from ..dispatch import BACKENDS
from .providers import (
    EAGER,
    PROVIDERS,
    Attend,
    Provider,
    Shape,
    bind_sdpa,
    bind_tilewise,
    packing,
)

CPU, CUDA = "cpu", "cuda"
# The module of FA3 and the distribution that it comes from; the second has the forward alone.
_FA3 = {"flash_attn_interface": "flash_attn_3", "fa3_fwd_interface": "fa3-fwd"}
_FA4 = "flash_attn.cute.interface"
_FA2 = "flash_attn.flash_attn_interface"  # FA4 alone makes a flash_attn too
# Standard attention and the three papers, in the order of their publication.
GENERATIONS: dict[str, tuple[str, ...]] = {
    CPU: ("eager", "tilewise-fa1", "tilewise"),
    CUDA: ("eager", "tilewise-fa1", "tilewise-triton", "tilewise-gluon"),
}


@cache
def _import_error(module: str) -> str | None:
    """Why ``module`` cannot be imported; None when it can. A broken one may raise anything."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _no_backend(name: str) -> str | None:
    return None if name in BACKENDS else f"this tilewise has no backend {name!r}"


def _visible_below(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return row >= col


def _bind_flex(shape: Shape) -> Attend:
    """``flex_attention``, compiled anew for each shape; a causal call by a block mask."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # The backward is timed by repeating it, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # else the limit of recompilations is reached after a few shapes
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if shape.causal:
        n = shape.seqlen
        mask = create_block_mask(_visible_below, None, None, n, n, device=shape.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=mask, enable_gqa=shape.heads_kv < shape.nheads)
        assert isinstance(out, Tensor)
        return out

    return attend


def _bind_flash(module: str) -> Callable[[Shape], Attend]:
    """``flash_attn_func`` of one of flash-attn's modules, told of dropout where there is some."""

    def bind(shape: Shape) -> Attend:
        found_in = importlib.import_module(module)
        function = found_in.flash_attn_func
        if shape.lengths:
            function = partial(found_in.flash_attn_varlen_func, **packing(shape))
        if shape.dropout_p > 0:
            function = partial(function, dropout_p=shape.dropout_p)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = function(q, k, v, causal=shape.causal)
            out = found[0] if isinstance(found, tuple) else found
            assert isinstance(out, Tensor)
            return out

        return attend

    return bind


def _fa3() -> Provider:
    """FA3 by the first of its modules that is there."""
    errors = {module: _import_error(module) for module in _FA3}
    module = next((name for name, error in errors.items() if error is None), None)
    reason = None if module else "; ".join(str(error) for error in errors.values())
    module = module or next(iter(_FA3))
    return Provider(
        "fa3",
        False,
        _bind_flash(module),
        package=_FA3[module],
        has_backward=module == "flash_attn_interface",
        has_dropout=False,
        has_packed=True,
        absent=lambda: reason,
    )


def _ours(name: str, backend: str, algorithm: str) -> Provider:
    return Provider(
        name,
        False,
        bind_tilewise(backend, algorithm),
        package="tilewise",
        has_packed=True,
        absent=lambda: None if backend == "auto" else _no_backend(backend),
    )


@cache
def _on_gpu() -> dict[str, Provider]:
    found = (
        _ours("tilewise", "auto", "auto"),
        _ours("tilewise-triton", "triton", "fa2"),
        _ours("tilewise-fa1", "triton", "fa1"),
        _ours("tilewise-gluon", "gluon", "auto"),
        Provider(
            "flash-attn",
            False,
            _bind_flash(_FA2),
            package="flash-attn",
            has_packed=True,
            absent=lambda: _import_error(_FA2),
        ),
        _fa3(),
        Provider(
            "fa4",
            False,
            _bind_flash(_FA4),
            package="flash-attn-4",
            has_dropout=False,
            has_packed=True,
            absent=lambda: _import_error(_FA4),
        ),
        Provider("sdpa-cudnn", True, bind_sdpa(SDPBackend.CUDNN_ATTENTION)),
        Provider("sdpa-flash", True, bind_sdpa(SDPBackend.FLASH_ATTENTION)),
        Provider("sdpa-memeff", True, bind_sdpa(SDPBackend.EFFICIENT_ATTENTION)),
        Provider("flex", True, _bind_flex, has_dropout=False),
        EAGER,
    )
    return {provider.name: provider for provider in found}


GPU_NAMES = (
    "tilewise", "tilewise-triton", "tilewise-fa1", "tilewise-gluon", "flash-attn", "fa3", "fa4",
    "sdpa-cudnn", "sdpa-flash", "sdpa-memeff", "flex", "eager",
)  # fmt: skip
NAMES = tuple(dict.fromkeys((*PROVIDERS, *GPU_NAMES)))


def providers_on(device: str) -> Mapping[str, Provider]:
    """Everything that may compute on ``device``, "cpu" or "cuda", present or not."""
    return PROVIDERS if device == CPU else _on_gpu()
