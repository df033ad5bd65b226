"""``tilewise bench``: time and peak memory against other implementations of attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..bench.cells import GENERATIONS_SUITE, HEAD_DIMS, HIDDEN, MIXED, Asked
from ..bench.gpt import GPT2
from ..bench.pretraining import OTHERS, RUNS, runs_on
from ..bench.pretraining import SUITE as TRAIN_SUITE
from ..bench.providers import BACKWARD, DIRECTIONS, FORWARD, INPUTS
from ..bench.results import COMMIT_VARIABLE
from ..bench.rivals import CPU, CUDA, GENERATIONS, NAMES, providers_on
from ..bench.timing import GPU_PROTOCOLS
from . import bench_cells, bench_cpu, bench_train
from .kinds import duration, lengths, output_file, positive

SUITES = (*DIRECTIONS, GENERATIONS_SUITE, TRAIN_SUITE)
_CPU_LENGTHS = [512, 1024, 2048, 4096]
_EPILOG = f"""suites:
  fwd, bwd, fwd_bwd  every provider over the sequence length: on a GPU the papers' shapes (16k
                     tokens, hidden size 2048), on a CPU one batch of 8 heads of 64
  {GENERATIONS_SUITE}        standard attention and each paper's algorithm, with and without causal
                     mask and dropout, time and peak memory
  {TRAIN_SUITE}              a GPT by each attention, a step of each in turn: on a GPU a GPT-2
                     in bfloat16, on a CPU a tiny one

environment:
  {COMMIT_VARIABLE}    the commit that result files name before what git says

Results are written after each cell, whole or not at all, so a run that is killed leaves them."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    own = commands.add_parser(
        "bench",
        help="time and memory against other attention",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument(
        "--suite", type=_names(SUITES), metavar="NAME,...", help="see below; default: fwd,bwd"
    )
    own.add_argument(
        "--device", choices=(CPU, CUDA), help="default: cuda where there is one, else cpu"
    )
    _add_shapes(own)
    own.add_argument(
        "--only",
        type=_names(tuple(dict.fromkeys((*NAMES, *RUNS)))),
        metavar="NAME,...",
        help=f"of {', '.join(NAMES)}, as far as they are on the device; all by default. For"
        f" {TRAIN_SUITE}: of {', '.join(RUNS)} (standard is eager); and of {', '.join(OTHERS)},"
        " as far as they are there and have a backward, by default on a GPU alone",
    )
    own.add_argument(
        "--direction",
        type=_names(DIRECTIONS),
        metavar="D,D",
        help=f"of {', '.join(DIRECTIONS)}: those of {GENERATIONS_SUITE} (all by default), or of no"
        f" suite ({FORWARD} and {BACKWARD} by default)",
    )
    own.add_argument(
        "--protocol",
        type=_names(GPU_PROTOCOLS),
        metavar="P,P",
        help=f"on a GPU: of {', '.join(GPU_PROTOCOLS)}; both by default, {GPU_PROTOCOLS[1]} alone"
        f" for {GENERATIONS_SUITE}",
    )
    own.add_argument(
        "--seconds",
        type=duration,
        help="about how long to time a call, on a GPU to load it by each provider; default: 0.5,"
        " on a GPU 0.3",
    )
    own.add_argument(
        "--time-limit", type=duration, metavar="S", help="start nothing new after so many seconds"
    )
    own.add_argument(
        "--model",
        choices=tuple(GPT2),
        help=f"of {TRAIN_SUITE} on a GPU; default: {next(iter(GPT2))}",
    )
    own.add_argument("--steps", type=positive, help=f"of {TRAIN_SUITE}; default: 300, 30 on a CPU")
    own.add_argument("--seed", type=int, default=0, help=f"of {TRAIN_SUITE}; default: %(default)s")
    own.add_argument("--json", type=output_file, help="result file to write")
    own.add_argument("--csv", type=output_file, help="the rows as CSV")
    own.add_argument("--plot", type=output_file, help="PNG to write")
    own.set_defaults(run=partial(run, own))


def _add_shapes(own: argparse.ArgumentParser) -> None:
    own.add_argument(
        "--batch",
        type=positive,
        help=f"default: 1, of {TRAIN_SUITE} 4; on a GPU what makes 16k tokens, of"
        f" {GENERATIONS_SUITE} 64k, of {TRAIN_SUITE} 32k",
    )
    own.add_argument("--n-heads", type=positive, help="default: 8; on a GPU 2048 / d-head")
    own.add_argument("--n-heads-kv", type=positive, help="default: n-heads; on a GPU")
    own.add_argument(
        "--inputs",
        type=_names(INPUTS),
        metavar="NAME,...",
        help=f"on a GPU: of {', '.join(INPUTS)}; default: {INPUTS[0]}. Keys that grow or shrink"
        " along the sequence, a long first key, logits of hundreds",
    )
    own.add_argument(
        "--packed",
        action="store_true",
        help=f"on a GPU: one packed batch with sequences of {', '.join(map(str, MIXED))}",
    )
    own.add_argument(
        "--seq-len",
        type=lengths,
        metavar="N,N,...",
        help=f"default: 512,1024,2048,4096; on a GPU 1024 to 16384. One of {TRAIN_SUITE}, default:"
        " 64, on a GPU 1024",
    )
    own.add_argument(
        "--d-head",
        type=lengths,
        metavar="D,D",
        help="default: 64; on a GPU 64,128,256. One on a CPU",
    )
    own.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=None, help="both by default"
    )
    own.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32, on a GPU bfloat16",
    )
    own.add_argument(
        "--dropout",
        type=probability,
        metavar="P",
        help=f"probability; default: 0.1 in half of the panels of {GENERATIONS_SUITE}, else 0",
    )


def probability(text: str) -> float:
    """A probability of dropout that ``flash_attn_func`` takes."""
    number = float(text)
    if not 0 <= number < 1 - 2**-17:
        raise argparse.ArgumentTypeError(f"{text}: must be in [0, 1 - 2^-17)")
    return number


def _names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: must be of {', '.join(allowed)}"
            )
        return [name for name in allowed if name in chosen]

    return parse


def _only(
    own: argparse.ArgumentParser, chosen: list[str] | None, there: Sequence[str]
) -> list[str]:
    """The names asked for, which must be ``there``; all of them when none was asked for."""
    if chosen is None:
        return list(there)
    if unknown := [name for name in chosen if name not in there]:
        own.error(f"argument --only: {', '.join(unknown)}: must be of {', '.join(there)} here")
    return [name for name in there if name in chosen]


def _check_kinds(own: argparse.ArgumentParser, a: argparse.Namespace, suite: str) -> None:
    """Refuses what only the papers' shapes on a GPU have, where ``suite`` is something else."""
    for name in ("n_heads_kv", "inputs", "packed"):
        if suite and getattr(a, name):
            flag = "--" + name.replace("_", "-")
            own.error(f"argument {flag}: for {', '.join(DIRECTIONS)} on a GPU, not {suite}")
    if a.packed and (a.seq_len or a.batch):
        own.error("argument --packed: it says the lengths")
    if a.n_heads_kv:
        for d in a.d_head or HEAD_DIMS:
            nheads = a.n_heads or HIDDEN // d
            if nheads % a.n_heads_kv:
                own.error(f"argument --n-heads-kv: {nheads} heads are no multiple of it")


def _suite(own: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """(generations, train or "", the directions to measure)."""
    suites, directions = arguments.suite or [], arguments.direction
    alone = [name for name in suites if name not in DIRECTIONS]
    if alone and len(suites) > 1:
        own.error(f"argument --suite: {alone[0]} runs alone")
    if alone:
        return alone[0], directions or list(DIRECTIONS)
    if suites and directions:
        own.error("argument --direction: the suites name the directions already")
    return "", suites or directions or [FORWARD, BACKWARD]


def run(own: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Chooses the suite and the device."""
    a = arguments
    suite, directions = _suite(own, a)
    if a.device == CUDA and not torch.cuda.is_available():
        own.error("argument --device: torch sees no GPU")
    a.device = a.device or (CUDA if torch.cuda.is_available() else CPU)
    if a.model and (suite != TRAIN_SUITE or a.device == CPU):
        here = ", not on this CPU" if suite == TRAIN_SUITE else ""
        own.error(f"argument --model: for --suite {TRAIN_SUITE} on a GPU{here}")
    if suite == TRAIN_SUITE:
        _check_kinds(own, a, suite)
        for name in ("n_heads", "d_head", "causal", "direction", "protocol", "seconds"):
            if getattr(a, name) is not None:
                own.error(f"argument --{name.replace('_', '-')}: not for {suite}")
        if a.seq_len is not None and len(a.seq_len) != 1:
            own.error("argument --seq-len: train takes one")
        few = a.device == CPU and a.only is None
        a.only = _only(own, a.only, tuple(RUNS) if few else runs_on(a.device))
        return bench_train.run(a)
    there = tuple(providers_on(a.device))
    if a.device == CPU and a.protocol is not None:
        own.error("argument --protocol: for a GPU; on a CPU there is one")
    if a.device == CUDA or suite:
        asked = Asked(
            a.device, a.batch, a.n_heads, a.seq_len, a.d_head, a.causal, a.dtype, a.dropout,
            a.n_heads_kv, a.inputs or INPUTS[:1], a.packed,
        )  # fmt: skip
        _check_kinds(own, a, suite)
        chosen = GENERATIONS[a.device] if suite and a.only is None else there
        a.only = _only(own, a.only, chosen)
        return bench_cells.run(a, asked, suite, directions)
    if a.d_head is not None and len(a.d_head) != 1:
        own.error("argument --d-head: one on a CPU")
    if a.dropout:
        own.error(f"argument --dropout: on a CPU for --suite {GENERATIONS_SUITE} or {TRAIN_SUITE}")
    _check_kinds(own, a, "on a CPU")
    a.only = _only(own, a.only, there)
    a.batch, a.n_heads, a.seq_len = a.batch or 1, a.n_heads or 8, a.seq_len or _CPU_LENGTHS
    a.d_head = a.d_head[0] if a.d_head else 64
    a.dtype, a.seconds = a.dtype or "float32", a.seconds or 0.5
    return bench_cpu.run(a, directions)
