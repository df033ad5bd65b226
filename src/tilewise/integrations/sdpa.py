"""torch's ``scaled_dot_product_attention``: its contract, and its own calls on tilewise.

``scaled_dot_product_attention`` here is the function. ``activate`` makes torch's own run on
tilewise wherever torch takes its FlashAttention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from ..api import flash_attn_func
from ..errors import InvalidInputError
from . import aten

NAME = "tilewise"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, exact and tile by tile.

    Args:
        query: (..., nheads, seqlen_q, head_dim); float16, bfloat16, float32 or float64. Without
            heads, (seqlen_q, head_dim), too.
        key: (..., nheads_kv, seqlen_k, head_dim). Dimensions before the heads broadcast.
        value: (..., nheads_kv, seqlen_k, head_dim_v).
        attn_mask: broadcasts to (..., nheads, seqlen_q, seqlen_k); bool, True where a query may see
            a key, or floating, which is added to the scores and has a gradient.
        dropout_p: probability of dropping a weight, whatever the module's mode.
        is_causal: a query sees keys up to the diagonal from the top left corner.
        scale: factor of the scores; 1 / sqrt(head_dim) when None.
        enable_gqa: key and value may have fewer heads, by a whole factor; otherwise as many, or 1.

    Returns:
        (..., nheads, seqlen_q, head_dim_v). A query that sees no key gives 0.

    Raises:
        InvalidInputError: an argument cannot be right, as a mask beside ``is_causal``.
        UnsupportedError: no backend can take the call.

    >>> import torch
    >>> from tilewise.integrations.sdpa import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(2, 4, n, 8) for n in (3, 5, 5))
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out[:, :, 0], v[:, :, 0])  # the first query sees the first key alone
    True
    """
    if attn_mask is not None and is_causal:
        raise InvalidInputError("attn_mask", "a mask", "is_causal must then be False")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.dim() < 2:
            raise InvalidInputError(name, type(x).__name__, "must be strided, of 2 dimensions")
    if query.dim() == 2:
        key, value = (x[None] if x.dim() == 2 else x for x in (key, value))
        arguments = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        found = scaled_dot_product_attention(query[None], key, value, *arguments)
        return found.squeeze(-3) if found.shape[-3] == 1 else found
    query, key, value = _heads(query, key, value, enable_gqa)
    try:
        lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        shapes = tuple(tuple(x.shape) for x in (query, key, value))
        raise InvalidInputError("key", f"shapes {shapes}", "must broadcast") from None
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    right = -1
    if is_causal:  # row i sees key i, which ends bottom right of the keys that any row sees
        seqlen_k = min(seqlen_q, seqlen_k)
        key, value = key[..., :seqlen_k, :], value[..., :seqlen_k, :]
        right = seqlen_q - seqlen_k
    q, k, v = (_flat(x, lead) for x in (query, key, value))
    bias = None
    if attn_mask is not None:
        bias = _flat_mask(attn_mask, lead, (query.shape[-3], seqlen_q, seqlen_k))
    out = flash_attn_func(q, k, v, dropout_p, scale, window_size=(-1, right), attn_bias=bias)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).unflatten(0, lead) if lead else out[0].transpose(0, 1)


def _heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as torch has them: equal or 1, and fewer of keys only where that is enabled."""
    nheads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    most = max(nheads)
    if enable_gqa:
        if nheads[1] != nheads[2] or nheads[1] == 0 or nheads[0] % nheads[1]:
            raise InvalidInputError(
                "enable_gqa", f"{nheads} heads of query, key and value",
                "query must have a multiple of the heads that key and value have",
            )  # fmt: skip
        return query, key, value
    if any(n not in (1, most) for n in nheads):
        raise InvalidInputError(
            "key", f"{nheads} heads of query, key and value", "must be equal; see enable_gqa"
        )
    if nheads[0] == most and nheads[1] == nheads[2]:  # one head for all is not copied
        return query, key, value
    query, key, value = (x.expand(*x.shape[:-3], most, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


def _flat(x: Tensor, lead: torch.Size) -> Tensor:
    """(..., nheads, seqlen, head_dim) to (batch, seqlen, nheads, head_dim)."""
    x = x.expand(*lead, *x.shape[-3:])
    return x.reshape(math.prod(lead), *x.shape[-3:]).transpose(1, 2)


def _flat_mask(mask: Tensor, lead: torch.Size, full: tuple[int, int, int]) -> Tensor:
    """To four dimensions, each full or 1, with as little copied as can be."""
    wanted = (*lead, *full)
    shape = (1,) * (len(wanted) - mask.dim()) + tuple(mask.shape)
    fits = len(shape) == len(wanted)
    if not fits or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        raise InvalidInputError(
            "attn_mask", f"shape {tuple(mask.shape)}", f"must broadcast to {wanted}"
        )
    mask = mask.reshape(shape)
    if all(n == 1 for n in shape[:-3]):
        return mask.reshape(1, *shape[-3:])
    return mask.expand(*lead, *shape[-3:]).reshape(math.prod(lead), *shape[-3:])


def activate() -> None:
    """Makes torch's own attention run on tilewise where it takes its FlashAttention.

    That is ``scaled_dot_product_attention``, ``varlen_attn`` and context parallelism on GPUs, and
    on CPUs ``scaled_dot_product_attention``, and ``varlen_attn``, which torch has not there. torch
    still chooses FlashAttention by its own rules: a call that it gives to another implementation,
    for a mask on a GPU or dropout on a CPU, does not come here. ``torch.nn.attention.sdpa_kernel(
    SDPBackend.FLASH_ATTENTION)`` insists. What a function of torch asks for and tilewise has not is
    refused by name. It holds for the whole process, until ``deactivate``.
    """
    torch_attention.register_flash_attention_impl(NAME, register_fn=aten.register)
    torch_attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Gives torch its own FlashAttention back; does nothing when tilewise is not active."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()
