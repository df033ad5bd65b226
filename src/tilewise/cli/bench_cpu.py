"""``tilewise bench`` on a CPU: time and peak memory against torch's own attention."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from ..bench import memory, plots, results, timing
from ..bench.console import Progress, table
from ..bench.providers import FORWARD, FORWARD_BACKWARD, PROVIDERS, Provider, Shape
from ..bench.results import Output, Row
from .gate import GATE_LENGTH, MASKS, gate

SDPA = "sdpa-flash"
NOTE = (
    "protocol interleaved: after a warm call each, the rivals run in turn, in rotating order;\n"
    "median. Forward without autograd; backward of a forward done before."
)


class Bench:
    """One run on a CPU: what was asked, measured and skipped.

    Args:
        arguments: of the command, with the CPU's defaults filled in.
        directions: what to time.
    """

    def __init__(self, arguments: argparse.Namespace, directions: Sequence[str]) -> None:
        self.arguments, self.directions = arguments, directions
        self.output = Output.of(arguments.json, arguments.csv, "cpu")
        self.start = time.monotonic()
        self.left_out: list[str] = []
        self.providers = [PROVIDERS[name] for name in arguments.only]
        self.masks = [True, False] if arguments.causal is None else [arguments.causal]
        self.rows: list[Row] = []
        self.skipped: dict[tuple[str, bool, int, str], str] = {}

    def shape(self, seqlen: int, causal: bool) -> Shape:
        """The sizes asked for, at this length and mask."""
        a = self.arguments
        return Shape(a.batch, seqlen, a.n_heads, a.d_head, causal, a.dtype)

    def wrong(self) -> list[str]:
        """``gate`` for both masks at a quick size."""
        a = self.arguments
        return [
            line
            for causal in self.masks
            for line in gate(
                self.providers, Shape(1, GATE_LENGTH, min(2, a.n_heads), a.d_head, causal, a.dtype)
            )
        ]

    def _fits(self, suite: str, shape: Shape, provider: Provider) -> bool:
        need, free = provider.bytes_needed(shape, suite != FORWARD), memory.available()
        if free is None or need <= free:
            return True
        key = (suite, shape.causal, shape.seqlen, provider.name)
        self.skipped[key] = f"skipped: would need {need / 2**30:.1f} GiB"
        return False

    def measure(self) -> None:
        """Times every direction, mask and length, then measures memory for the first mask."""
        a = self.arguments
        timed = [(d, c, n) for d in self.directions for c in self.masks for n in a.seq_len]
        peaks = [(n, p) for n in a.seq_len for p in self.providers]
        with Progress(len(timed) + len(peaks), "bench") as progress:
            for direction, causal, seqlen in timed:
                shape, able = self.shape(seqlen, causal), self._in_time(direction, seqlen, causal)
                self._time(direction, shape, able)
                self.save()
                progress.advance(f"{direction} {MASKS[causal]} {seqlen}")
            for seqlen, provider in peaks:
                shape = self.shape(seqlen, self.masks[0])
                able = self._in_time(FORWARD_BACKWARD, seqlen, self.masks[0], [provider])
                if able and self._fits(FORWARD_BACKWARD, shape, provider):
                    peak = memory.peak_extra(provider.name, shape)
                    self.rows.append(
                        results.row(FORWARD_BACKWARD, provider, shape, memory.method(), peak=peak)
                    )
                    self.save()
                progress.advance(f"memory {provider.name} {seqlen}")

    def save(self) -> None:
        """Writes what there is."""
        self.output.save(self.rows, left_out=self.left_out)

    def _in_time(
        self,
        suite: str,
        seqlen: int,
        causal: bool,
        providers: Sequence[Provider] | None = None,
    ) -> list[Provider]:
        """The providers, or none after the time limit, which is then noted."""
        chosen = list(self.providers if providers is None else providers)
        limit = self.arguments.time_limit
        if limit is None or time.monotonic() - self.start <= limit:
            return chosen
        for provider in chosen:
            self.skipped[suite, causal, seqlen, provider.name] = "left out: time limit"
            self.left_out.append(f"{suite} {MASKS[causal]} {seqlen} {provider.name}")
        return []

    def _time(self, direction: str, shape: Shape, providers: Sequence[Provider]) -> None:
        able = [p for p in providers if self._fits(direction, shape, p)]
        calls = {p.name: timing.prepare(p, shape, direction) for p in able}
        for name, seconds in timing.interleaved(calls, self.arguments.seconds).items():
            self.rows.append(
                results.row(direction, PROVIDERS[name], shape, timing.PROTOCOL, seconds=seconds)
            )

    def time_table(self) -> str:
        """ms, GFLOP/s and speed as a multiple of SDPA's, by direction, mask and length."""
        timed = [r for r in self.rows if r.ms is not None]
        found = {(r.suite, r.causal, r.seqlen_q, r.provider): r for r in timed}
        lines = []
        for direction in self.directions:
            for causal in self.masks:
                for seqlen in self.arguments.seq_len:
                    rival = found.get((direction, causal, seqlen, SDPA))
                    for provider in self.providers:
                        key = (direction, causal, seqlen, provider.name)
                        head = [direction, MASKS[causal], str(seqlen), provider.name]
                        lines.append(head + self._time_cells(found.get(key), rival, key))
        header = ["direction", "mask", "length", "provider", "ms", "GFLOP/s", "speed / sdpa", ""]
        return table(header, lines, left=4)

    def _time_cells(
        self, row: Row | None, rival: Row | None, key: tuple[str, bool, int, str]
    ) -> list[str]:
        if row is None:
            return ["-", "-", "-", self.skipped[key]]
        assert row.ms is not None and row.tflops is not None
        ratio = "-" if rival is None or rival.ms is None else f"{rival.ms / row.ms:.2f}x"
        return [f"{row.ms:.2f}", f"{1e3 * row.tflops:.1f}", ratio, ""]

    def memory_table(self) -> str:
        """Peak MiB by length, with its growth and that of a line and of a square beside it."""
        peaks = {(r.provider, r.seqlen_q): r.peak_mib for r in self.rows if r.peak_mib is not None}
        lengths = self.arguments.seq_len
        lines = []
        for provider in self.providers:
            for before, seqlen in zip([None, *lengths], lengths, strict=False):
                peak = peaks.get((provider.name, seqlen))
                earlier = peaks.get((provider.name, before)) if before else None
                key = (FORWARD_BACKWARD, self.masks[0], seqlen, provider.name)
                lines.append(
                    [
                        provider.name,
                        str(seqlen),
                        "-" if peak is None else f"{peak:.1f}",
                        "-" if peak is None or not earlier else f"x{peak / earlier:.2f}",
                        f"x{seqlen / before:.2f}" if before else "-",
                        f"x{(seqlen / before) ** 2:.2f}" if before else "-",
                        self.skipped.get(key, ""),
                    ]
                )
        header = ["provider", "length", "MiB", "growth", "linear is", "quadratic is", ""]
        return table(header, lines)


def run(arguments: argparse.Namespace, directions: Sequence[str]) -> int:
    """Gate, measurement, tables, files; 1 when the gate is red."""
    bench = Bench(arguments, directions)
    if wrong := bench.wrong():
        print("no speed is reported of what is wrong:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    bench.measure()
    board = bench.output.board
    print(f"{board['cpu']}, {board['threads']} threads, torch {board['torch']}")
    a = arguments
    print(f"batch {a.batch}, {a.n_heads} heads of {a.d_head}, {a.dtype}\n{NOTE}\n")
    print(bench.time_table())
    mask = MASKS[bench.masks[0]]
    how = {
        memory.VM_HWM: "VmHWM, to the page",
        memory.RU_MAXRSS: "ru_maxrss, a lower bound: this system cannot set the mark back",
    }[memory.method()]
    print(f"\nPeak memory of forward + backward beyond the inputs, mask {mask}, each in a fresh")
    print(f"process ({how}):\n")
    print(bench.memory_table())
    bench.save()
    if bench.output.names():
        print()
    for path in bench.output.names():
        print(f"wrote {path}")
    if arguments.plot and plots.available():
        plots.benchmark(bench.rows, board, arguments.plot)
        print(f"wrote {arguments.plot}")
    elif arguments.plot:
        print(plots.HOW_TO_GET)
    return 0
