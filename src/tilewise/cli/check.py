"""``tilewise check``: the errors of every backend on this machine, against the float64 oracle."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..bench.console import Progress, table
from ..bench.results import board
from ..bench.rivals import CPU, CUDA
from ..dispatch import BACKENDS
from ..errors import UnsupportedError
from ..testing import CASES, Case, Results, excess, make_inputs, oracle, plain, run

NAMES = (
    "plain",
    "causal",
    "window",
    "softcap",
    "alibi",
    "attn_bias",
    "bool_mask",
    "sink",
    "dropout",
    "gqa",
    "varlen",
)
DTYPES = ("float16", "bfloat16", "float32", "float64")
LONG = Case(("causal",), batch=1, seqlen_q=301, seqlen_k=307, nheads=2, head_dim=64)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One result of one call: its error, plain torch's own, and what the rule allows."""

    backend: str
    algorithm: str
    dtype: str
    case: str
    result: str
    error: float
    plain_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the rule holds."""
        return self.error <= self.allowed

    @property
    def used(self) -> float:
        """Share of what is allowed; exact where nothing is."""
        return self.error / self.allowed if self.allowed else (0.0 if self.ok else float("inf"))


def cases() -> dict[str, Case]:
    """Each feature alone, and one longer call of several tiles."""
    by_id = {case.id: case for case in CASES}
    return {**{name: by_id[name] for name in NAMES}, f"causal x {LONG.seqlen_q}": LONG}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    own = commands.add_parser("check", help="errors of every backend against the float64 oracle")
    own.add_argument(
        "--device",
        choices=(CPU, CUDA),
        help="default: cuda where there is one, else cpu",
    )
    own.add_argument("--dtype", type=_dtypes, default=DTYPES, help=f"of {','.join(DTYPES)}")
    own.add_argument(
        "--json", action="store_true", help="print JSON, one entry per call and result"
    )
    own.set_defaults(run=partial(command, own))


def _dtypes(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [name for name in chosen if name not in DTYPES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(DTYPES)}")
    return chosen


def verdicts(
    dtypes: Sequence[str],
    tick: Callable[[str], None] = lambda text: None,
    device: str = CPU,
) -> tuple[list[Verdict], list[str]]:
    """Every result of every call, and the calls that a backend refuses, with its reasons.

    Oracle and plain torch are computed on the device too; results are compared on the CPU.
    """
    found, refused = [], []
    for dtype in dtypes:
        torch_dtype = getattr(torch, dtype)
        for case_name, case in cases().items():
            inputs = make_inputs(case, torch_dtype, device)
            ref, twin = _on_cpu(oracle(**inputs)), _on_cpu(plain(**inputs))
            for backend, algorithm in _ways():
                tick(f"{dtype} {case_name} {backend}/{algorithm}")
                try:
                    got = run(**inputs, backend=backend, algorithm=algorithm)
                except UnsupportedError as refusal:
                    refused.append(f"{dtype} {case_name}: {refusal}")
                    continue
                for name, x in _on_cpu(got).items():
                    expected, plain_x = ref[name], twin[name]
                    error, allowed = excess(name, x, expected, plain_x, torch_dtype)
                    plain_error, _ = excess(name, plain_x, expected, plain_x, torch_dtype)
                    found.append(
                        Verdict(
                            backend, algorithm, dtype, case_name, name, error, plain_error, allowed
                        )
                    )
    return found, refused


def _on_cpu(results: Results) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in results.items()}


def _ways() -> list[tuple[str, str]]:
    return [(name, a) for name, backend in BACKENDS.items() for a in backend.algorithms]


def ways_taken(found: Sequence[Verdict]) -> list[tuple[str, str]]:
    """The ways that took at least one call."""
    return [way for way in _ways() if any((v.backend, v.algorithm) == way for v in found)]


def table_lines(found: Sequence[Verdict]) -> list[list[str]]:
    """A line for each dtype and result, each number the largest over the cases."""
    lines = []
    for dtype, result in dict.fromkeys((v.dtype, v.result) for v in found):
        here = [v for v in found if (v.dtype, v.result) == (dtype, result)]
        cells = [dtype, result, f"{max(v.plain_error for v in here):.1e}"]
        for way in ways_taken(found):
            errors = [v.error for v in here if (v.backend, v.algorithm) == way]
            cells.append(f"{max(errors):.1e}" if errors else "-")
        tightest = max(here, key=lambda v: v.used)
        cells += [
            f"{max(v.allowed for v in here):.1e}",
            f"{tightest.used:.0%} {tightest.backend}/{tightest.algorithm}, {tightest.case}",
            "ok" if all(v.ok for v in here) else "FAIL",
        ]
        lines.append(cells)
    return lines


def _grouped(refused: Sequence[str]) -> list[str]:
    """A line for each reason, with the first call that it holds for."""
    places: dict[str, list[str]] = {}
    for line in refused:
        place, reason = line.split(": ", 1)
        if place not in places.setdefault(reason, []):
            places[reason].append(place)
    return [
        f"{where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {reason}"
        for reason, where in places.items()
    ]


def _row(v: Verdict) -> dict[str, Any]:
    """The verdict for JSON, which has no infinity: an error that is not finite is null."""
    return {**asdict(v), "error": v.error if math.isfinite(v.error) else None, "ok": v.ok}


def command(own: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Measures, prints, and returns 1 when a result breaks the rule."""
    there = torch.cuda.is_available()
    if arguments.device == CUDA and not there:
        own.error("argument --device: torch sees no GPU")
    device = arguments.device or (CUDA if there else CPU)
    total = len(arguments.dtype) * len(cases()) * len(_ways())
    with Progress(total, "check") as progress:
        found, refused = verdicts(arguments.dtype, progress.advance, device)
    failed = [v for v in found if not v.ok]
    if arguments.json:
        content = {"board": board(device), "ok": not failed, "rows": [_row(v) for v in found]}
        print(json.dumps({**content, "refused": refused}, indent=1, allow_nan=False))
        return 1 if failed else 0
    ways = [f"{backend}/{algorithm}" for backend, algorithm in ways_taken(found)]
    header = ["dtype", "result", "plain torch", *ways, "allowed", "closest to it", ""]
    print(f"{device}: largest error against the float64 oracle, over", ", ".join(cases()))
    print(table(header, table_lines(found), left=2))
    for line in _grouped(refused):
        print("refused:", line)
    for v in failed:
        way = f"{v.backend}/{v.algorithm}"
        print(f"FAIL {way} {v.dtype} {v.case} {v.result}: {v.error:.3e} > {v.allowed:.3e}")
    print(f"{len(found)} results, {len(failed)} outside the rule")
    return 1 if failed else 0
