"""Sharding rules for DTensor: every operator, forward and backward, over batch and heads.

>>> from tilewise.integrations.dtensor import register
>>> register()
"""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from ..backends.base import AttentionTensors
from ..errors import UnsupportedError
from ..ops.attention import flash_attn_bwd, flash_attn_fwd, flash_attn_probs
from ..ops.schema import NUM_ARGUMENTS, split

# Placements of outputs and inputs along one dimension of the mesh; None is for what is no tensor.
Rule = tuple[list[Placement | None], list[Placement | None]]
Dims = dict[str, int | None]

_registered = False


def register() -> None:
    """Tells DTensor how tilewise's operators may be sharded; calling it again changes nothing.

    Inputs that are sharded along the batch, or along heads in whole groups, stay so, without
    communication, and so do their gradients; gradients of what is shared between the shards, as a
    bias or sink for all of the batch, are partial sums. Others are gathered first: rows are never
    split. Packed sequences can be sharded along heads. All of a call's tensors must be DTensors.
    Dropout is refused: its mask counts batch and heads, which a shard cannot know.
    """
    global _registered
    if not _registered:
        register_sharding(flash_attn_fwd)(forward_rules)
        register_sharding(flash_attn_bwd)(backward_rules)
        register_sharding(flash_attn_probs)(probs_rules)
    _registered = True


def forward_rules(*arguments: Any) -> list[Rule]:
    """The ways in which ``flash_attn_fwd`` may be sharded along one dimension of the mesh.

    Args:
        *arguments: the operator's, with DTensor's specs for tensors.

    Returns:
        For each way, the placements of out and lse, and of the arguments.

    Raises:
        UnsupportedError: there is dropout.
    """
    return [
        ([_at(dims["out"]), _at(dims["lse"])], _inputs(arguments, dims))
        for dims in _ways(arguments)
    ]


def backward_rules(*arguments: Any) -> list[Rule]:
    """The ways in which ``flash_attn_bwd`` may be sharded along one dimension of the mesh.

    Args:
        *arguments: the operator's, with DTensor's specs for tensors.

    Returns:
        For each way, the placements of the five gradients, and of the arguments.

    Raises:
        UnsupportedError: there is dropout.
    """
    _, dlse, *rest = arguments
    wanted = rest[-1]
    names = ("q", "k", "v", "attn_bias", "sink")
    rules: list[Rule] = []
    for dims in _ways(tuple(rest)):
        whole = all(dim is None for dim in dims.values())
        grads: list[Placement | None] = []
        for name, want in zip(names, wanted, strict=True):
            dim = dims[name]
            if not want or whole:  # what is not wanted is empty
                grads.append(Replicate())
            else:
                grads.append(Partial() if dim is None else Shard(dim))
        lse = None if dlse is None else _at(dims["lse"])
        further = [_at(dims["out"]), _at(dims["lse"]), None]
        inputs = [_at(dims["out"]), lse, *_inputs(rest[:NUM_ARGUMENTS], dims), *further]
        rules.append((grads, inputs))
    return rules


def probs_rules(*arguments: Any) -> list[Rule]:
    """The ways in which ``flash_attn_probs`` may be sharded along one dimension of the mesh.

    Args:
        *arguments: the operator's, with DTensor's specs for tensors.

    Returns:
        For each way, the placement of the probabilities, and of the arguments.

    Raises:
        UnsupportedError: there is dropout.
    """
    return [([_at(dims["probs"])], _inputs(arguments, dims)) for dims in _ways(arguments)]


def _ways(arguments: tuple[Any, ...]) -> list[Dims]:
    """Which dimension of each tensor is split: none, the batch, or the heads. First is best."""
    t, _ = split(arguments)
    if t.seed is not None:
        raise UnsupportedError("dropout of a DTensor", {"DTensor": ("its mask counts shards",)})
    packed = t.cu_seqlens_q is not None
    slopes = None if t.alibi_slopes is None else len(t.alibi_slopes.shape)
    ways = [_split()]
    if not packed:
        bias, alibi = _bias_dim(t, 0), 0 if slopes == 2 else None
        ways.append(
            _split(q=0, k=0, v=0, attn_bias=bias, alibi_slopes=alibi, out=0, lse=0, probs=0)
        )
    if _whole_groups(t):
        head = 1 if packed else 2
        shared = None if t.k.shape[-2] == 1 else head  # one head serves all shards
        ways.append(
            _split(
                q=head, k=shared, v=shared, out=head, lse=0 if packed else 1, probs=1, sink=0,
                attn_bias=_bias_dim(t, 0 if packed else 1),
                alibi_slopes=None if slopes is None else slopes - 1,
            )
        )  # fmt: skip
    return ways


def _split(**dims: int | None) -> Dims:
    names = ("q", "k", "v", "attn_bias", "alibi_slopes", "sink", "out", "lse", "probs")
    return {name: dims.get(name) for name in names}


def _bias_dim(t: AttentionTensors, dim: int) -> int | None:
    return dim if t.attn_bias is not None and t.attn_bias.shape[dim] > 1 else None


def _whole_groups(t: AttentionTensors) -> bool:
    """Whether heads split into equal shards of whole groups, whatever dimensions split them.

    DTensor may split one dimension of a tensor along several of the mesh, and into pieces that are
    not equal: then query heads would be apart from their key heads.
    """
    nheads, nheads_kv = t.q.shape[-2], t.k.shape[-2]
    units = nheads if nheads_kv == 1 else nheads_kv
    sizes = tuple(t.q.mesh.shape)  # type: ignore[attr-defined]
    joined = (prod(c) for n in range(1, len(sizes) + 1) for c in combinations(sizes, n))
    return all(n > units or units % n == 0 for n in joined)


def _at(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def _inputs(arguments: Any, dims: Dims) -> list[Placement | None]:
    """A placement for each argument; None for what is no tensor."""
    t, scalars = split(tuple(arguments))
    tensors = [
        None if getattr(t, name) is None else _at(dims.get(name))
        for name in AttentionTensors._fields
    ]
    return [*tensors, *(None for _ in scalars)]
