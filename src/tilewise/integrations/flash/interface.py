"""``flash_attn.flash_attn_interface``: what lies beneath flash-attn's public functions, old names.

The public ones are tilewise's own. Forward and backward as two calls are what ring attention is
built of.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ...api import Result, flash_attn_varlen_func
from ...arguments import Options, Packing
from ...errors import UnsupportedError
from .. import halves

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def refuse(**arguments: Any) -> None:
    """Raises UnsupportedError for the first argument that is neither None, False nor 0."""
    for name, given in arguments.items():
        if given is not None and (isinstance(given, Tensor) or given):
            raise UnsupportedError(f"{name} is not supported", {"tilewise": (f"no {name}",)})


def missing(name: str, why: str) -> Any:
    """A function that is there to be imported, and raises UnsupportedError when it is called."""

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported", {"tilewise": (why,)})

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = f"Not there yet ({why}): raises UnsupportedError."
    return absent


flash_attn_with_kvcache = missing("flash_attn_with_kvcache", "no cache of keys and values yet")


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> Forward:
    """out, lse, an empty tensor and the random state, without autograd.

    Args:
        q, k, v, dropout_p, softmax_scale, causal, softcap, alibi_slopes: as ``flash_attn_func``.
        window_size_left, window_size_right: the sides of its ``window_size``.
        return_softmax: refused when True.

    Returns:
        out (batch, seqlen_q, nheads, head_dim_v); lse (batch, nheads, seqlen_q) float32; (0,) in
        q's dtype; (2,) int64, the state that ``_flash_attn_backward`` wants for dropout.

    Raises:
        InvalidInputError, UnsupportedError: as ``flash_attn_func``.
    """
    refuse(return_softmax=return_softmax)
    window = (window_size_left, window_size_right)
    options = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return _forward(q, k, v, None, options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Forward:
    """``_flash_attn_forward`` of packed sequences.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            causal, softcap, alibi_slopes, seqused_k: as ``flash_attn_varlen_func``.
        window_size_left, window_size_right: the sides of its ``window_size``.
        return_softmax, block_table, leftpad_k: refused when given.
        zero_tensors: nothing to do: rows past the last sequence are always zero.

    Returns:
        As ``_flash_attn_forward``, with out (total_q, nheads, head_dim_v), lse (nheads, total_q).

    Raises:
        InvalidInputError, UnsupportedError: as ``flash_attn_varlen_func``.
    """
    refuse(return_softmax=return_softmax, block_table=block_table, leftpad_k=leftpad_k)
    window = (window_size_left, window_size_right)
    options = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k)
    return _forward(q, k, v, packing, options)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients into dq, dk and dv.

    Args:
        dout: gradient of out.
        q, k, v, dropout_p, softmax_scale, causal, softcap, alibi_slopes, deterministic: as
            ``flash_attn_func``.
        out, softmax_lse: of the forward; in a ring those over all keys.
        dq, dk, dv: in the shapes of q, k and v; written to, where not None.
        window_size_left, window_size_right: the sides of ``window_size``.
        rng_state: of the forward; needed with dropout.

    Returns:
        (batch, nheads, seqlen_q) float32, the sum of dout * out along a row.

    Raises:
        InvalidInputError, UnsupportedError: as ``flash_attn_func``; dropout without ``rng_state``.
    """
    window = (window_size_left, window_size_right)
    options = Options(
        dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, bool(deterministic),
        seed=_seed(rng_state, dropout_p),
    )  # fmt: skip
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), None, options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """``_flash_attn_backward`` of packed sequences.

    Args:
        dout, out, softmax_lse, dq, dk, dv, rng_state, window_size_left, window_size_right: as
            ``_flash_attn_backward``.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            causal, softcap, alibi_slopes, deterministic: as ``flash_attn_varlen_func``.
        zero_tensors: nothing to do, as in the forward.

    Returns:
        (nheads, total_q) float32, the sum of dout * out along a row.

    Raises:
        InvalidInputError, UnsupportedError: as ``_flash_attn_backward``.
    """
    window = (window_size_left, window_size_right)
    options = Options(
        dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, bool(deterministic),
        seed=_seed(rng_state, dropout_p),
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), packing, options)


def flash_attn_unpadded_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` by its name in flash-attn 1.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            deterministic: as ``flash_attn_varlen_func``.
        causal: the diagonal began top left in flash-attn 1, so that rows and keys must be as many.
        return_attn_probs: refused when True: the results had another form.

    Returns:
        out (total_q, nheads, head_dim_v).

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: causal sequences that differ in rows and keys, or probabilities.
    """
    refuse(return_attn_probs=return_attn_probs)
    if causal and cu_seqlens_q is not cu_seqlens_k and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise UnsupportedError(
            "causal flash_attn_unpadded_func with cu_seqlens_k other than cu_seqlens_q",
            {"tilewise": ("the diagonal ends bottom right; flash-attn 1's began top left",)},
        )
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, deterministic=deterministic,
    )  # fmt: skip


def flash_attn_unpadded_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Result:
    """``flash_attn_unpadded_func`` on k and v in one tensor, (total_k, 2, nheads, head_dim)."""
    k, v = kv.unbind(1)
    return flash_attn_unpadded_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, return_attn_probs, deterministic,
    )  # fmt: skip


def flash_attn_unpadded_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Result:
    """``flash_attn_unpadded_func`` on all three in one tensor, (total, 3, nheads, head_dim)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_unpadded_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, return_attn_probs, deterministic,
    )  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options) -> Forward:
    out, lse, seed = halves.forward(q, k, v, packing, options)
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if seed is not None:
        rng_state[:1] = seed
    return out, lse, q.new_empty(0), rng_state


def _seed(rng_state: Tensor | None, dropout_p: float) -> Tensor | None:
    if dropout_p == 0:
        return None
    if rng_state is None:
        raise UnsupportedError("dropout without rng_state", {"tilewise": ("the mask is its",)})
    return rng_state[:1]


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    packing: Packing | None,
    options: Options,
) -> Tensor:
    found = halves.backward(dout, q, k, v, out, lse, packing, options)
    for target, grad in zip(into, found, strict=True):
        if target is not None:
            target.copy_(grad)
    return torch.linalg.vecdot(dout.float(), out.float()).transpose(-1, -2).contiguous()
