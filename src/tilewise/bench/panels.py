"""The papers' figure: a panel for each kind of call, bars by implementation over the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import plots
from .providers import BACKWARD, FORWARD, FORWARD_BACKWARD
from .report import dropout, mask
from .results import Row, machine
from .timing import BURST

_TITLES = {FORWARD: "forward", BACKWARD: "backward", FORWARD_BACKWARD: "forward + backward"}


def _by_provider(rows: Sequence[Row], value: str, factor: float) -> dict[str, dict[int, float]]:
    """Numbers by provider and length; a provider without any keeps its place."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        cells = found.setdefault(row.provider, {})
        number = getattr(row, value)
        if number is not None:
            cells[row.seqlen_q] = factor * number
    return found


def _column(row: Row) -> tuple[int, str, str]:
    return row.head_dim, mask(row), dropout(row)


def _title(row: Row) -> str:
    p = dropout(row)
    return f"{mask(row)}, d {row.head_dim}" + ("" if p == "-" else f", dropout {p}")


def sets(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that belong into one figure: one number of heads for each head dimension."""
    nheads: dict[int, list[int]] = {}
    found: dict[int, list[Row]] = {}
    for row in rows:
        known = nheads.setdefault(row.head_dim, [])
        if row.nheads not in known:
            known.append(row.nheads)
        found.setdefault(known.index(row.nheads), []).append(row)
    return list(found.values())


def protocol_of(rows: Sequence[Row]) -> str:
    """The protocol to draw: what was measured under load, if it was."""
    names = list(dict.fromkeys(r.protocol for r in rows))
    return next((name for name in names if name != BURST), names[0])


def draw(
    rows: Sequence[Row], board: Mapping[str, Any], path: Path, labels: Mapping[str, str]
) -> list[Path]:
    """One PNG for each of ``sets``: a row of panels for each direction, and one of memory.

    Args:
        rows: of one suite, or of several directions of the papers' benchmark.
        board: for the title and the unit.
        path: of the first PNG; the others have a number before the suffix.
        labels: names of providers in the legend where they are not their own.

    Returns:
        The files written.
    """
    written = []
    for number, chosen in enumerate(sets(rows)):
        target = path if number == 0 else path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
        _draw(chosen, board, target, labels)
        written.append(target)
    return written


def _draw(
    rows: Sequence[Row], board: Mapping[str, Any], path: Path, labels: Mapping[str, str]
) -> None:
    protocol = protocol_of(rows)
    rows = [r for r in rows if r.protocol == protocol]
    columns = list(dict.fromkeys(map(_column, rows)))
    directions = list(dict.fromkeys(r.direction or r.suite for r in rows))
    peaks = [r.direction for r in rows if r.peak_mib is not None]
    kinds = [(d, "tflops") for d in directions] + ([(peaks[-1], "peak_mib")] if peaks else [])
    on_gpu = "gpu" in board
    unit, factor = ("TFLOPS", 1.0) if on_gpu else ("GFLOP/s", 1e3)
    lengths = sorted({r.seqlen_q for r in rows})
    figure, axes = plots.figure(len(kinds), len(columns), 4.6, 2.9)
    for line, (direction, value) in zip(axes, kinds, strict=True):
        for ax, column in zip(line, columns, strict=True):
            here = [r for r in rows if r.direction == direction and _column(r) == column]
            if not here:
                ax.set_axis_off()
                continue
            speed = value == "tflops"
            found = _by_provider(here, value, factor if speed else 1.0)
            plots.bars(ax, found, lengths, ".0f", log=not speed, labels=labels)
            what = _TITLES[direction or FORWARD] + ("" if speed else ", peak memory")
            ax.set_title(f"{what}, {_title(here[0])}", fontsize=9)
            ax.set_ylabel(unit if speed else "MiB beyond the inputs (log)", fontsize=8)
    axes.flat[0].legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
    axes.flat[0].margins(y=0.35)
    first = rows[0]
    batches = sorted({r.batch for r in rows})
    batch = str(batches[0]) if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
    nheads = sorted({r.nheads for r in rows})
    heads = ", ".join(map(str, nheads))
    title = f"batch {batch}, {heads} heads, {first.dtype}, {protocol}"
    figure.suptitle(f"{title} · {machine(dict(board))}", fontsize=9)
    plots.save(figure, path)
