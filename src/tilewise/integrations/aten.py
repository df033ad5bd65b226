"""torch's own FlashAttention operators, on tilewise; ``sdpa.activate`` puts them in place.

Each function has the arguments and results of the operator of its name, as torch's schemas say.
Heads come before rows in ``_scaled_dot_product_*`` and after them in ``_flash_*``. Operators gain
arguments from version to version: those without meaning here must be None.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, library

from ..arguments import Options, Packing
from ..errors import InvalidInputError, UnsupportedError
from . import halves


class Handle:
    """Keeps the operators in place until ``remove``."""

    def __init__(self, libraries: list[library.Library]) -> None:
        self._libraries = libraries

    def remove(self) -> None:
        """Gives torch its own operators back."""
        for one in self._libraries:
            one._destroy()
        self._libraries = []


def register() -> Handle:
    """Puts tilewise in the place of torch's FlashAttention, on CUDA and CPU."""
    libraries = []
    for key, operators in (("CUDA", (*SHARED, *CUDA)), ("CPU", (*SHARED, *CPU))):
        own = library.Library("aten", "IMPL", key)
        libraries.append(own)
        with warnings.catch_warnings():  # that there is an operator already is the point
            warnings.simplefilter("ignore")
            for operator in operators:
                own.impl(operator.__name__, operator, allow_override=True)
    return Handle(libraries)


def _options(
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None] = (None, None),
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
) -> Options:
    left, right = (-1 if side is None else side for side in window)
    return Options(
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size=(left, right),
        alibi_slopes=alibi_slopes,
        seed=seed,
    )


def _packing(
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    seqused_k: Tensor | None = None,
) -> Packing | None:
    if cum_seq_q is None and cum_seq_k is None:
        if seqused_k is not None:
            _refuse("seqused_k without cum_seq_q")
        return None
    if cum_seq_q is None or cum_seq_k is None:
        name = "cum_seq_q" if cum_seq_q is None else "cum_seq_k"
        raise InvalidInputError(name, "None", "the other one is given")
    return Packing(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k=seqused_k)


def _refuse(what: str) -> None:
    raise UnsupportedError(f"torch's FlashAttention was asked for {what}", {"tilewise": ("no",)})


def _refuse_further(return_debug_mask: bool, further: dict[str, Any]) -> None:
    if return_debug_mask:
        _refuse("return_debug_mask=True")
    for name, given in further.items():
        if given is not None:
            _refuse(name)


def _random_state(seed: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """The seed in the form in which torch keeps it: two uint64, and an unused one."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if seed is not None:
        state[:1] = seed
    return state.view(torch.uint64), torch.zeros((), dtype=torch.uint64, device=q.device)


def _seed(state: Tensor, dropout_p: float) -> Tensor | None:
    return state.view(torch.int64)[:1] if dropout_p > 0 else None


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout that torch promises to torch.compile: that of ``like``."""
    if x.shape != like.shape:
        return x
    wanted = torch.empty_like(like)
    return x if x.stride() == wanted.stride() else wanted.copy_(x)


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,  # keys are never split, which is what 1 asks for
    **further: Any,
) -> tuple[Tensor, ...]:
    _refuse_further(return_debug_mask, further)
    window = (window_size_left, window_size_right)
    options = _options(dropout_p, is_causal, scale, window, alibi_slopes)
    packing = _packing(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k)
    out, lse, seed = halves.forward(query, key, value, packing, options)
    return _laid_out(out, query), lse, *_random_state(seed, query), query.new_empty(0)


def _flash_attention_forward_no_dropout_inplace(
    out: Tensor, query: Tensor, *arguments: Any, **further: Any
) -> Tensor:
    found, lse, *_ = _flash_attention_forward(query, *arguments, **further)
    out.copy_(found)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **further: Any,
) -> tuple[Tensor, ...]:
    _refuse_further(False, further)
    window = (window_size_left, window_size_right)
    options = _options(dropout_p, is_causal, scale, window, seed=_seed(rng_state, dropout_p))
    packing = _packing(cum_seq_q, cum_seq_k, max_q, max_k)
    inputs = (query, key, value)
    grads = halves.backward(grad_out, *inputs, out, logsumexp, packing, options)
    return tuple(_laid_out(g, x) for g, x in zip(grads, inputs, strict=True))


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_further(return_debug_mask, {})
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, seed = halves.forward(q, k, v, None, _options(dropout_p, is_causal, scale))
    out = _laid_out(out.transpose(1, 2), query)
    state = _random_state(seed, query)
    return out, lse, None, None, q.shape[1], k.shape[1], *state, query.new_empty(0)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    options = _options(dropout_p, is_causal, scale, seed=_seed(philox_seed, dropout_p))
    grads = _dense_backward(grad_out, query, key, value, out, logsumexp, options)
    return tuple(_laid_out(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def _scaled_dot_product_flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    k, v, options = _top_left(query, key, value, dropout_p, is_causal, attn_mask, scale)
    q, k, v = (x.transpose(1, 2) for x in (query, k, v))
    out, lse, _ = halves.forward(q, k, v, None, options)
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return _laid_out(out.transpose(1, 2), query), lse


def _scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    k, v, options = _top_left(query, key, value, dropout_p, is_causal, attn_mask, scale)
    dq, dk, dv = _dense_backward(grad_out, query, k, v, out, logsumexp, options)
    unseen = key.shape[2] - k.shape[2]
    if unseen:
        pad = (0, 0, 0, 0, 0, unseen)  # of rows, which come before heads in memory
        dk, dv = (torch.nn.functional.pad(x.transpose(1, 2), pad).transpose(1, 2) for x in (dk, dv))
    return dq, dk, dv


def _top_left(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Options]:
    """The CPU operator's diagonal begins top left; keys past the last row's are left out."""
    if dropout_p > 0:
        _refuse("dropout on a CPU, whose operator keeps no seed")
    options = _options(0.0, False, scale)._replace(attn_bias=attn_mask)
    if not is_causal:
        return key, value, options
    seqlen = min(query.shape[2], key.shape[2])
    if attn_mask is not None and attn_mask.shape[-1] > 1:
        options = options._replace(attn_bias=attn_mask[..., :seqlen])
    options = options._replace(window_size=(-1, query.shape[2] - seqlen))
    return key[:, :, :seqlen], value[:, :, :seqlen], options


def _dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, ...]:
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = halves.backward(dout, q, k, v, o, lse, None, options)
    return tuple(g.transpose(1, 2) for g in grads)


SHARED = (
    _flash_attention_forward,
    _flash_attention_forward_no_dropout_inplace,
    _flash_attention_backward,
)
CUDA = (_scaled_dot_product_flash_attention, _scaled_dot_product_flash_attention_backward)
CPU = (
    _scaled_dot_product_flash_attention_for_cpu,
    _scaled_dot_product_flash_attention_for_cpu_backward,
)
