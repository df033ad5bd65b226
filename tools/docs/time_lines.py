"""Time lines of a Hopper forward: warpgroups that share the tensor cores of a multiprocessor.

A product of a tile takes 2 units of time and its softmax 3. The tensor cores compute one product at
a time, in the order in which products are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PRODUCT, SOFTMAX, BLOCKS = 2.0, 3.0, 6


@dataclass(frozen=True)
class Span:
    """What a warpgroup's block of keys does from ``start`` to ``stop``: "S", "softmax" or "O"."""

    group: int
    kind: str
    block: int
    start: float
    stop: float


@dataclass
class TensorCores:
    """Serve products in turn."""

    free: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def product(self, group: int, kind: str, block: int, asked: float) -> float:
        start = max(self.free, asked)
        self.free = start + PRODUCT
        self.spans.append(Span(group, kind, block, start, self.free))
        return self.free

    def softmax(self, group: int, block: int, start: float) -> float:
        self.spans.append(Span(group, "softmax", block, start, start + SOFTMAX))
        return start + SOFTMAX


def in_order(groups: int) -> list[Span]:
    """Each warpgroup waits for S, computes the softmax, and waits for P V."""
    cores = TensorCores()
    asks = [(0.0, g, "S", 0) for g in range(groups)]
    while asks:
        asks.sort()
        asked, g, kind, block = asks.pop(0)
        done = cores.product(g, kind, block, asked)
        if kind == "S":
            asks.append((cores.softmax(g, block, done), g, "O", block))
        elif block + 1 < BLOCKS:
            asks.append((done, g, "S", block + 1))
    return cores.spans


def pipelined(groups: int) -> list[Span]:
    """Each issues S of a block and P V of the one before together; softmax runs beside P V."""
    cores = TensorCores()
    asks = [(0.0, g, 0) for g in range(groups)]
    while asks:
        asks.sort()
        asked, g, block = asks.pop(0)
        done = cores.product(g, "S", block, asked) if block < BLOCKS else asked
        retired = cores.product(g, "O", block - 1, asked) if block else 0.0
        if block < BLOCKS:
            asks.append((max(cores.softmax(g, block, done), retired), g, block + 1))
    return cores.spans


def busy(spans: list[Span]) -> float:
    """Time in which the tensor cores compute."""
    return sum(s.stop - s.start for s in spans if s.kind != "softmax")


SCHEDULES: dict[str, Callable[[], list[Span]]] = {
    "one warpgroup, in order": lambda: in_order(1),
    "one warpgroup, P V a block late": lambda: pipelined(1),
    "two warpgroups, in order": lambda: in_order(2),
    "two warpgroups, P V a block late": lambda: pipelined(2),
}
