"""``tilewise bench --suite train``: one GPT by several attentions."""

from __future__ import annotations

import argparse
import sys

from ..bench import plots, pretraining
from ..bench.console import Progress
from ..bench.meters import DeviceLostError
from ..bench.pretraining import OTHER_SEED, Pretraining, config_for
from ..bench.results import Output, machine


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints, draws; 1 when a run ended early by an error, or none could begin."""
    a = arguments
    config = config_for(
        a.device,
        model=a.model,
        dropout_p=a.dropout or 0.0,
        steps=a.steps,
        batch=a.batch,
        context=a.seq_len[0] if a.seq_len else None,
        dtype=a.dtype,
        seed=a.seed,
    )
    training = Pretraining(config, Output.of(a.json, a.csv, a.device), a.only, a.time_limit)
    m = config.model
    print(
        f"{m.name}, a GPT of {m.layers} layers, {m.nheads} heads, width {m.width}, over bytes,"
        f" dropout {m.dropout_p:g},\ncontext {m.context}, batch {config.batch}, {config.dtype}:"
        f" {config.steps} steps on the source of Python's standard library."
        f"\n{machine(training.output.board)}",
        flush=True,
    )
    lost = None
    with Progress(config.steps * len(a.only), "train") as progress:
        training.tick = progress.advance
        try:
            training.run()
        except DeviceLostError as error:
            lost = str(error)
    _print(training, lost)
    written = training.output.names()
    if a.plot and not plots.available():
        print(plots.HOW_TO_GET)
    elif a.plot and any(run.losses for run in training.runs.values()):
        pretraining.draw(training.runs, training.output.board, a.plot)
        written.append(a.plot)
    for path in written:
        print(f"wrote {path}")
    failed = training.errors.keys() - training.refused
    return 1 if failed or lost or training.refused.issuperset(a.only) else 0


def _print(training: Pretraining, lost: str | None) -> None:
    print("\nLoss in nats per byte; gap: largest difference from the curve of standard attention,")
    print(f"both smoothed over {pretraining.WINDOW} steps:\n")
    if training.config.model.dropout_p > 0:
        print(
            "Attentions may draw their dropout masks in different ways: a gap may be that of two"
            " masks.\n"
        )
    print(training.summary())
    gaps = training.gaps()
    if "tilewise" in gaps and OTHER_SEED in gaps:
        print(
            f"\ntilewise differs from standard attention of the same seed by {gaps['tilewise']:.2e}"
            f" at most,\nstandard attention of another seed by {gaps[OTHER_SEED]:.2e}"
        )
    if training.steps_left_out:
        print(f"{training.steps_left_out} steps left out: time limit")
    if lost:
        print(f"stopped: {lost}", file=sys.stderr)
