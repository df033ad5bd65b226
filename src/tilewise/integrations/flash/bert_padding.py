"""``flash_attn.bert_padding``: rows of a padded batch, packed and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import varlen


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows that a mask keeps.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or integer, nonzero where a row is real.
        unused_mask: (batch, seqlen), nonzero where a row is packed but not used.

    Returns:
        (total, ...); the rows' places (total,) in batch * seqlen; cu_seqlens (batch + 1,) int32;
        the longest length; and how many rows of each sequence are real, (batch,) int32.
    """
    kept = attention_mask.bool()
    packed = kept if unused_mask is None else kept | unused_mask.bool()
    return (*varlen.unpad(hidden_states, packed), kept.sum(-1, dtype=torch.int32))


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs rows that hold several sequences each.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) integers; the lengths of a row's sequences, which
            lie at its beginning one after the other, then zeros.

    Returns:
        (total, ...); the rows' places (total,); cu_seqlens (sequences + 1,) int32; and the longest
        length.
    """
    batch_lengths = attention_mask_in_length.sum(-1)
    columns = torch.arange(attention_mask_in_length.shape[1], device=hidden_states.device)
    packed, places, *_ = varlen.unpad(hidden_states, columns < batch_lengths[:, None])
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return packed, places, cu_seqlens, int(lengths.max()) if len(lengths) else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed rows (total, ...) back: (batch, seqlen, ...), zero where there is none."""
    return varlen.pad(hidden_states, indices, batch, seqlen)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows (total, ...) of input (rows, ...) at indices (total,)."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values (total, ...) at indices (total,), and zeros elsewhere."""
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    return out.index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``index_first_axis``, and input itself."""
    return input[indices], input
