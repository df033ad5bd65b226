"""``tilewise bench``: time and peak memory against torch's own attention."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arguments import Options, dense_call
from ..backends import reference
from ..bench import memory, plots, results, timing
from ..bench.console import Progress, table
from ..bench.providers import (
    BACKWARD,
    FORWARD,
    PROVIDERS,
    Provider,
    Shape,
    forward_backward,
    make_inputs,
)
from ..bench.results import Row
from ..ops.schema import describe
from ..testing import excess
from .kinds import duration, lengths, output_file, positive

GATE_LENGTH = 577  # a prime; more than one tile in either direction
SDPA = "sdpa-flash"
FORWARD_BACKWARD = "fwd_bwd"
NOTE = (
    "protocol interleaved: after a warm call each, the rivals run in turn, in rotating order;\n"
    "median. Forward without autograd; backward of a forward done before."
)
_MASKS = {True: "causal", False: "none"}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    own = commands.add_parser("bench", help="time and memory against torch's own attention")
    default = {"help": "default: %(default)s"}
    own.add_argument("--batch", type=positive, default=1, **default)
    own.add_argument("--n-heads", type=positive, default=8, **default)
    own.add_argument(
        "--seq-len", type=lengths, default=[512, 1024, 2048, 4096], metavar="N,N,...", **default
    )
    own.add_argument("--d-head", type=positive, default=64, **default)
    own.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=None, help="both by default"
    )
    own.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", **default
    )
    own.add_argument(
        "--only",
        type=_names(PROVIDERS),
        default=list(PROVIDERS),
        metavar="NAME,...",
        help=f"of {', '.join(PROVIDERS)}; all by default",
    )
    own.add_argument(
        "--direction",
        type=_names((FORWARD, BACKWARD)),
        default=[FORWARD, BACKWARD],
        metavar="D,D",
        help=f"of {FORWARD}, {BACKWARD}; both by default",
    )
    own.add_argument("--seconds", type=duration, default=0.5, help="about how long to time a call")
    own.add_argument("--json", type=output_file, help="result file to write")
    own.add_argument("--plot", type=output_file, help="PNG to write")
    own.set_defaults(run=run)


def _names(allowed: Any) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: must be of {', '.join(allowed)}"
            )
        return [name for name in allowed if name in chosen]

    return parse


def gate(providers: Sequence[Provider], shape: Shape) -> list[str]:
    """What is wrong with the providers by the one rule of ``testing``; empty when nothing.

    Compares out and the gradients of q, k and v with the float64 oracle at ``shape``.
    """
    q, k, v, dout = make_inputs(shape)
    tensors, scalars = dense_call(q, k, v, Options(causal=shape.causal))
    problem = describe(tensors, scalars, needs_grad=False)

    def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        out, _, _ = reference.attention(problem, tensors, dtype)
        g = reference.attention_backward(problem, tensors, dout, None, dtype)
        assert g.dq is not None and g.dk is not None and g.dv is not None
        return {"out": out, "dq": g.dq, "dk": g.dk, "dv": g.dv}

    ref, twin = expected(torch.float64), expected(shape.torch_dtype)
    wrong = []
    for provider in providers:
        q_, k_, v_, dout_ = (provider.layout(x) for x in (q, k, v, dout))
        out, grads = forward_backward(provider, (q_, k_, v_), dout_, shape.causal)
        for name, x in zip(ref, (out, *grads), strict=True):
            error, allowed = excess(
                name, provider.layout(x), ref[name], twin[name], shape.torch_dtype
            )
            if not error <= allowed:
                what = f"{provider.name} {name} (mask {_MASKS[shape.causal]})"
                wrong.append(f"{what}: error {error:.1e}, allowed {allowed:.1e}")
    return wrong


class Bench:
    """One run of the command: what was asked, measured and skipped."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
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
        timed = [(d, c, n) for d in a.direction for c in self.masks for n in a.seq_len]
        peaks = [(n, p) for n in a.seq_len for p in self.providers]
        with Progress(len(timed) + len(peaks), "bench") as progress:
            for direction, causal, seqlen in timed:
                self._time(direction, self.shape(seqlen, causal))
                progress.advance(f"{direction} {_MASKS[causal]} {seqlen}")
            for seqlen, provider in peaks:
                shape = self.shape(seqlen, self.masks[0])
                if self._fits(FORWARD_BACKWARD, shape, provider):
                    peak = memory.peak_extra(provider.name, shape)
                    self.rows.append(
                        results.row(FORWARD_BACKWARD, provider, shape, memory.method(), peak=peak)
                    )
                progress.advance(f"memory {provider.name} {seqlen}")

    def _time(self, direction: str, shape: Shape) -> None:
        able = [p for p in self.providers if self._fits(direction, shape, p)]
        calls = {p.name: timing.prepare(p, shape, direction) for p in able}
        for name, seconds in timing.interleaved(calls, self.arguments.seconds).items():
            self.rows.append(
                results.row(direction, PROVIDERS[name], shape, timing.PROTOCOL, seconds=seconds)
            )

    def time_table(self) -> str:
        """ms, GFLOP/s and speed as a multiple of SDPA's, by direction, mask and length."""
        found = {(r.suite, r.causal, r.seqlen_q, r.provider): r for r in self.rows}
        lines = []
        for direction in self.arguments.direction:
            for causal in self.masks:
                for seqlen in self.arguments.seq_len:
                    rival = found.get((direction, causal, seqlen, SDPA))
                    for provider in self.providers:
                        key = (direction, causal, seqlen, provider.name)
                        head = [direction, _MASKS[causal], str(seqlen), provider.name]
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


def run(arguments: argparse.Namespace) -> int:
    """Gate, measurement, tables, files; 1 when the gate is red."""
    bench = Bench(arguments)
    if wrong := bench.wrong():
        print("no speed is reported of what is wrong:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    bench.measure()
    board = results.board()
    print(f"{board['cpu']}, {board['threads']} threads, torch {board['torch']}")
    a = arguments
    print(f"batch {a.batch}, {a.n_heads} heads of {a.d_head}, {a.dtype}\n{NOTE}\n")
    print(bench.time_table())
    mask = _MASKS[bench.masks[0]]
    how = {
        memory.VM_HWM: "VmHWM, to the page",
        memory.RU_MAXRSS: "ru_maxrss, a lower bound: this system cannot set the mark back",
    }[memory.method()]
    print(f"\nPeak memory of forward + backward beyond the inputs, mask {mask}, each in a fresh")
    print(f"process ({how}):\n")
    print(bench.memory_table())
    if arguments.json:
        results.write(arguments.json, bench.rows)
        print(f"\nwrote {arguments.json}")
    if arguments.plot and plots.available():
        plots.benchmark(bench.rows, board, arguments.plot)
        print(f"wrote {arguments.plot}")
    elif arguments.plot:
        print(plots.HOW_TO_GET)
    return 0
