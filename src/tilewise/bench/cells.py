"""Which calls a suite measures: the papers' shapes, and the generations side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from .providers import DIRECTIONS, Shape
from .rivals import CPU

GENERATIONS_SUITE = "generations"
TOKENS = 16384  # batch * seqlen, as in the FlashAttention papers
# Of the generations: FlashAttention 1 has a program for each head, which must fill the GPU too.
GENERATIONS_TOKENS = 4 * TOKENS
HIDDEN = 2048  # nheads * head_dim, as there
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DROPOUT = 0.1
MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 128)  # lengths of a packed call


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table: every provider is measured in it, in turn.

    Attributes:
        suite: what the rows say they belong to.
        direction: "fwd", "bwd" or "fwd_bwd".
        shape: sizes and options of the call.
    """

    suite: str
    direction: str
    shape: Shape

    def __str__(self) -> str:
        s = self.shape
        mask = ("causal" if s.causal else "full") + (" packed" if s.lengths else "")
        mask += "" if s.inputs == "randn" else f" {s.inputs}"
        dropout = f" dropout {s.dropout_p:g}" if s.dropout_p > 0 else ""
        heads = f"{s.nheads}" if s.heads_kv == s.nheads else f"{s.nheads}/{s.heads_kv}"
        sizes = f"batch {s.batch}, {heads} heads of {s.head_dim}, length {s.seqlen}"
        return f"{self.direction} {mask}{dropout}, {sizes}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for; None is the suite's default."""

    device: str
    batch: int | None = None
    nheads: int | None = None
    seqlens: Sequence[int] | None = None
    head_dims: Sequence[int] | None = None
    causal: bool | None = None
    dtype: str | None = None
    dropout_p: float | None = None
    nheads_kv: int | None = None
    inputs: Sequence[str] = ("randn",)
    packed: bool = False

    @property
    def masks(self) -> tuple[bool, ...]:
        """Causal or not, or both."""
        return (False, True) if self.causal is None else (self.causal,)

    def dtype_name(self) -> str:
        """The dtype asked for, or the device's."""
        return self.dtype or ("float32" if self.device == CPU else "bfloat16")

    def shape(self, batch: int, seqlen: int, nheads: int, head_dim: int, causal: bool) -> Shape:
        """A shape of the asked dtype on the asked device."""
        return Shape(batch, seqlen, nheads, head_dim, causal, self.dtype_name(), device=self.device)


def papers(asked: Asked, directions: Sequence[str]) -> list[Cell]:
    """The papers' benchmark: 16k tokens, hidden size 2048; each direction is its own suite.

    A packed one has sequences of MIXED lengths in place of each length in turn.
    """
    lengths = MIXED if asked.packed else ()
    seqlens = MIXED[:1] if asked.packed else asked.seqlens or LENGTHS
    cells = []
    for direction, d, causal, inputs, n in product(
        directions, asked.head_dims or HEAD_DIMS, asked.masks, asked.inputs, seqlens
    ):
        batch = len(lengths) or asked.batch or max(1, TOKENS // n)
        nheads = asked.nheads or max(1, HIDDEN // d)
        shape = replace(
            asked.shape(batch, n, nheads, d, causal),
            dropout_p=asked.dropout_p or 0.0,
            nheads_kv=asked.nheads_kv,
            inputs=inputs,
            lengths=lengths,
        )
        cells.append(Cell(direction, direction, shape))
    return cells


@dataclass(frozen=True, slots=True)
class Family:
    """Calls of one number of heads over several lengths; a batch of None fills 64k tokens."""

    nheads: int
    head_dim: int
    seqlens: tuple[int, ...]
    batch: int | None = None


# GPT-2's heads, and few heads with long sequences, where only FA2's cut by rows fills a GPU.
_GPU_FAMILIES = (
    Family(12, 64, (512, *LENGTHS)),
    Family(4, 64, LENGTHS[1:], batch=1),  # shorter ones take less than a launch
)
_CPU_FAMILIES = (Family(2, 32, (256, 512), batch=1),)


def families(asked: Asked) -> list[Family]:
    """The device's own, with what was asked in place of their sizes."""
    found: tuple[Family, ...] = _CPU_FAMILIES if asked.device == CPU else _GPU_FAMILIES
    if asked.batch or asked.nheads or asked.head_dims:
        first = found[0]
        found = tuple(
            Family(asked.nheads or first.nheads, d, first.seqlens, asked.batch or first.batch)
            for d in asked.head_dims or (first.head_dim,)
        )
    if asked.seqlens:
        seqlens = tuple(asked.seqlens)
        found = tuple(Family(f.nheads, f.head_dim, seqlens, f.batch) for f in found)
    return list(found)


def generations(asked: Asked, directions: Sequence[str] = DIRECTIONS) -> list[Cell]:
    """Each family with and without causal mask and dropout."""
    p = DROPOUT if asked.dropout_p is None else asked.dropout_p
    rates = (0.0, p) if p > 0 else (0.0,)
    cells = []
    for family in families(asked):
        for direction in directions:
            for causal in asked.masks:
                for rate in rates:
                    for n in family.seqlens:
                        batch = family.batch or max(1, GENERATIONS_TOKENS // n)
                        shape = asked.shape(batch, n, family.nheads, family.head_dim, causal)
                        cells.append(
                            Cell(GENERATIONS_SUITE, direction, replace(shape, dropout_p=rate))
                        )
    return cells
