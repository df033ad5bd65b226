"""The public functions: flash-attn's names and argument order, with keyword-only additions.

``import tilewise as flash_attn`` is a drop-in for the functions below. What every function shares
is said once, in ``flash_attn_func``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import repeats
from .arguments import Options, Packing, dense_call, packed_call, refuse_block_table
from .backends.base import AttentionTensors
from .dispatch import Choice, choose
from .errors import InvalidInputError, UnsupportedError
from .ops import attention, autograd
from .ops.schema import Scalars, describe

autograd.register()

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


class Additions(TypedDict, total=False):
    """The keyword-only additions to flash-attn's arguments; see ``flash_attn_func``."""

    attn_bias: Tensor | None
    sink: Tensor | None
    return_lse: bool
    backend: str
    algorithm: str
    seed: int | Tensor | None
    validate: bool


class PackedAdditions(Additions, total=False):
    """The further additions of the varlen functions."""

    seqused_q: Tensor | None
    seqused_k: Tensor | None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    algorithm: str = "auto",
    seed: int | Tensor | None = None,
    validate: bool = False,
) -> Result:
    """Exact attention, softmax(q k^T) v, tile by tile.

    Args:
        q: (batch, seqlen_q, nheads, head_dim); float16, bfloat16, float32 or float64, any strides.
        k: (batch, seqlen_k, nheads_kv, head_dim), of q's dtype and device. Query head h reads key
            head h // (nheads / nheads_kv).
        v: (batch, seqlen_k, nheads_kv, head_dim_v).
        dropout_p: probability of dropping a weight, in [0, 1 - 2^-17), rounded to 1/65536; what is
            kept is divided by 1 - dropout_p.
        softmax_scale: factor of q k^T; 1 / sqrt(head_dim) when None.
        causal: a query sees keys up to its diagonal, which ends in the bottom right corner.
        window_size: (left, right), how many keys a query sees to either side of its diagonal; -1 is
            without limit. ``causal`` sets right to 0.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: (nheads,) or (batch, nheads), no gradient; scores fall by slope * distance
            from the diagonal.
        deterministic: equal bits run to run; also on under ``torch.use_deterministic_algorithms``.
        return_attn_probs: return (out, lse, probabilities), the last (batch, nheads, seqlen_q,
            seqlen_k) after dropout, without gradient: O(N^2), for testing.
        attn_bias: broadcasts to (batch, nheads, seqlen_q, seqlen_k); floating is added to the
            scores and has a gradient (-inf hides a key), bool is True where a query may see a key.
        sink: (nheads,), one more logit for each head that takes part in the softmax without a
            value.
        return_lse: return (out, lse); lse is differentiable.
        backend: "auto", or a backend's name, which is then taken or refused.
        algorithm: "auto", or one of the backend's: "fa1" and "fa2" of "cpu" and "triton".
        seed: of dropout, an int or an int64 tensor of one element; drawn from torch's generator
            when None.
        validate: check values inside tensors on a device too, which synchronises.

    Returns:
        out (batch, seqlen_q, nheads, head_dim_v) in q's dtype, contiguous. With ``return_lse`` also
        lse (batch, nheads, seqlen_q), the natural logarithm of the sum of exponentials, float32
        (float64 for float64). A query that sees no key has out = 0 and lse = -inf (lse = sink with
        a sink).

    Raises:
        InvalidInputError: an argument cannot be right; the message names it.
        UnsupportedError: no backend, or not the named one, can take the call; the message says why.

    Source: FlashAttention (Dao et al., 2022) and FlashAttention-2 (Dao, 2023); meaning as in
        flash-attn 2.8.

    >>> import torch, tilewise
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> out, lse = tilewise.flash_attn_func(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 5, 2, 8]), torch.Size([1, 2, 5]))
    >>> torch.allclose(out[:, 0], v[:, 0])  # the first query sees the first key alone
    True
    """
    given = AttentionTensors(
        q, k, v, attn_bias, alibi_slopes, sink, None, None, None, None,
        seed,  # type: ignore[arg-type]
    )  # fmt: skip
    scalars = (
        dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs, return_lse,
        backend, algorithm, validate,
    )  # fmt: skip
    repeat = repeats.find(given, scalars, window_size)
    if repeat is not None:
        return repeat(given)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, attn_bias, sink, return_lse, backend, algorithm, seed, validate,
    )  # fmt: skip
    taken = dense_call(q, k, v, options)
    result = _run(*taken, options)
    repeats.remember(given, scalars, options, *taken)
    return result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **additions: Unpack[Additions],
) -> Result:
    """``flash_attn_func`` on q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in ``flash_attn_func``.
        **additions: the keyword-only arguments of ``flash_attn_func``.

    Returns:
        As ``flash_attn_func``.

    Raises:
        InvalidInputError: an argument cannot be right; the message names it.
        UnsupportedError: no backend can take the call.
    """
    q, k, v = _unpack("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **additions,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **additions: Unpack[Additions],
) -> Result:
    """``flash_attn_func`` on k and v in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        kv: (batch, seqlen_k, 2, nheads_kv, head_dim).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in ``flash_attn_func``.
        **additions: the keyword-only arguments of ``flash_attn_func``.

    Returns:
        As ``flash_attn_func``.

    Raises:
        InvalidInputError: an argument cannot be right; the message names it.
        UnsupportedError: no backend can take the call.
    """
    k, v = _unpack("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **additions,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    algorithm: str = "auto",
    seed: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    validate: bool = False,
) -> Result:
    """Attention within each of several packed sequences.

    Causal, windows, ALiBi and dropout count rows and columns within the sequence. What is not said
    here is as in ``flash_attn_func``.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_kv, head_dim).
        v: (total_k, nheads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers, the sequences' boundaries. Rows past the
            last one are slack: out = 0, lse = -inf, no gradient.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in
            ``flash_attn_func``.
        return_attn_probs: as in ``flash_attn_func``; the probabilities are (batch, nheads,
            max_seqlen_q, max_seqlen_k), zero past each sequence.
        block_table: holds flash-attn's place; anything but None is refused.
        attn_bias: (nheads or 1, total_q, max_seqlen_k), columns counted within the sequence;
            floating or bool.
        sink, return_lse, backend, algorithm, seed, validate: as in ``flash_attn_func``.
        seqused_q, seqused_k: (batch,) integers, how many of each sequence's first rows are used.

    Returns:
        out (total_q, nheads, head_dim_v); with ``return_lse`` also lse (nheads, total_q).

    Raises:
        InvalidInputError: an argument cannot be right, or a boundary decreases or points past the
            data.
        UnsupportedError: no backend can take the call.

    >>> import torch, tilewise
    >>> q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)  # two sequences, of 2 and 3 rows
    >>> tilewise.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3).shape
    torch.Size([5, 2, 8])
    """
    refuse_block_table(block_table)
    given = AttentionTensors(
        q, k, v, attn_bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        seed,  # type: ignore[arg-type]
    )  # fmt: skip
    scalars = (
        dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs, return_lse,
        backend, algorithm, validate, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    repeat = repeats.find(given, scalars, window_size)
    if repeat is not None:
        return repeat(given)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, attn_bias, sink, return_lse, backend, algorithm, seed, validate,
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    taken = packed_call(q, k, v, packing, options)
    result = _run(*taken, options)
    repeats.remember(given, scalars, options, *taken)
    return result


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **additions: Unpack[PackedAdditions],
) -> Result:
    """``flash_attn_varlen_func`` on q, k and v in one tensor.

    Args:
        qkv: (total, 3, nheads, head_dim).
        cu_seqlens: (batch + 1,) integers, of queries and keys alike.
        max_seqlen: int, at least the longest sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in ``flash_attn_varlen_func``.
        **additions: the keyword-only arguments of ``flash_attn_varlen_func``.

    Returns:
        As ``flash_attn_varlen_func``.

    Raises:
        InvalidInputError: an argument cannot be right; the message names it.
        UnsupportedError: no backend can take the call.
    """
    q, k, v = _unpack("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **additions,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **additions: Unpack[PackedAdditions],
) -> Result:
    """``flash_attn_varlen_func`` on k and v in one tensor.

    Args:
        q: (total_q, nheads, head_dim).
        kv: (total_k, 2, nheads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in ``flash_attn_varlen_func``.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in ``flash_attn_varlen_func``.
        **additions: the keyword-only arguments of ``flash_attn_varlen_func``.

    Returns:
        As ``flash_attn_varlen_func``.

    Raises:
        InvalidInputError: an argument cannot be right; the message names it.
        UnsupportedError: no backend can take the call.
    """
    k, v = _unpack("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **additions,
    )  # fmt: skip


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Choice:
    """Which backend a call would take, and each other backend's reasons against it.

    Args:
        q, k, v: tensors of the call; meta tensors do.
        **arguments: any argument of ``flash_attn_func``, or of ``flash_attn_varlen_func`` when
            ``cu_seqlens_q`` is among them.

    Returns:
        A ``Choice`` with ``backend``, ``algorithm`` and ``reasons``; printing it shows all three.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: no backend, or not the named one, can take the call.

    >>> import torch, tilewise
    >>> x = torch.empty(1, 4096, 8, 64, device="meta")
    >>> tilewise.explain(x, x, x, causal=True).backend
    'cpu'
    """
    refuse_block_table(arguments.pop("block_table", None))
    packing = {name: arguments.pop(name) for name in Packing._fields if name in arguments}
    for name in Packing._fields[:4]:
        if packing and name not in packing:
            raise InvalidInputError(name, "nothing", f"goes with {', '.join(packing)}")
    for name in arguments:
        if name not in Options._fields:
            raise TypeError(f"explain() got an unexpected keyword argument {name!r}")
    options = Options(**arguments)
    if options.seed is None:
        options = options._replace(seed=0)  # none is drawn: explaining leaves the generator alone
    if packing:
        tensors, scalars = packed_call(q, k, v, Packing(**packing), options)
    else:
        tensors, scalars = dense_call(q, k, v, options)
    differentiable = (tensors.q, tensors.k, tensors.v, tensors.attn_bias, tensors.sink)
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in differentiable
    )
    problem = describe(tensors, scalars, needs_grad, options.return_attn_probs)
    return choose(problem, scalars.backend, scalars.algorithm)


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins partial results over disjoint keys into the result over all of them; differentiable.

        lse = log sum_p exp(lse_p)        out = sum_p exp(lse_p - lse) out_p

    A part without visible keys (lse = -inf) changes nothing, whatever its out holds. A sink must be
    given to one part only.

    Args:
        parts: (out, lse) pairs of equal shapes: out (batch, seqlen_q, nheads, head_dim_v) with lse
            (batch, nheads, seqlen_q), or out (total_q, nheads, head_dim_v) with lse (nheads,
            total_q).

    Returns:
        out in the parts' dtype and lse, float32 (float64 for float64 parts). Where no part sees a
        key, out = 0 and lse = -inf.

    Raises:
        InvalidInputError: there are no parts, or their shapes do not fit.

    >>> import torch, tilewise
    >>> q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    >>> def part(keys):
    ...     return tilewise.flash_attn_func(q, k[:, keys], v[:, keys], return_lse=True)
    >>> halves = [part(slice(3)), part(slice(3, 6))]
    >>> out, lse = tilewise.merge_attention(halves)
    >>> torch.allclose(out, tilewise.flash_attn_func(q, k, v))
    True
    """
    _check_parts(parts)
    first_out = parts[0][0]
    dtype = torch.float64 if first_out.dtype == torch.float64 else torch.float32
    lses = torch.stack([lse.to(dtype) for _, lse in parts])  # (parts, ..., nheads, seqlen_q)
    outs = torch.stack([out.to(dtype) for out, _ in parts])  # (parts, ..., seqlen_q, nheads, Dv)
    m = lses.detach().amax(0)
    m = m.masked_fill(m == float("-inf"), 0.0)
    weights = torch.exp(lses - m)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    share = (weights / total).mT.unsqueeze(-1)  # (parts, ..., seqlen_q, nheads, 1)
    out = (share * outs.masked_fill(share == 0, 0.0)).sum(0)
    lse = (m + torch.log(total)).masked_fill(empty, float("-inf"))
    return out.to(first_out.dtype), lse


def _check_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not isinstance(parts, (list, tuple)) or not parts:
        kind = "no parts" if isinstance(parts, (list, tuple)) else type(parts).__name__
        raise InvalidInputError("parts", kind, "must be a list of one or more (out, lse)")
    first: Tensor | None = None
    for i, part in enumerate(parts):
        name = f"parts[{i}]"
        pair = isinstance(part, (tuple, list)) and len(part) == 2
        if not pair or not all(isinstance(x, Tensor) and x.is_floating_point() for x in part):
            raise InvalidInputError(name, type(part).__name__, "must be (out, lse), both floating")
        out, lse = part
        first = out if first is None else first
        if out.dim() not in (3, 4) or out.shape != first.shape:
            raise InvalidInputError(
                name,
                f"out of shape {tuple(out.shape)}",
                "must be (batch, seqlen_q, nheads, head_dim_v) or (total_q, nheads, head_dim_v), "
                f"and of the first part's shape {tuple(first.shape)}",
            )
        if (out.dtype, out.device) != (first.dtype, first.device) or lse.device != out.device:
            raise InvalidInputError(
                name,
                f"{out.dtype} on {out.device} with lse on {lse.device}",
                f"all parts must have one dtype and device, here {first.dtype} on {first.device}",
            )
        if lse.shape != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
            raise InvalidInputError(
                name, f"lse of shape {tuple(lse.shape)}", f"out has {tuple(out.shape)}"
            )


def _unpack(name: str, x: Tensor, parts: int, dims: int) -> tuple[Tensor, ...]:
    """Views of the parts along the dimension before the heads."""
    if not isinstance(x, Tensor):
        raise InvalidInputError(name, type(x).__name__, "must be a tensor")
    if x.dim() != dims or x.shape[-3] != parts:
        lead = "batch, seqlen" if dims == 5 else "total"
        raise InvalidInputError(
            name, f"shape {tuple(x.shape)}", f"must be ({lead}, {parts}, nheads, head_dim)"
        )
    return x.unbind(-3)


def _run(tensors: AttentionTensors, scalars: Scalars, options: Options) -> Result:
    t = tensors
    if not torch.compiler.is_compiling():
        for x in (t.q, t.k, t.v, t.attn_bias, t.sink):
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
                raise UnsupportedError(
                    "forward-mode derivatives", {"every backend": ("no jvp; use reverse mode",)}
                )
    if options.return_attn_probs:  # refused here, before the forward, where no backend has it
        with torch.no_grad():
            probs = attention.flash_attn_probs(*t, *scalars)
    out, lse = autograd.attention(t, scalars)
    if not (options.return_lse or options.return_attn_probs):
        return out
    lse = repeats.users_lse(lse, t.q)
    return (out, lse, probs) if options.return_attn_probs else (out, lse)
