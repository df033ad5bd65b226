"""Which row sees which key, in the terms of tilewise's functions, and attention by it.

q is (batch, seqlen_q, nheads, head_dim), k (batch, seqlen_k, nheads_kv, head_dim) and v (batch,
seqlen_k, nheads_kv, head_dim_v) throughout.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..errors import InvalidInputError, UnsupportedError
from ..formats.varlen import boundaries
from .masks import PatternMask, documents_of, same_document, unread

Packing = tuple[Tensor | None, Tensor | None, int | Tensor | None, int | Tensor | None]


class Seen(NamedTuple):
    """A row sees a key when everything given says so.

    Attributes:
        left, right: sides of a window, aligned to the bottom right corner; -1 has no limit.
        keep: (batch, seqlen_k) bool.
        documents: (batch, seqlen) integers that grow along a row, one for each document.
        mask: four dimensions that broadcast to (batch, nheads, seqlen_q, seqlen_k), bool, or
            floating, which is added.
    """

    left: int = -1
    right: int = -1
    keep: Tensor | None = None
    documents: Tensor | None = None
    mask: Tensor | None = None


def seen_by_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, position_ids: Tensor | None
) -> tuple[Tensor, Tensor, Seen]:
    """What a mask of four dimensions says.

    Args:
        q, k, v: see the module.
        mask: bool (True is seen) or floating (added).
        position_ids: (batch or 1, seqlen) integers; read where a ``PatternMask`` says that the
            model's caller gave no mask.

    Returns:
        k and v, without keys that no row sees where the window can then be told, and what is seen.

    Raises:
        InvalidInputError: the mask is neither bool nor floating, or is of other lengths.
    """
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise InvalidInputError("attention_mask", mask.dtype, "must be bool or floating")
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if not isinstance(mask, PatternMask) or mask.exact is not None:
        return k, v, Seen(mask=mask.exact if isinstance(mask, PatternMask) else mask)
    if mask.shape[2:] != (seqlen_q, seqlen_k):
        raise InvalidInputError(
            "attention_mask", f"shape {tuple(mask.shape)}",
            f"there are {seqlen_q} rows and {seqlen_k} keys",
        )  # fmt: skip
    left, right, room = mask.band
    seen = Seen(left, right, mask.keep, mask.documents)
    if room == 0:
        if mask.asked or mask.documents is not None or right != 0:
            return k, v, seen
        return k, v, seen._replace(documents=_documents(q, k, position_ids))
    if right != 0:
        return k, v, Seen(mask=mask.dense())
    k, v = k[:, : seqlen_k - room], v[:, : seqlen_k - room]
    keep = None if mask.keep is None else mask.keep[:, : k.shape[1]]
    return k, v, seen._replace(keep=keep)


def seen_by_flags(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    causal: bool,
    window: int | None,
    position_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Seen]:
    """What flags say, beside a mask of real keys or none.

    Args:
        q, k, v: see the module.
        keep: (batch, seqlen), nonzero where a key is real, or None. It ends with the newest key:
            keys beyond are a static cache's room, and what it has before is a sliding cache's past.
        causal: a row sees keys up to its diagonal.
        window: how many keys a row sees, its own among them, to either side.
        position_ids: (batch or 1, seqlen) integers; read in causal attention without ``keep``.

    Returns:
        As ``seen_by_mask``.

    Raises:
        InvalidInputError: ``keep`` is not (batch, seqlen) or is floating, or the window is empty.
    """
    if window is not None and window < 1:
        raise InvalidInputError("sliding_window", window, "must be at least 1, or None")
    side = -1 if window is None else window - 1
    seen = Seen(side, 0 if causal else side)
    if keep is not None:
        if keep.dim() != 2 or keep.is_floating_point():
            raise InvalidInputError(
                "attention_mask", f"{keep.dtype} of shape {tuple(keep.shape)}",
                "must be (batch, seqlen_k) bool or integer, or have four dimensions",
            )  # fmt: skip
        keep = keep.bool()[:, -k.shape[1] :]
        k, v = k[:, : keep.shape[1]], v[:, : keep.shape[1]]
        return k, v, seen._replace(keep=keep)
    return k, v, seen._replace(documents=_documents(q, k, position_ids) if causal else None)


def _documents(q: Tensor, k: Tensor, position_ids: Tensor | None) -> Tensor | None:
    """Documents by position_ids that start again, in self attention with one kind of position."""
    batch, seqlen = q.shape[:2]
    if position_ids is None or seqlen in (0, 1) or k.shape[1] != seqlen:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != seqlen:
        return None
    documents = documents_of(position_ids).expand(batch, seqlen)
    return documents if unread(documents) or documents.any() else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, bias: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention of each row to what it sees.

    Args:
        q, k, v: see the module.
        seen: which keys.
        bias: broadcasts to (batch, nheads, seqlen_q, seqlen_k), added to the scores, or None.
        options: further arguments of ``flash_attn_func``.

    Returns:
        (batch, seqlen_q, nheads, head_dim_v).
    """
    alone = seen.keep is None and seen.mask is None and bias is None
    if seen.documents is not None and alone and not unread(seen.documents):
        steps = torch.nn.functional.pad(seen.documents.diff(dim=-1) != 0, (1, 0))
        cu_seqlens, longest = boundaries(steps)
        return _varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, seen, options)
    allowed = [] if seen.keep is None else [seen.keep[:, None, None, :]]
    if seen.documents is not None:
        allowed.append(same_document(seen.documents, seen.documents))
    added = [] if bias is None else [bias]
    if seen.mask is not None:
        (allowed if seen.mask.dtype == torch.bool else added).append(seen.mask)
    together = _together(allowed, added)
    window = (seen.left, seen.right)
    out = flash_attn_func(q, k, v, window_size=window, attn_bias=together, **options)
    assert isinstance(out, Tensor)
    return out


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    seen: Seen,
    options: dict[str, Any],
) -> Tensor:
    """Packed attention of a batch's rows, one after the other, by nothing but a window."""
    qf, kf, vf = (x.flatten(0, 1) for x in (q, k, v))
    window = (seen.left, seen.right)
    out = flash_attn_varlen_func(
        qf, kf, vf, cu_q, cu_k, max_q, max_k, window_size=window, **options
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, q.shape[:2])


def _together(allowed: list[Tensor], added: list[Tensor]) -> Tensor | None:
    """One ``attn_bias`` of bool masks and of what is added."""
    mask = reduce(torch.logical_and, allowed) if allowed else None
    bias = reduce(torch.add, added) if added else None
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, float("-inf"))


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Seen,
    bias: Tensor | None,
    packing: Packing,
    options: dict[str, Any],
) -> Tensor:
    """``attend`` within packed sequences.

    Args:
        q, k, v: see the module; sequences lie in the batch's rows, one after the other.
        seen: which keys; a window is aligned within each sequence.
        bias: as in ``attend``.
        packing: cu_seqlens of rows and of keys, (sequences + 1,) integers, and at least the longest
            sequence's lengths, or None.
        options: further arguments of ``flash_attn_func``.

    Returns:
        (batch, seqlen_q, nheads, head_dim_v).

    Raises:
        InvalidInputError: one of the two cu_seqlens is missing.
        UnsupportedError: a window, beside a mask, in sequences that differ in rows and keys.
    """
    cu_q, cu_k, max_q, max_k = packing
    if cu_q is None or cu_k is None:
        name = "cu_seq_lens_q" if cu_q is None else "cu_seq_lens_k"
        raise InvalidInputError(name, "None", "both or neither must be given")
    if all(x is None for x in (seen.keep, seen.documents, seen.mask, bias)):
        longest = _longest(cu_q, max_q, q), _longest(cu_k, max_k, k)
        return _varlen(q, k, v, cu_q, cu_k, *longest, seen, options)
    rows, keys = _numbers(cu_q, q), _numbers(cu_k, k)
    if seen.mask is not None:
        within, is_bool = same_document(rows, keys), seen.mask.dtype == torch.bool
        mask = within & seen.mask if is_bool else _together([within], [seen.mask])
        return attend(q, k, v, Seen(mask=mask), bias, options)
    if cu_q is not cu_k and (unread(cu_q, cu_k) or not torch.equal(cu_q, cu_k)):
        why = "with a mask or bias they must be equal, and while compiling one tensor"
        raise UnsupportedError("cu_seq_lens_q and cu_seq_lens_k differ", {"tilewise": (why,)})
    documents = rows if seen.documents is None else seen.documents + rows
    return attend(q, k, v, seen._replace(documents=documents), bias, options)


def _numbers(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """(batch, seqlen): which sequence each row of x is in."""
    batch, seqlen = x.shape[:2]
    places = torch.arange(batch * seqlen, device=x.device)
    return torch.bucketize(places, cu_seqlens[1:].long(), right=True).view(batch, seqlen)


def _longest(cu_seqlens: Tensor, given: int | Tensor | None, x: Tensor) -> int:
    """At least the longest sequence: as given, or read, or while compiling all rows."""
    if given is not None and not isinstance(given, Tensor):
        return given
    if unread(cu_seqlens):
        return x.shape[0] * x.shape[1]
    if given is not None:
        return int(given)
    lengths = cu_seqlens.diff()
    return int(lengths.max()) if len(lengths) else 0
