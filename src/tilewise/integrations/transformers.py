"""``attn_implementation="tilewise"`` in transformers, version 5.0 and later.

>>> from tilewise.integrations.transformers import register
>>> register()  # doctest: +SKIP
>>> AutoModel.from_pretrained(name, attn_implementation="tilewise")  # doctest: +SKIP

Masks stay exact: a mask of transformers comes as ``PatternMask``, O(N) in memory, where it is a
band, padding and documents, and as a bool tensor where it is anything else or while torch.compile
traces the model as a whole.

Packed rows are told by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, or by position_ids that start
again, without an attention_mask. While torch.compile traces the model as a whole, position_ids tell
where the model's own mask does, which needs ``use_cache=False``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .masks import Band, PatternMask, recognise, refuse_model, unread
from .seen import attend, attend_packed, seen_by_flags, seen_by_mask

NAME = "tilewise"

# What models pass down to attention and what does not change its result.
HARMLESS = frozenset(
    {
        "cache_position", "encoder_hidden_states", "input_ids", "inputs_embeds", "labels",
        "layer_idx", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch",
        "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
        "position_embeddings", "return_dict", "token_type_ids", "use_cache",
    }
)  # fmt: skip


def register() -> None:
    """Makes ``attn_implementation="tilewise"`` known to transformers: attention and masks.

    Calling it again changes nothing.

    Raises:
        ImportError: transformers is not there, or older than 5.0.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"transformers {transformers.__version__} is too old: 5.0 is needed")
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, mask)


def mask(**arguments: Any) -> Tensor:
    """A mask as transformers' mask interface asks for it.

    Args:
        **arguments: those of ``transformers.masking_utils.sdpa_mask``.

    Returns:
        (batch, 1, seqlen_q, seqlen_k) bool: a ``PatternMask``, or a plain tensor while torch
        traces.

    Raises:
        UnsupportedError: the model computes attention by itself, as far as that can be told while
            torch traces; else the mask refuses when it is used.
    """
    from transformers.masking_utils import sdpa_mask

    given = arguments.get("attention_mask")
    traced = unread(given)
    if not traced:
        found = _pattern_mask(**arguments)
        if found is not None:
            return found
    else:
        _check_interface(arguments.get("config"))
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen = sdpa_mask(**{**arguments, **skips})
    assert seen is not None
    if traced:
        return seen
    asked = given is not None
    return PatternMask(tuple(seen.shape), seen.device, Band(-1, -1), asked=asked, exact=seen)


def _check_interface(config: Any) -> None:
    """Refuses a model of transformers whose module knows no attention interface."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    known = module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    if name.startswith("transformers.models.") and not known:
        refuse_model(f"{name} has none")


def _pattern_mask(
    *,
    batch_size: int = 0,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **_: Any,
) -> PatternMask | None:
    """None where the function is no pattern, or for the steps of a static cache.

    Those may be compiled one by one, and a number that changes would have them compiled anew.
    """
    found = None if mask_function is None else recognise(mask_function)
    if q_length is None and cache_position is not None:  # as in 5.0
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = int(cache_position[0]) if q_length > 1 else cache_position
    numbers = (q_length, kv_length, q_offset, kv_offset)
    if found is None or not all(type(number) is int for number in numbers):
        return None
    assert q_length is not None and isinstance(q_offset, int)
    left, right, documents = found
    room = 0 if left < 0 and right < 0 else kv_offset + kv_length - q_offset - q_length
    if room < 0:
        return None
    keep = None
    if attention_mask is not None:
        keep = attention_mask.bool()[:, kv_offset : kv_offset + kv_length]
        keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
        keep = None if keep.all() else keep
    return PatternMask(
        (batch_size, 1, q_length, kv_length),
        torch.device("cpu" if device is None else device),
        Band(left, right, room),
        keep,
        documents,
        asked=attention_mask is not None,
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' attention interface asks for it.

    Args:
        module: the layer; its ``is_causal``, True if it has none, holds where the argument is None.
        query: (batch, nheads, seqlen_q, head_dim).
        key: (batch, nheads_kv, seqlen_k, head_dim).
        value: (batch, nheads_kv, seqlen_k, head_dim_v).
        attention_mask: a mask is the whole truth on which row sees which key: ``is_causal`` and
            ``sliding_window`` then say nothing more. (batch or 1, nheads or 1, seqlen_q, seqlen_k),
            bool (True is seen) or floating (added). (batch, seqlen_k), bool or integer, nonzero
            where a key is real, says nothing on the diagonal, so that ``is_causal`` and
            ``sliding_window`` hold beside it, as beside None.
        dropout: probability of dropping a weight.
        scaling: factor of the scores; 1 / sqrt(head_dim) when None.
        is_causal: a row sees keys up to the bottom right diagonal.
        sliding_window: how many keys a row sees, its own among them; without ``is_causal`` as
            many on the other side.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: (nheads,), the sinks.
        position_bias: broadcasts to (batch, nheads, seqlen_q, seqlen_k), added to the scores.
        position_ids: (batch or 1, seqlen); where no one gave a mask, causal attention of as many
            rows as keys takes a step other than one for the start of another document.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,) integers, boundaries of packed sequences in
            the batch's rows, one after the other.
        max_length_q, max_length_k: at least the longest sequence; worked out when None.
        deterministic: equal bits run to run.
        **others: refused, unless they are None, False or known to change nothing.

    Returns:
        (batch, seqlen_q, nheads, head_dim_v), and None for the weights.

    Raises:
        InvalidInputError: an argument cannot be right.
        UnsupportedError: an argument would change the result and is not known here.
    """
    _refuse_unknown(others, packed=cu_seq_lens_q is not None or attention_mask is not None)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if q.shape[0] == 1 != k.shape[0]:  # learned queries
        q = q.expand(k.shape[0], *q.shape[1:])
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sink": s_aux,
        "deterministic": bool(deterministic),
    }
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None and attention_mask.dim() == 4:
        k, v, seen = seen_by_mask(q, k, v, attention_mask, position_ids)
    else:
        flags = causal, sliding_window, position_ids
        k, v, seen = seen_by_flags(q, k, v, attention_mask, *flags)
    if position_bias is not None:  # of a static cache's length
        position_bias = position_bias[..., : k.shape[1]]
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return attend(q, k, v, seen, position_bias, options), None
    if k.shape[1] != key.shape[2]:  # rows would no longer lie where the boundaries count them
        raise UnsupportedError(
            "cu_seq_lens_q: packed sequences in a cache with room", {NAME: ("not known here",)}
        )
    packing = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    return attend_packed(q, k, v, seen, position_bias, packing, options), None


def _refuse_unknown(others: dict[str, Any], packed: bool) -> None:
    for name, given in others.items():
        if given is None or given is False or name in HARMLESS:
            continue
        if name == "seq_idx" and packed:  # says again what the boundaries or the mask say
            continue
        why = "returns no attention weights" if name == "output_attentions" else "does not know it"
        raise UnsupportedError(
            f"attention was given {name}", {NAME: (f"{why}; use attn_implementation='eager'",)}
        )
