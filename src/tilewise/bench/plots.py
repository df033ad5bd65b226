"""Figures: speed and memory over the sequence length, and the demo's two trainings."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .providers import BACKWARD, FORWARD
from .results import Row
from .training import Run

HOW_TO_GET = "matplotlib is not installed: pip install 'tilewise[bench]' draws this plot"
_COLORS = {
    "tilewise": "#d1495b",
    "tilewise-fa1": "#edae49",
    "tilewise-triton": "#f2a541",
    "tilewise-gluon": "#9b2226",
    "sdpa-flash": "#30638e",
    "sdpa-cudnn": "#3f8efc",
    "sdpa-memeff": "#8ecae6",
    "sdpa": "#b56bd6",
    "flex": "#6a4c93",
    "flash-attn": "#7cb518",
    "fa3": "#2a9d8f",
    "fa4": "#1b5e20",
    "eager": "#8d99ae",
    "standard": "#8d99ae",
}
_LABELS = {
    "tilewise": "tilewise (FA-2)",
    "tilewise-fa1": "tilewise (FA-1)",
    "sdpa-flash": "torch SDPA",
    "eager": "standard",
    "standard": "standard",
}
_OTHER = "#444444"
_DIRECTIONS = {FORWARD: "Forward", BACKWARD: "Backward"}


def color(name: str) -> str:
    """A provider's or a run's colour, the same in every figure."""
    return _COLORS.get(name, _OTHER)


def available() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def figure(rows: int, cols: int, width: float, height: float) -> tuple[Any, Any]:
    """An empty figure of panels, each ``width`` by ``height`` inches, and its axes by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(
        rows, cols, figsize=(width * cols, height * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(figure: Any, path: Path) -> None:
    """Writes the PNG; makes its folder."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def bars(
    ax: Any,
    values: Mapping[str, Mapping[int, float]],
    lengths: Sequence[int],
    number: str,
    log: bool = False,
    labels: Mapping[str, str] = _LABELS,
) -> None:
    """Bars by provider over the length; a bar that was not measured says so by a cross."""
    width = 0.84 / max(1, len(values))
    if log:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    for i, (name, found) in enumerate(values.items()):
        places = [x + (i - (len(values) - 1) / 2) * width for x in range(len(lengths))]
        heights = [found.get(length, float("nan")) for length in lengths]
        ax.bar(places, heights, 0.94 * width, color=color(name), label=labels.get(name, name))
        for place, length in zip(places, lengths, strict=True):
            if length in found:
                text = format(found[length], number)
                ax.annotate(
                    text,
                    (place, found[length]),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=6.5,
                )
            else:
                ax.annotate(
                    "x",
                    (place, 0.01),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    color=color(name),
                )
    ax.set_xticks(range(len(lengths)), [_length(n) for n in lengths])
    ax.set_xlabel("sequence length")
    ax.margins(y=0.12)


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _by_provider(rows: Sequence[Row], value: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        number = getattr(row, value)
        if number is not None:
            found.setdefault(row.provider, {})[row.seqlen_q] = number
    return found


def _sizes(row: Row) -> str:
    return f"batch {row.batch}, {row.nheads} heads of {row.head_dim}, {row.dtype}"


def benchmark(rows: Sequence[Row], board: Mapping[str, Any], path: Path) -> None:
    """One panel of GFLOP/s for each direction and mask, and one of peak memory.

    Args:
        rows: of suites "fwd", "bwd" and "fwd_bwd", all of the same sizes but the length.
        board: for the title.
        path: the PNG.
    """
    panels = list(dict.fromkeys((r.suite, r.causal) for r in rows if r.ms is not None))
    memory = [r for r in rows if r.peak_mib is not None]
    lengths = sorted({r.seqlen_q for r in rows})
    total = len(panels) + bool(memory)
    cols = min(2, total)
    drawn, axes = figure(-(-total // cols), cols, 6.0, 3.4)
    flat = list(axes.flat)
    for ax, (suite, causal) in zip(flat, panels, strict=False):
        chosen = [r for r in rows if (r.suite, r.causal) == (suite, causal)]
        speed = {
            name: {n: 1e3 * tflops for n, tflops in found.items()}
            for name, found in _by_provider(chosen, "tflops").items()
        }
        bars(ax, speed, lengths, ".0f")
        ax.set_title(f"{_DIRECTIONS[suite]}, {'causal' if causal else 'no mask'}", fontsize=10)
        ax.set_ylabel("GFLOP/s (higher is better)")
    if memory:
        ax = flat[len(panels)]
        bars(ax, _by_provider(memory, "peak_mib"), lengths, ".0f", log=True)
        mask = "causal" if memory[0].causal else "no mask"
        ax.set_title(f"Peak memory, forward + backward, {mask}", fontsize=10)
        ax.set_ylabel("MiB beyond the inputs (log)")
    for ax in flat[total:]:
        ax.set_axis_off()
    flat[0].legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    flat[0].margins(y=0.3)
    drawn.suptitle(f"{_sizes(rows[0])} · {board['cpu']}, {board['threads']} threads", fontsize=9)
    save(drawn, path)


def training(runs: Mapping[str, Run], memory: Sequence[Row], path: Path) -> None:
    """The two loss curves over each other, their difference, and attention's memory.

    Args:
        runs: the trainings "standard" and "tilewise".
        memory: rows of suite "fwd_bwd" with a peak.
        path: the PNG.
    """
    drawn, axes = figure(1, 3, 4.6, 3.7)
    curves, difference, by_length = axes[0]
    standard, tilewise = runs["standard"].losses, runs["tilewise"].losses
    steps = range(1, len(standard) + 1)
    curves.plot(steps, standard, color=_COLORS["standard"], lw=4, label="standard")
    curves.plot(steps, tilewise, color=_COLORS["tilewise"], lw=1.2, label="tilewise")
    curves.set_title("A GPT learns Python's standard library", fontsize=10)
    curves.set_xlabel("step")
    curves.set_ylabel("training loss, nats per byte")
    curves.legend(frameon=False)

    gaps = [abs(a - b) for a, b in zip(standard, tilewise, strict=True)]
    difference.semilogy(steps, [gap or float("nan") for gap in gaps], ".", color="#333333", ms=4)
    difference.set_ylim(1e-8, 1e1)
    loss_label = {"color": "#777777", "fontsize": 8, "ha": "right", "va": "top", "xytext": (0, -8)}
    difference.plot(steps, standard, color="#bbbbbb", lw=1)
    difference.annotate(
        "the loss", (steps[-1], standard[-1]), textcoords="offset points", **loss_label
    )
    difference.set_title("Difference of the two losses", fontsize=10)
    difference.set_xlabel("step (no dot: equal to the last bit)")
    difference.set_ylabel("|standard - tilewise| (log)")

    peaks = _by_provider(memory, "peak_mib")
    bars(by_length, peaks, sorted({r.seqlen_q for r in memory}), ".0f")
    by_length.set_title("Peak memory of attention, forward + backward", fontsize=10)
    by_length.set_ylabel("MiB beyond the inputs")
    by_length.legend(frameon=False, title=_sizes(memory[0]), title_fontsize=7.5, loc="upper left")
    save(drawn, path)
