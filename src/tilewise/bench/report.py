"""Tables of a run: speed and memory by provider over the sequence length, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .console import table
from .results import Row

_MASKS = {True: "causal", False: "full"}
_Group = tuple[str, str, str, str, str]
Cells = tuple[list[str], list[list[str]]]  # a table's header and its lines
_LEFT = 6  # columns of words


def group(row: Row) -> _Group:
    """The line of a table that a row belongs to, its provider excepted."""
    heads = str(row.nheads) if row.nheads == row.nheads_kv else f"{row.nheads}/{row.nheads_kv}"
    return (row.direction or row.suite, heads, str(row.head_dim), mask(row), dropout(row))


def mask(row: Row) -> str:
    """The mask, "causal" or "full"; what else is unusual about the tensors."""
    packed = " packed" if row.lengths else ""
    return _MASKS[row.causal] + packed + ("" if row.inputs == "randn" else f" {row.inputs}")


def dropout(row: Row) -> str:
    """Dropout's probability, or "-"."""
    p = row.features.get("dropout_p", 0.0)
    return f"{p:g}" if p else "-"


def _over_lengths(rows: Sequence[Row], value: str, number: str, factor: float) -> Cells:
    """A line for each group and provider, a column for each length."""
    lengths = sorted({r.seqlen_q for r in rows})
    found: dict[tuple[_Group, str], dict[int, str]] = {}
    for r in rows:
        x = getattr(r, value)
        cells = found.setdefault((group(r), r.provider), {})
        if x is not None:
            cells[r.seqlen_q] = format(factor * x, number)
    groups = dict.fromkeys(g for g, _ in found)  # providers of a group stand together
    lines = [
        [*g, provider, *(cells.get(n, "-") for n in lengths)]
        for wanted in groups
        for (g, provider), cells in found.items()
        if g == wanted
    ]
    header = ["direction", "heads", "d", "mask", "dropout", "provider", *map(str, lengths)]
    return header, lines


def speed_cells(rows: Sequence[Row], protocol: str, on_gpu: bool) -> Cells:
    """What ``speed`` prints."""
    chosen = [r for r in rows if r.protocol == protocol]
    return _over_lengths(chosen, "tflops", ".0f" if on_gpu else ".1f", 1.0 if on_gpu else 1e3)


def peak_cells(rows: Sequence[Row]) -> Cells | None:
    """What ``peak_memory`` prints; None where none was measured."""
    protocols = [r.protocol for r in rows if r.peak_mib is not None]
    if not protocols:
        return None
    measured = {r.direction for r in rows if r.peak_mib is not None}
    chosen = [r for r in rows if r.protocol == protocols[0] and r.direction in measured]
    return _over_lengths(chosen, "peak_mib", ".1f", 1.0)


def speed(rows: Sequence[Row], protocol: str, on_gpu: bool) -> str:
    """TFLOPS (GFLOP/s on a CPU) of the rows of one protocol."""
    return table(*speed_cells(rows, protocol, on_gpu), left=_LEFT)


def peak_memory(rows: Sequence[Row]) -> str:
    """Peak MiB beyond the inputs; "" where none was measured."""
    cells = peak_cells(rows)
    return "" if cells is None else table(*cells, left=_LEFT)


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why numbers are missing: a line for each provider and reason, with where it holds."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r.error is not None:
            p = dropout(r)
            where = f"{r.direction} {mask(r)}{'' if p == '-' else ' dropout ' + p} d {r.head_dim}"
            places = found.setdefault((r.provider, r.error), [])
            place = f"{where}, {r.nheads} heads, length {r.seqlen_q}"
            if place not in places:
                places.append(place)
    return [
        f"{provider}: {reason} ({places[0]}{_others(places)})"
        for (provider, reason), places in found.items()
    ]


def _others(places: Sequence[str]) -> str:
    return f" and {len(places) - 1} more" if len(places) > 1 else ""


def absent(reasons_against: Mapping[str, str]) -> list[str]:
    """The providers that are not on this machine, and why."""
    return [f"not here: {name}: {reason}" for name, reason in reasons_against.items()]
