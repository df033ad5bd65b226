"""What a row of a tuning table is found by, and what a device offers."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.problem import AttentionProblem

KERNELS = ("fwd", "bwd_dkdv", "bwd_dq", "bwd_dbias", "fa1_fwd", "fa1_bwd")
DTYPES = ("half", "float32")
HEAD_DIMS = (16, 32, 64, 128, 256, 512)
MASKS = ("full", "causal", "window")
OPERANDS = ("plain", "extra")

# Features whose operands live in registers beside the scores, tile by tile.
_EXTRA = frozenset({"dropout", "attn_bias", "bool_mask"})


@dataclass(frozen=True, slots=True)
class RowKey:
    """The facts of a call that choose its tile sizes. No length, batch size or head count.

    Attributes:
        kernel: one of ``KERNELS``.
        dtype: "half" (float16 and bfloat16) or "float32".
        head_dim: the bucket of the larger of both head dims, one of ``HEAD_DIMS``.
        mask: "full", "causal" (a right bound alone) or "window" (a left bound).
        operands: "extra" with dropout, a bias or a mask tensor, else "plain".
    """

    kernel: str
    dtype: str
    head_dim: int
    mask: str
    operands: str


def row_key(kernel: str, problem: AttentionProblem) -> RowKey:
    """The key of a kernel's call."""
    width = max(problem.head_dim, problem.head_dim_v)
    mask = "full"
    if problem.mask.window_left is not None:
        mask = "window"
    elif problem.mask.window_right is not None:
        mask = "causal"
    return RowKey(
        kernel,
        "float32" if problem.dtype == "float32" else "half",
        next((d for d in HEAD_DIMS if width <= d), HEAD_DIMS[-1]),
        mask,
        "extra" if problem.features & _EXTRA else "plain",
    )


@dataclass(frozen=True, slots=True)
class Arch:
    """What a kind of device offers to one program.

    Attributes:
        shared_bytes: shared memory (AMD's LDS) that a program may take.
        warp_size: threads of a warp.
        registers: 32-bit registers that a thread can address.
        table: the table that holds its rows: its own name, or its nearest relative's.
        tma: whether tensor descriptors are read by hardware.
        warp_specialize: whether Triton gives loads and arithmetic warps of their own there.
        tensor_memory: whether accumulators lie outside the registers (Blackwell's data centre).
    """

    shared_bytes: int
    warp_size: int
    registers: int
    table: str
    tma: bool = False
    warp_specialize: bool = False
    tensor_memory: bool = False


_KIB = 1024
ARCHS: dict[str, Arch] = {
    "sm_75": Arch(64 * _KIB, 32, 255, "sm_86"),
    "sm_80": Arch(163 * _KIB, 32, 255, "sm_80"),
    "sm_86": Arch(99 * _KIB, 32, 255, "sm_86"),
    "sm_87": Arch(163 * _KIB, 32, 255, "sm_80"),
    "sm_89": Arch(99 * _KIB, 32, 255, "sm_86"),
    "sm_90": Arch(227 * _KIB, 32, 255, "sm_90", tma=True, warp_specialize=True),
    "sm_100": Arch(227 * _KIB, 32, 255, "sm_100", True, True, True),
    "sm_103": Arch(227 * _KIB, 32, 255, "sm_100", True, True, True),
    "sm_110": Arch(227 * _KIB, 32, 255, "sm_100", True, True, True),
    "sm_120": Arch(99 * _KIB, 32, 255, "sm_86", tma=True),
    "sm_121": Arch(99 * _KIB, 32, 255, "sm_86", tma=True),
    "gfx90a": Arch(64 * _KIB, 64, 512, "gfx942"),
    "gfx942": Arch(64 * _KIB, 64, 512, "gfx942"),
    "gfx950": Arch(160 * _KIB, 64, 512, "gfx942"),
    "gfx1010": Arch(64 * _KIB, 32, 256, "gfx942"),
    "gfx1030": Arch(64 * _KIB, 32, 256, "gfx942"),
    "gfx1100": Arch(64 * _KIB, 32, 256, "gfx942"),
    "gfx1101": Arch(64 * _KIB, 32, 256, "gfx942"),
    "gfx1151": Arch(64 * _KIB, 32, 256, "gfx942"),
    "gfx1200": Arch(64 * _KIB, 32, 256, "gfx942"),
    "gfx1201": Arch(64 * _KIB, 32, 256, "gfx942"),
    "interpret": Arch(1 << 62, 32, 1 << 62, "interpret", tma=True, warp_specialize=True),
}


def arch_of(name: str) -> Arch:
    """The device kind called ``name``, or the nearest older relative of one that is not listed."""
    if name in ARCHS:
        return ARCHS[name]
    family = "sm_" if name.startswith("sm_") else "gfx"
    number = _number(name, family)
    relatives = [n for n in ARCHS if n.startswith(family)]
    older = [n for n in relatives if _number(n, family) <= number]
    nearest = max(older, key=lambda n: _number(n, family), default=relatives[0])
    return ARCHS[nearest]


def _number(name: str, family: str) -> int:
    """The digits after the family, in hexadecimal, as AMD counts."""
    digits = "".join(c for c in name.removeprefix(family).lower() if c in "0123456789abcdef")
    return int(digits or "0", 16)
