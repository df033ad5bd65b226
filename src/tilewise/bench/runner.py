"""A run over many cells: checked before it is timed, saved after each, limited in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .cells import Cell
from .meters import DeviceLostError, Failure, Meter, attempt, failed
from .providers import FORWARD, Provider, Shape
from .results import Output, Row

# (provider, shape, whether its backward counts) -> what is wrong with its results, or None
Verify = Callable[[Provider, Shape, bool], str | None]
_Key = tuple[str, tuple[object, ...], bool, bool]


@dataclass(slots=True)
class Runner:
    """Measures cells one after the other.

    Attributes:
        meter: of the device.
        providers: who takes part, in the order of the tables.
        verify: decides, at a small size, whether a provider's speed may be reported.
        output: saved after each cell.
        limit: seconds after which no new cell is started; None is without end.
        facts: more to stand in the result file.
        tick: called with each cell's name when it is done.
        rows: what was measured, and why what was not.
        wrong: providers whose results break the rule, with the error.
        left_out: cells that were not reached.
        lost: what the device said when it stopped answering.
    """

    meter: Meter
    providers: Sequence[Provider]
    verify: Verify
    output: Output
    limit: float | None = None
    facts: dict[str, object] = field(default_factory=dict)
    tick: Callable[[str], None] = lambda text: None
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    lost: str | None = None
    _verified: dict[_Key, str | None] = field(default_factory=dict)

    def run(self, cells: Sequence[Cell]) -> None:
        """Measures the cells; those after the time limit, or after a lost device, are left out."""
        start = time.monotonic()
        for number, cell in enumerate(cells):
            late = self.limit is not None and time.monotonic() - start > self.limit
            if late or self.lost is not None:
                self.left_out += [str(c) for c in cells[number:]]
                break
            try:
                self._cell(cell)
            except DeviceLostError as error:
                self.lost = str(error)
                self.left_out.append(str(cell))
            self.save()
            self.tick(str(cell))
        self.save()

    def save(self) -> None:
        """Writes what there is."""
        self.output.save(
            self.rows,
            **self.facts,
            wrong=self.wrong,
            left_out=self.left_out,
            device_lost=self.lost,
        )

    def _cell(self, cell: Cell) -> None:
        able = []
        for provider in self.providers:
            reason = provider.refusal(cell.shape, cell.direction) or self._check(provider, cell)
            if reason is None:
                able.append(provider)
            else:
                self.rows += failed(cell, provider, self.meter.protocols, reason)
        self.rows += self.meter.measure(cell, able)

    def _check(self, provider: Provider, cell: Cell) -> str | None:
        """``verify``, once for each kind of call, also where it raises."""
        shape, backward = cell.shape, cell.direction != FORWARD
        group = shape.nheads // shape.heads_kv
        kind = (shape.head_dim, group, shape.causal, shape.inputs, bool(shape.lengths))
        key = (provider.name, kind, shape.dropout_p > 0, backward)
        if key not in self._verified:
            found = attempt(lambda: self.verify(provider, shape, backward), shape.device)
            if isinstance(found, Failure):
                self._verified[key] = f"its check raised {found.reason}"
            else:
                self._verified[key] = found and f"wrong: {found}"
                if found:
                    self.wrong.append(found)
        return self._verified[key]
