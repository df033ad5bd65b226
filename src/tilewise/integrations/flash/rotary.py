"""``flash_attn.layers.rotary``: rotary position embeddings, in plain torch.

A pair of elements (a, b) at position p turns by an angle: (a cos - b sin, b cos + a sin). A pair is
one element of each half, or two neighbours when interleaved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .hopper import split_heads


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns the first elements of each head by its row's position.

    Args:
        x: (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) with ``cu_seqlens``.
        cos, sin: (positions, rotary_dim / 2), rotary_dim <= head_dim.
        interleaved: pairs are neighbours, not one element of each half.
        inplace: write into x.
        seqlen_offsets: int or (batch,) integers, the position of each sequence's first row.
        cu_seqlens: (batch + 1,) integers, the boundaries of packed sequences.
        max_seqlen: the longest of them; not needed.

    Returns:
        x's shape and dtype; x itself when ``inplace``. Computed in float32 or better.

    Raises:
        InvalidInputError: shapes do not fit, or a position lies beyond cos and sin.
    """
    packed = cu_seqlens is not None
    if x.dim() != (3 if packed else 4):
        raise InvalidInputError(
            "x", f"shape {tuple(x.shape)}",
            "must be (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) if packed",
        )  # fmt: skip
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise InvalidInputError(
            "cos", f"shape {tuple(cos.shape)} beside sin's {tuple(sin.shape)}",
            f"both must be (positions, rotary_dim / 2), rotary_dim <= {x.shape[-1]}",
        )  # fmt: skip
    rows = torch.arange(x.shape[0 if packed else 1], device=x.device)
    if cu_seqlens is not None:
        rows, sequence = _within(rows, cu_seqlens)
        shift = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    else:
        rows = rows[None]
        shift = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        if not isinstance(shift, Tensor) and x.shape[1] + shift > cos.shape[0]:
            raise InvalidInputError(
                "cos", f"{cos.shape[0]} positions", f"{x.shape[1] + shift} are needed"
            )
    places = rows + shift
    if cu_seqlens is not None:  # slack is in no sequence
        slack = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1]
        places = places.masked_fill(slack, 0)
    # values on a GPU are not read
    if not torch.compiler.is_compiling() and places.device.type == "cpu" and places.numel():
        first, last = int(places.min()), int(places.max())
        if first < 0 or last >= cos.shape[0]:
            raise InvalidInputError(
                "seqlen_offsets", f"positions {first} to {last}", f"cos has {cos.shape[0]}"
            )
    return _turn(x, cos[places][..., None, :], sin[places][..., None, :], interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """As ``apply_rotary_emb``; cos and sin may be (batch, seqlen, rotary_dim / 2) too."""
    return _turn(x, cos[..., None, :], sin[..., None, :], interleaved, inplace=False)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(-b, a) of each pair (a, b) along x's last dimension, in place of (a, b)."""
    a, b = _pairs(x, interleaved)
    return _join(-b, a, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """``apply_rotary_emb`` on q and k within qkv, in place.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, nheads + 2 * nheads_kv,
            head_dim) with ``num_heads_q``.
        cos, sin, interleaved, seqlen_offsets: as ``apply_rotary_emb``.
        cos_k, sin_k: for k; cos and sin when None.
        num_heads_q: how many heads are q's, in four dimensions.

    Returns:
        qkv itself.

    Raises:
        InvalidInputError: shapes do not fit, or a position lies beyond cos and sin.
    """
    q, k, _ = split_heads(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    parts = (
        apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=seqlen_offsets),
        apply_rotary_emb(k, cos_k, sin_k, interleaved, seqlen_offsets=seqlen_offsets),
    )
    if qkv.dim() == 5:
        qkv[:, :, :2] = torch.stack(parts, 2)
    else:
        qkv[:, :, : q.shape[2] + k.shape[2]] = torch.cat(parts, 2)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """``apply_rotary_emb`` on k within kv (batch, seqlen, 2, nheads, head_dim), in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise InvalidInputError(
            "kv", f"shape {tuple(kv.shape)}", "must be (batch, seqlen, 2, nheads, head_dim)"
        )
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embeddings (Su et al., 2021), or XPos (Sun et al., 2022) with ``scale_base``.

    Args:
        dim: rotary_dim, even.
        base: of the frequencies base^(-2i / dim).
        interleaved: pairs are neighbours.
        scale_base: of XPos; None is without.
        device: of the buffers.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (steps + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-steps / self.dim)

    def _tables(self, positions: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos and sin of q, and of k, in float32 whatever dtype the model was brought to."""
        p = torch.arange(positions, device=x.device, dtype=torch.float32)
        angles = torch.outer(p, self._frequencies(x.device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            return cos, sin, cos, sin
        power = (p - positions // 2) / self.scale_base
        scale = self.scale.to(x.device, torch.float32) ** power[:, None]
        return cos * scale, sin * scale, cos / scale, sin / scale

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Turns q and k in place.

        Args:
            qkv: as ``apply_rotary_emb_qkv_``; q (batch, seqlen, nheads, head_dim) beside ``kv``.
            kv: (batch, seqlen, 2, nheads, head_dim).
            seqlen_offset: int or (batch,) integers, the position of each sequence's first row.
            max_seqlen: positions in the tables; needed beside an offset for each sequence.
            num_heads_q: as ``apply_rotary_emb_qkv_``.

        Returns:
            qkv itself; q and kv themselves where ``kv`` is given.

        Raises:
            InvalidInputError: shapes do not fit, or ``max_seqlen`` is missing.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise InvalidInputError("max_seqlen", None, "goes with offsets in a tensor")
            max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin, cos_k, sin_k = (
            t.to(qkv.dtype) if qkv.is_floating_point() else t for t in self._tables(max_seqlen, qkv)
        )
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


def _within(rows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Each packed row's place in its sequence, and the sequence."""
    sequence = torch.bucketize(rows, cu_seqlens[1:].long(), right=True)
    sequence = sequence.clamp(max=max(len(cu_seqlens) - 2, 0))
    return rows - cu_seqlens[sequence], sequence


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(dtype), sin.to(dtype)
    turning = x[..., : 2 * cos.shape[-1]]
    a, b = _pairs(turning.to(dtype), interleaved)
    turned = _join(a * cos - b * sin, b * cos + a * sin, interleaved).to(x.dtype)
    if inplace:
        turning.copy_(turned)
        return x
    return torch.cat((turned, x[..., turned.shape[-1] :]), -1)
