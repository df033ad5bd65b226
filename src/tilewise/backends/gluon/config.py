"""How the Hopper kernels are run: measured choices by the widths of a tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...core.problem import VARLEN, AttentionProblem


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Tile sizes and how a program runs.

    Attributes:
        consumers: warpgroups of 64 query rows each.
        BLOCK_N: keys of a block.
        num_stages: blocks of K and of V in shared memory.
        dynamic: whether programs take tiles from a counter, or each a fixed share.
        shared_out: whether O leaves through Q's shared memory.
        consumer_registers, producer_registers, maxnreg: of a thread.
    """

    consumers: int
    BLOCK_N: int
    num_stages: int
    dynamic: bool = False
    shared_out: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24
    maxnreg: int = 168


_THREE = {"consumers": 3, "consumer_registers": 160, "producer_registers": 32, "maxnreg": 128}
NARROW = HopperConfig(BLOCK_N=64, num_stages=8, **_THREE)  # type: ignore[arg-type]
MIDDLE = HopperConfig(consumers=2, BLOCK_N=128, num_stages=2)
WIDE = HopperConfig(consumers=2, BLOCK_N=64, num_stages=2)


def find(p: AttentionProblem) -> HopperConfig:
    """The configuration of a call's forward."""
    widest = max(p.head_dim, p.head_dim_v)
    config = NARROW if widest <= 64 else MIDDLE if widest <= 128 else WIDE
    if config is MIDDLE and "alibi" in p.features:  # its distances take registers
        config = replace(config, BLOCK_N=64, num_stages=4)
    if min(p.head_dim, p.head_dim_v) > 128:
        config = replace(config, shared_out=True)
    uneven = p.mask.window_left is not None or p.mask.window_right is not None
    return replace(config, dynamic=uneven or p.layout == VARLEN)
