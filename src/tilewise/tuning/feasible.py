"""What is legal at all: the one predicate of a configuration for a kernel and a device.

It is an estimate from tile sizes, made without a compiler: it may pass what spills a few registers,
and must not pass what cannot be launched. ``tests/compile`` holds it against Triton's own figures.
"""

from __future__ import annotations

from ..core.config import TileConfig
from .keys import Arch, RowKey, arch_of

WARPS = (1, 2, 4, 8, 16)
MAX_STAGES = 8
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor
BYTES = {"half": 2, "float32": 4}
# Barriers, a row's statistics, and what the compiler stages through shared memory beside tiles.
SCRATCH_BYTES = 2048
# Rows that the backward's statistics are padded to: its tiles must divide them.
STATISTICS_ROWS = 128
# Bytes of a thread that may lie in local memory: a few values kept across a loop cost nothing.
SPILL_BUDGET = 128
# Of a thread's registers, what addresses, operands and statistics leave to accumulators.
ACCUMULATOR_SHARE = 0.8


def shared_bytes(config: TileConfig, key: RowKey, arch: Arch) -> int:
    """Shared memory of a program: tiles read once, those of the loop in each stage, P and dS."""
    c, rows, keys = config, config.BLOCK_M, config.BLOCK_N
    once, looped = (rows, 2 * keys)
    if key.kernel in ("bwd_dkdv", "fa1_bwd"):
        once, looped = 2 * keys, 2 * rows
    elif key.kernel in ("bwd_dq", "bwd_dbias"):
        once, looped = 2 * rows, 2 * keys
    size = BYTES[key.dtype]
    tiles = (once + looped * c.num_stages) * key.head_dim * size
    if key.kernel not in ("fwd", "fa1_fwd"):
        tiles += 2 * rows * keys * size  # P and dS, operands of products
        if arch.tensor_memory:  # a sum on its way from tensor memory to its output
            tiles += 2 * once * key.head_dim
    elif arch.tensor_memory and key.operands == "extra":  # a mask on its way to the scores' layout
        tiles += rows * keys * size
    return tiles + SCRATCH_BYTES


def accumulators(config: TileConfig, key: RowKey, arch: Arch) -> int:
    """32-bit registers of a thread that hold sums and scores."""
    rows, keys = config.BLOCK_M, config.BLOCK_N
    scores = rows * keys
    sums = rows * key.head_dim
    if key.kernel == "bwd_dkdv":
        sums = (1 if config.separate else 2) * keys * key.head_dim
    elif key.kernel == "bwd_dbias":
        sums = rows * keys
    elif key.kernel == "fa1_bwd":
        sums = 2 * keys * key.head_dim + rows * key.head_dim
    if key.kernel not in ("fwd", "fa1_fwd"):
        scores *= 2  # P and dP
    if arch.tensor_memory:
        sums = 0
    return (sums + scores) // (config.num_warps * arch.warp_size)


def registers(config: TileConfig, arch: Arch) -> int:
    """32-bit registers that a thread can have."""
    threads = config.num_warps * arch.warp_size
    fair = REGISTER_FILE // threads if arch.registers <= 256 else 2 * REGISTER_FILE // threads
    most = min(arch.registers, max(fair, 1))
    return min(most, config.maxnreg) if config.maxnreg else most


def reasons_against(config: TileConfig, key: RowKey, arch: str) -> tuple[str, ...]:
    """Why ``config`` cannot serve ``key`` on ``arch``; empty when it can."""
    c, device = config, arch_of(arch)
    reasons = []
    for name, size in (("BLOCK_M", c.BLOCK_M), ("BLOCK_N", c.BLOCK_N)):
        if size < 16 or size & (size - 1):
            # the matrix units' and dropout's blocks are 16 wide, and Triton's tiles powers of two
            reasons.append(f"{name} {size} is no power of two from 16 on")
    if key.kernel not in ("fwd", "fa1_fwd") and c.BLOCK_M > STATISTICS_ROWS:
        reasons.append(f"BLOCK_M {c.BLOCK_M} is over a backward's {STATISTICS_ROWS}")
    if c.num_warps not in WARPS or c.num_warps * device.warp_size > 1024:
        reasons.append(f"{c.num_warps} warps of {device.warp_size} threads")
    if not 1 <= c.num_stages <= MAX_STAGES:
        reasons.append(f"num_stages {c.num_stages} is not in 1..{MAX_STAGES}")
    if c.maxnreg and (not 24 <= c.maxnreg <= 255 or arch.startswith("gfx")):
        reasons.append(f"maxnreg {c.maxnreg}: 24..255, and on NVIDIA alone")
    if c.use_tma and not device.tma:
        reasons.append(f"{arch} has no TMA")
    if c.use_tma and max(c.BLOCK_M, c.BLOCK_N) > 256:
        reasons.append("a side of a TMA box is at most 256")
    if c.warp_specialize and not (device.warp_specialize and c.use_tma and key.kernel == "fwd"):
        reasons.append("warp_specialize is the forward's, with TMA, on sm_90 and sm_100")
    if c.warp_specialize and c.num_warps != 4:
        reasons.append("warp_specialize is for one warp group: with more, nothing is specialised")
    if c.separate and key.kernel != "bwd_dkdv":
        reasons.append("separate is bwd_dkdv's")
    if reasons or arch == "interpret":
        return tuple(reasons)
    needed = shared_bytes(c, key, device)
    if needed > device.shared_bytes:
        reasons.append(f"{needed} bytes of shared memory, {arch} has {device.shared_bytes}")
    held, most = accumulators(c, key, device), registers(c, device)
    if held > ACCUMULATOR_SHARE * most:
        reasons.append(f"{held} registers of accumulators in a thread that has {most}")
    return tuple(reasons)
