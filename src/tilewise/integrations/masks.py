"""Masks that transformers makes, kept as the few numbers they follow from.

A mask of transformers is (batch, 1, seqlen_q, seqlen_k) bool. Most are a diagonal band, keys that
are padding and documents in a row: O(N) facts, which attention can use as they are.
``PatternMask`` is such a mask; whatever else looks at it finds the bool tensor it stands for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ..errors import UnsupportedError

MASKING = "transformers.masking_utils"


class Band(NamedTuple):
    """A diagonal band, which ends ``room`` keys before the bottom right corner.

    Row i of seqlen_q sees key j of seqlen_k when -left <= j - i - (seqlen_k - seqlen_q - room) <=
    right; a side of -1 has no limit.
    """

    left: int
    right: int
    room: int = 0


SHARED = "it writes to a mask that other layers share; clone it first"
_ADD = ("add", "sub", "rsub", "baddbmm", "addbmm", "addcmul")


class PatternMask(Tensor):
    """(batch, 1, seqlen_q, seqlen_k) bool, True where a row sees a key; made when looked at.

    A model that does not hand it to an attention function but adds it to scores, as it would add
    eager's mask of 0 and -inf, would add 0 and 1, or hide where it is True: that is refused, and so
    is making numbers of it, and writing to it.

    Attributes:
        band: the diagonal band.
        keep: (batch, seqlen_k) bool, False where a key is padding; None when none is.
        documents: (batch, seqlen) integers that grow along a row, equal within a document; None
            when each row is one. A row sees keys of its own document.
        asked: whether the model's caller gave a mask; without one, position_ids may still tell
            documents apart.
        exact: the bool tensor itself, where the mask is no pattern.
    """

    band: Band
    keep: Tensor | None
    documents: Tensor | None
    asked: bool
    exact: Tensor | None
    _anchor: Tensor  # torch.compile wants one tensor at least within

    @staticmethod
    def __new__(
        cls: type[PatternMask],
        shape: tuple[int, ...],
        device: torch.device,
        band: Band,
        keep: Tensor | None = None,
        documents: Tensor | None = None,
        asked: bool = False,
        exact: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> PatternMask:
        """No memory of its own."""
        mask: PatternMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=device
        )
        mask.band, mask.keep, mask.documents, mask.asked = band, keep, documents, asked
        mask.exact = exact
        mask._anchor = torch.empty(0, device=device) if anchor is None else anchor
        return mask

    def dense(self) -> Tensor:
        """The bool tensor that this stands for."""
        if self.exact is not None:
            return self.exact
        seqlens = (self.shape[2], self.shape[3])
        seen = dense_mask(*seqlens, self.device, self.band, self.keep, self.documents)
        return seen.expand(self.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PatternMask({tuple(self.shape)}, {self.band})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Any operation is one on the bool tensor, but for a mere alias.

        Raises:
            UnsupportedError: it adds the mask to something, fills where the mask is True, makes
                numbers of it or writes to it.
        """
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            x = args[0]
            return cls(tuple(x.shape), x.device, x.band, x.keep, x.documents, x.asked, x.exact)
        name, kwargs = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        casts = (kwargs.get("dtype") or torch.bool).is_floating_point
        if name.removesuffix("_") in _ADD or (name == "_to_copy" and casts):
            refuse_model("it adds a bool mask, True where a row sees a key, to scores")
        if name.startswith("masked_fill") and isinstance(args[1], PatternMask):
            refuse_model("it hides what a bool mask, True where a row sees a key, shows")
        if name.endswith("_") and isinstance(args[0], PatternMask):
            refuse_model(SHARED)

        def look(x: Any) -> Any:
            return x.dense() if isinstance(x, PatternMask) else x

        return func(*tree_map(look, args), **tree_map(look, kwargs))

    def __setitem__(self, place: Any, value: Any) -> None:
        """Refused; see ``PatternMask``."""
        refuse_model(SHARED)

    def __deepcopy__(self, memo: Any) -> PatternMask:
        """Itself: nothing can write to it."""
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch.compile: the tensors within, and what else there is."""
        names = ("keep", "documents", "exact", "_anchor")
        return [name for name in names if getattr(self, name) is not None], (self.band, self.asked)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[Band, bool], size: Any, stride: Any
    ) -> PatternMask:
        """Undoes ``__tensor_flatten__``."""
        band, asked = context
        names = ("keep", "documents", "exact", "_anchor")
        keep, documents, exact, anchor = (parts.get(x) for x in names)
        assert anchor is not None
        given = (keep, documents, asked, exact, anchor)
        return PatternMask(tuple(size), anchor.device, band, *given)


def refuse_model(why: str) -> NoReturn:
    """Refuses a model that would use a mask wrongly.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "a model that does not take its attention from transformers' attention interface",
        {"tilewise": (f"{why}; use attn_implementation='eager'",)},
    )


def unread(*tensors: Tensor | None) -> bool:
    """Whether values of tensors cannot be read: while torch traces, or where there are none."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or any(x is not None and (x.is_meta or isinstance(x, FakeTensor)) for x in tensors)
    )


def dense_mask(
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    band: Band,
    keep: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """(batch or 1, 1, seqlen_q, seqlen_k) bool, True where all that is given lets a row see."""
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q - band.room
    distance = torch.arange(seqlen_k, device=device) - diagonal
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.right >= 0:
        seen = seen & (distance <= band.right)
    if band.left >= 0:
        seen = seen & (distance >= -band.left)
    seen = seen[None, None]
    if keep is not None:
        seen = seen & keep[:, None, None, :]
    if documents is not None:
        seen = seen & same_document(documents, documents)
    return seen


def same_document(rows: Tensor, keys: Tensor) -> Tensor:
    """(batch, 1, seqlen_q, seqlen_k) bool, True where row and key have one number."""
    return (rows[:, :, None] == keys[:, None, :])[:, None]


def documents_of(position_ids: Tensor) -> Tensor:
    """Numbers of documents: one begins where positions do not go up by one.

    Args:
        position_ids: (batch, seqlen) integers.

    Returns:
        (batch, seqlen) integers from 0.
    """
    steps = position_ids.diff(dim=-1) != 1
    return torch.nn.functional.pad(steps, (1, 0)).cumsum(-1)


def recognise(mask_function: Callable[..., Any]) -> tuple[int, int, Tensor | None] | None:
    """What a mask function of transformers says, where it is a band within documents.

    Args:
        mask_function: what ``transformers.masking_utils`` hands to a mask interface.

    Returns:
        left and right as in ``Band``, and the documents; None for any other function.
    """
    documents = None
    together = _conjuncts(mask_function)
    if together is not None:
        base, packed = (
            together[0],
            _closure(together[1], "packed_sequence_mask_function.inner_mask"),
        )
        if packed:  # positions that start again go up by one within a document, as rows do
            remapped = _closure(base, "remap_positions_for_packed_sequence.inner_mask")
            mask_function = remapped.get("mask_function", base)
            documents = packed["packed_sequence_mask"]
    band = _band(mask_function)
    return None if band is None else (*band, documents)


def _band(mask_function: Callable[..., Any]) -> tuple[int, int] | None:
    if _is(mask_function, "causal_mask_function"):
        return -1, 0
    if _is(mask_function, "bidirectional_mask_function"):
        return -1, -1
    together = _conjuncts(mask_function)
    if together is None:
        return None
    first, second = together
    if _is(second, "causal_mask_function"):  # a window of w keys ends in the row's own
        window = _closure(first, "sliding_window_overlay.inner_mask")
        return (window["sliding_window"] - 1, 0) if window else None
    if _is(second, "bidirectional_mask_function"):
        window = _closure(first, "sliding_window_bidirectional_overlay.inner_mask")
        return (window["sliding_window"],) * 2 if window else None
    return None


def _is(function: Callable[..., Any], name: str) -> bool:
    here = getattr(function, "__qualname__", "").replace("<locals>.", "")
    return getattr(function, "__module__", "") == MASKING and here == name


def _closure(function: Callable[..., Any], name: str = "") -> Mapping[str, Any]:
    """What a function holds from where it was made; empty for one of another name."""
    if name and not _is(function, name):
        return {}
    return inspect.getclosurevars(function).nonlocals


def _conjuncts(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...] | None:
    """The two functions that both must say yes."""
    functions: tuple[Callable[..., Any], ...] = _closure(function, "and_masks.and_mask").get(
        "mask_functions", ()
    )
    return functions if len(functions) == 2 else None
