"""``flash_attn_interface``: FlashAttention-3's module, with its own order of arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import api
from ...arguments import Options, Packing
from ...errors import InvalidInputError
from .. import halves
from .interface import missing, refuse

flash_attn_with_kvcache = missing("flash_attn_with_kvcache", "no cache of keys and values yet")
flash_attn_combine = missing("flash_attn_combine", "see tilewise.merge_attention")
get_scheduler_metadata = missing("get_scheduler_metadata", "there is no such scheduler")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> api.Result:
    """``tilewise.flash_attn_func`` with FlashAttention-3's signature: no dropout.

    Args:
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic: as
            ``tilewise.flash_attn_func``.
        qv, q_descale, k_descale, v_descale, attention_chunk: refused when given.
        num_splits, pack_gqa, sm_margin: say how to compute, and change nothing.
        return_attn_probs: return (out, lse).

    Returns:
        out (batch, seqlen_q, nheads, head_dim_v); with ``return_attn_probs`` also lse (batch,
        nheads, seqlen_q).

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: a refused argument is given, or no backend can take the call.
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    return api.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic,
        return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> api.Result:
    """``tilewise.flash_attn_varlen_func`` with FlashAttention-3's signature: no dropout.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            softmax_scale, causal, window_size, softcap, deterministic: as
            ``tilewise.flash_attn_varlen_func``.
        qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
            return_attn_probs: as ``flash_attn_func`` here.

    Returns:
        out (total_q, nheads, head_dim_v); with ``return_attn_probs`` also lse (nheads, total_q).

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: a refused argument is given, or no backend can take the call.
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    return api.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale,
        causal, window_size, softcap, None, deterministic, return_lse=return_attn_probs,
        seqused_q=seqused_q, seqused_k=seqused_k,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> api.Result:
    """``flash_attn_func`` here on q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, nheads + 2 * nheads_kv,
            head_dim) with ``num_heads_q``.
        num_heads_q: how many heads are q's, in four dimensions.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk,
            softcap, deterministic, sm_margin, return_attn_probs: as ``flash_attn_func`` here.

    Returns:
        As ``flash_attn_func`` here.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: a refused argument is given, or no backend can take the call.
    """
    q, k, v = split_heads(qkv, num_heads_q)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """q, k and v as views of (..., 3, nheads, head_dim) or (..., all heads, head_dim).

    Args:
        qkv: five dimensions, or four with ``num_heads_q``.
        num_heads_q: how many heads are q's.

    Raises:
        InvalidInputError: the dimensions do not fit.
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv.unbind(2)
    if qkv.dim() != 4 or num_heads_q is None:
        raise InvalidInputError(
            "qkv", f"shape {tuple(qkv.shape)}",
            "must be (batch, seqlen, 3, nheads, head_dim), or with num_heads_q of four dimensions",
        )  # fmt: skip
    nheads_kv, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if odd or nheads_kv < 1 or num_heads_q < 1:
        raise InvalidInputError("num_heads_q", num_heads_q, f"there are {qkv.shape[2]} heads")
    return qkv.split([num_heads_q, nheads_kv, nheads_kv], dim=2)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and two empty tensors, without autograd.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, softcap: as ``flash_attn_func``, or as ``flash_attn_varlen_func``
            where cu_seqlens are given.
        out_: written to as well, and returned for out, where given.
        window_size_left, window_size_right: the sides of ``window_size``.
        rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin: change nothing.
        k_new, v_new, and all others: refused when given.

    Returns:
        out, lse, and two empty float32 tensors, where splits would be.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: a refused argument is given, or no backend can take the call.
    """
    refuse(
        k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary,
    )  # fmt: skip
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    window = (window_size_left, window_size_right)
    options = Options(0.0, softmax_scale, causal, window, softcap)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    out, lse, _ = halves.forward(q, k, v, packing, options)
    if out_ is not None:
        out = out_.copy_(out)
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes the gradients into dq, dk and dv.

    Args:
        dout: gradient of out.
        out, softmax_lse: of the forward; in a ring those over all keys.
        sequed_q, sequed_k: as ``seqused_q`` and ``seqused_k`` of the forward.
        dq, dk, dv: in the shapes of q, k and v; written to, where not None.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal,
            window_size_left, window_size_right, softcap, deterministic, sm_margin: as of the
            forward.

    Returns:
        lse's shape, float32: the sum of dout * out along a row.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: no backend can take the call.
    """
    window = (window_size_left, window_size_right)
    options = Options(0.0, softmax_scale, is_causal, window, softcap, None, bool(deterministic))
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sequed_q, sequed_k)
    found = halves.backward(dout, q, k, v, out, softmax_lse, packing, options)
    for target, grad in zip((dq, dk, dv), found, strict=True):
        if target is not None:
            target.copy_(grad)
    return torch.linalg.vecdot(dout.float(), out.float()).transpose(-1, -2).contiguous()


def _refuse(*given: Any) -> None:
    names = ("qv", "q_descale", "k_descale", "v_descale", "attention_chunk")
    refuse(**dict(zip(names, given, strict=True)))


def _packing(
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int | None,
    max_k: int | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> Packing | None:
    if cu_q is None and cu_k is None:
        refuse(seqused_q=seqused_q, seqused_k=seqused_k)
        return None
    for name, given in (
        ("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("max_seqlen_q", max_q),
        ("max_seqlen_k", max_k),
    ):  # fmt: skip
        if given is None:
            raise InvalidInputError(name, "None", "goes with the other cu_seqlens and max_seqlen")
    assert cu_q is not None and cu_k is not None and max_q is not None and max_k is not None
    return Packing(cu_q, cu_k, max_q, max_k, seqused_q, seqused_k)
