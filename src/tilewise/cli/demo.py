"""``tilewise demo``: a GPT trained twice, with standard attention and with tilewise."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..bench import fresh, memory, plots, results
from ..bench.console import Progress, table
from ..bench.gpt import ATTENTION
from ..bench.providers import PROVIDERS, Shape
from ..bench.results import Row
from ..bench.text import standard_library
from ..bench.training import Run, Trainer, TrainingConfig
from .kinds import output_folder, positive

MEMORY_LENGTHS = (1024, 2048, 4096)
QUICK_MEMORY_LENGTHS = (256, 512)
_MEMORY_PROVIDERS = {"standard": "eager", "tilewise": "tilewise"}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    own = commands.add_parser(
        "demo", help="train a GPT with standard attention and with tilewise, and compare"
    )
    own.add_argument("--steps", type=positive, default=None, help="100 (3 with --quick)")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--out", type=output_folder, default="out", help="folder for plot and numbers")
    own.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: a smoke test"
    )
    own.set_defaults(run=run)


def train_both(config: TrainingConfig, limit: int) -> dict[str, Run]:
    """Trains with either attention, a step of each in turn, so that their times compare."""
    text = standard_library(limit)
    trainers = {name: Trainer(name, text, config) for name in ATTENTION}
    with Progress(config.steps * len(trainers), "train") as progress:
        for step in range(config.steps):
            for name, trainer in trainers.items():
                loss = trainer.step(step)
                progress.advance(f"{name}: loss {loss:.3f}")
    return {name: trainer.finish() for name, trainer in trainers.items()}


def measure_memory(lengths: tuple[int, ...]) -> tuple[list[Row], list[str]]:
    """Peak of forward and backward of causal attention, each in a fresh process."""
    rows, skipped = [], []
    with Progress(len(lengths) * len(_MEMORY_PROVIDERS), "memory") as progress:
        for seqlen in lengths:
            shape = Shape(seqlen=seqlen)
            for name in _MEMORY_PROVIDERS.values():
                provider = PROVIDERS[name]
                need, free = provider.bytes_needed(shape, backward=True), memory.available()
                if free is not None and need > free:
                    skipped.append(
                        f"{name} at {seqlen}: skipped: would need {need / 2**30:.1f} GiB"
                    )
                else:
                    peak = memory.peak_extra(name, shape)
                    rows.append(results.row("fwd_bwd", provider, shape, memory.method(), peak=peak))
                progress.advance(f"{name} {seqlen}")
    return rows, skipped


def largest_difference(runs: Mapping[str, Run]) -> float:
    """Largest difference of the two loss curves."""
    pairs = zip(runs["standard"].losses, runs["tilewise"].losses, strict=True)
    return max(abs(a - b) for a, b in pairs)


def _training_table(runs: Mapping[str, Run]) -> str:
    lines = [
        [
            name,
            f"{run.train_before:.4f}",
            f"{run.train_after:.4f}",
            f"{run.held_out_before:.4f}",
            f"{run.held_out_after:.4f}",
            f"{1e3 * statistics.median(run.step_seconds):.0f}",
        ]
        for name, run in runs.items()
    ]
    header = ["attention", "train: start", "end", "held out: start", "end", "ms per step"]
    return table(header, lines)


def _memory_table(rows: list[Row]) -> str:
    peaks = {(r.provider, r.seqlen_q): r.peak_mib for r in rows}
    lines = []
    for seqlen in dict.fromkeys(r.seqlen_q for r in rows):
        standard, ours = peaks.get(("eager", seqlen)), peaks[("tilewise", seqlen)]
        assert ours is not None
        lines.append(
            [
                str(seqlen),
                f"{Shape(seqlen=seqlen).matrix_bytes / 2**20:.0f}",
                "-" if standard is None else f"{standard:.0f}",
                f"{ours:.0f}",
                "-" if standard is None else f"{standard / ours:.1f}x",
            ]
        )
    return table(["length", "matrix MiB", "standard MiB", "tilewise MiB", "less"], lines)


def _as_given(arguments: argparse.Namespace) -> list[str]:
    """The command line that gives these arguments."""
    line = ["demo", "--seed", str(arguments.seed), "--out", str(arguments.out)]
    if arguments.steps is not None:
        line += ["--steps", str(arguments.steps)]
    return [*line, "--quick"] if arguments.quick else line


def run(arguments: argparse.Namespace) -> int:
    """Trains, measures, prints, draws."""
    code = fresh.again(_as_given(arguments))
    if code is not None:
        return code
    start = time.perf_counter()
    config = TrainingConfig(steps=arguments.steps or 100, seed=arguments.seed)
    limit = 4_000_000
    if arguments.quick:
        model = replace(config.model, context=64, layers=2, nheads=2, width=64)
        steps = arguments.steps or 3
        config = replace(config, model=model, steps=steps, warm_up=1, evaluation_batches=2)
        limit = 200_000
    m = config.model
    print(
        f"A GPT of {m.layers} layers, {m.nheads} heads, width {m.width}, over bytes, context"
        f" {m.context}, dropout {m.dropout_p} on attention and residual,\nlearns the source of"
        f" Python's standard library in {config.steps} steps of {config.batch} x {m.context} bytes,"
        f" twice: same start, batches, dropout.\n{torch.get_num_threads()} threads,"
        f" {results.cpu_model()}",
        flush=True,
    )
    runs = train_both(config, limit)
    difference = largest_difference(runs)
    print(f"\nLoss in nats per byte ({runs['tilewise'].parameters:,} parameters):\n")
    print(_training_table(runs))
    print(f"\nlargest difference along the two curves: {difference:.1e}\n", flush=True)
    rows, skipped = measure_memory(QUICK_MEMORY_LENGTHS if arguments.quick else MEMORY_LENGTHS)
    print("Peak memory of one causal attention, forward + backward, beyond its inputs:")
    print(f"batch 1, 8 heads of 64, float32, each in a fresh process ({memory.method()})\n")
    print(_memory_table(rows), *skipped, sep="\n")
    seconds = time.perf_counter() - start
    _save(arguments.out, config, runs, rows, difference, seconds)
    print(f"{seconds:.0f} seconds in all")
    return 0


def _save(
    out: Path,
    config: TrainingConfig,
    runs: Mapping[str, Run],
    rows: list[Row],
    difference: float,
    seconds: float,
) -> None:
    content = {
        "config": asdict(config),
        "runs": {name: asdict(run) for name, run in runs.items()},
        "largest_difference": difference,
        "seconds": seconds,
    }
    results.write(out / "demo.json", rows, training=content)
    print(f"\nwrote {out / 'demo.json'}")
    if plots.available():
        plots.training(runs, rows, out / "demo.png")
        print(f"wrote {out / 'demo.png'}")
    else:
        print(plots.HOW_TO_GET)
