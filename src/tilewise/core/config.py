"""How a kernel cuts and runs a call: what tuning tables hold and launchers take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes and how a program runs.

    Attributes:
        BLOCK_M: query rows of a tile.
        BLOCK_N: keys of a tile.
        num_warps: warps of a program, 32 threads each (64 on AMD's CDNA).
        num_stages: depth of the software pipeline of loads.
        use_tma: whether rows are loaded through tensor descriptors where the tensors allow it.
        warp_specialize: whether loads and arithmetic go to warps of their own (needs use_tma).
        separate: whether dK and dV are computed in two passes ("bwd_dkdv" alone).
        maxnreg: cap on registers of a thread; 0 leaves it to the compiler.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    warp_specialize: bool = False
    separate: bool = False
    maxnreg: int = 0
