"""``tilewise bench`` over cells: the papers' shapes on a GPU, the generations on either device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..bench import memory, panels, plots, report
from ..bench.cells import Asked, generations, papers
from ..bench.console import Progress
from ..bench.meters import CpuMeter, GpuMeter, Meter
from ..bench.results import Output, machine
from ..bench.rivals import CPU, providers_on
from ..bench.runner import Runner
from ..bench.timing import GPU_PROTOCOLS, SUSTAINED
from .gate import verify

GENERATION_LABELS = {
    "eager": "standard attention",
    "tilewise-fa1": "FlashAttention",
    "tilewise": "FlashAttention-2",
    "tilewise-triton": "FlashAttention-2",
    "tilewise-gluon": "FlashAttention-3",
}
NOTES = {
    "interleaved": "after a warm call each, the providers run in turn, in rotating order; median",
    "burst": "0.25 s of idling, one warm launch, ten timed; mean of a launch",
    "sustained": "continuous load, the providers in turn; median chunk",
}


def _meter(arguments: argparse.Namespace, suite: str) -> Meter:
    if arguments.device == CPU:
        return CpuMeter(arguments.seconds or 0.5)
    protocols = arguments.protocol or ((SUSTAINED,) if suite else GPU_PROTOCOLS)
    return GpuMeter(tuple(protocols), arguments.seconds or 0.3)


def run(arguments: argparse.Namespace, asked: Asked, suite: str, directions: Sequence[str]) -> int:
    """Checks and measures each cell; prints tables, and what is missing and why.

    Returns:
        1 when a provider's results were wrong, the device was lost or nothing could be measured.
    """
    cells = generations(asked, directions) if suite else papers(asked, directions)
    named = [providers_on(asked.device)[name] for name in arguments.only]
    absent = {p.name: reason for p in named if (reason := p.absent()) is not None}
    runner = Runner(
        _meter(arguments, suite),
        [p for p in named if p.name not in absent],
        verify,
        Output.of(arguments.json, arguments.csv, asked.device),
        arguments.time_limit,
        {"absent": absent, "memory": _memory_method(asked.device)},
    )
    if not runner.providers:
        print("nothing to measure:", *report.absent(absent), sep="\n  ", file=sys.stderr)
        return 1
    with Progress(len(cells), "bench") as progress:
        runner.tick = progress.advance
        runner.run(cells)
    _print(runner, asked, absent)
    _files(runner, arguments, suite)
    measured = any(r.ms is not None for r in runner.rows)
    return 1 if runner.wrong or runner.lost or not measured else 0


def _memory_method(device: str) -> str:
    return memory.method() if device == CPU else memory.ALLOCATOR


def _print(runner: Runner, asked: Asked, absent: dict[str, str]) -> None:
    on_gpu = asked.device != CPU
    print(f"{machine(runner.output.board)}, {asked.dtype_name()}")
    for provider in runner.providers:
        print(f"  {provider.name}: {provider.version or 'version not known'}")
    print(*report.absent(absent), sep="\n  ") if absent else None
    for protocol in runner.meter.protocols:
        unit = "TFLOPS" if on_gpu else "GFLOP/s"
        print(f"\n{unit}, protocol {protocol}: {NOTES[protocol]}\n")
        print(report.speed(runner.rows, protocol, on_gpu))
    if peaks := report.peak_memory(runner.rows):
        print("\nPeak MiB beyond the inputs; a backward's with that of its forward:\n")
        print(peaks)
    if missing := report.reasons(runner.rows):
        print("\nNo number:", *missing, sep="\n  ")
    if runner.lost:
        print(f"\nstopped: {runner.lost}", file=sys.stderr)
    if runner.left_out:
        print("\nleft out, not reached:", *runner.left_out, sep="\n  ")
    if runner.wrong:
        print(
            "\nno speed is reported of what is wrong:", *runner.wrong, sep="\n  ", file=sys.stderr
        )


def _files(runner: Runner, arguments: argparse.Namespace, suite: str) -> None:
    written = runner.output.names()
    if arguments.plot and not plots.available():
        print(plots.HOW_TO_GET)
    elif arguments.plot and runner.rows:
        labels = GENERATION_LABELS if suite else {"eager": "standard"}
        written += panels.draw(runner.rows, runner.output.board, arguments.plot, labels)
    for path in written:
        print(f"wrote {path}")
