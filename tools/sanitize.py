"""Runs small calls of every kernel under compute-sanitizer: memcheck, then racecheck.

    python tools/sanitize.py [--tool memcheck] [--tool racecheck] [--group fa3]

Triton's kernels run with rows loaded through pointers and through tensor descriptors, the Hopper
kernels' backward in one pass and in two; each group in a process of its own. The status is 0 when
no tool reports anything but what ``races.py`` explains. Needs a Hopper GPU, and compute-sanitizer
in PATH or below /usr/local/cuda*.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from races import unexplained

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
FOUND = 99
LIMIT = 10_000  # of reports, so that none is left out
DONE = "all calls were made"


def sanitizer() -> str:
    """The program, or an end that names it."""
    candidates = [shutil.which("compute-sanitizer")]
    for folder in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        for place in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            candidates.append(shutil.which(str(folder / place)))
    for path in candidates:
        if path is not None:
            return path
    sys.exit("compute-sanitizer: not in PATH and not below /usr/local/cuda*")


def triton_calls(algorithm: str, tma: bool) -> None:
    """Forward and backward of each of Triton's kernels."""
    import torch

    from tilewise.testing import Case
    from tilewise.tuning import lookup

    cases = [
        Case(("causal", "gqa"), seqlen_q=140, seqlen_k=200, head_dim=64),
        Case(("causal", "varlen", "gqa", "dropout"), seqlen_q=140, seqlen_k=200, head_dim=64),
        Case(("window", "seqused", "sink"), seqlen_q=140, seqlen_k=200, head_dim=64),
        Case(("attn_bias", "softcap"), seqlen_q=70, seqlen_k=133, head_dim=64),
        Case(("attn_bias", "varlen", "alibi"), seqlen_q=70, seqlen_k=133, head_dim=40),
        Case(("bool_mask", "head_dim_v"), seqlen_q=70, seqlen_k=133, head_dim=33),
        Case(("causal",), seqlen_q=129, seqlen_k=129, nheads=1, batch=1, head_dim=128),
    ]
    found = lookup.config

    def config(*arguments: object) -> object:
        return replace(found(*arguments), use_tma=tma)  # type: ignore[arg-type]

    lookup.config, lookup.epoch = config, object()  # type: ignore[assignment]
    run_all(cases, (torch.bfloat16, torch.float32), "triton", algorithm)


def gluon_calls(deterministic: bool) -> None:
    """Forward and backward of the Hopper kernels, in one pass or in two."""
    import torch

    from tilewise.testing import Case

    kinds = [
        (("causal", "gqa"), 64), (("causal", "varlen", "gqa", "dropout"), 128),
        (("window", "seqused", "sink"), 64), (("softcap",), 128), (("varlen", "alibi"), 40),
        (("head_dim_v", "causal"), 64), (("causal",), 256),
    ]  # fmt: skip
    more = ("deterministic",) if deterministic else ()
    cases = [Case((*f, *more), seqlen_q=200, seqlen_k=333, head_dim=d) for f, d in kinds]
    run_all(cases, (torch.bfloat16,), "gluon", "fa3")


def run_all(cases: list[Any], dtypes: tuple[Any, ...], backend: str, algorithm: str) -> None:
    """Forward and backward of each case."""
    import torch

    from tilewise import testing

    for case in cases:
        for dtype in dtypes:
            inputs = testing.make_inputs(case, dtype, "cuda")
            testing.run(**inputs, backend=backend, algorithm=algorithm)
            torch.cuda.synchronize()
            print(f"{algorithm} {case.id} {dtype}", flush=True)


def boundaries() -> None:
    """Values on a device that lead outside of the tensors."""
    import torch

    from tilewise import testing

    for bounds in ([0, 10**6, 60], [-5, 70, 10**6], [50, 20, 2**31 - 1]):
        x = torch.randn(64, 2, 64, dtype=torch.bfloat16, device="cuda")
        cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 64, "max_seqlen_k": 64}
        for backend in BACKENDS:
            testing.run(x, x, x, **packing, backend=backend)
        torch.cuda.synchronize()
        print(f"boundaries {bounds}", flush=True)


BACKENDS = ("triton", "gluon")
GROUPS: dict[str, Callable[[], None]] = {
    "fa2": partial(triton_calls, "fa2", False),
    "fa2-tma": partial(triton_calls, "fa2", True),
    "fa1": partial(triton_calls, "fa1", False),
    "fa1-tma": partial(triton_calls, "fa1", True),
    "fa3": partial(gluon_calls, False),
    "fa3-deterministic": partial(gluon_calls, True),
    "boundaries": boundaries,
}


def started(command: list[str]) -> subprocess.Popen[str]:
    """A process whose output is kept."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        # each tensor an allocation of its own, so that memcheck sees where one ends
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipe)  # type: ignore[call-overload,no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    parser.add_argument("--group", action="append", choices=tuple(GROUPS), help="default: all")
    parser.add_argument("--calls", action="store_true", help="make the calls, without a tool")
    given = parser.parse_args()
    groups = given.group or list(GROUPS)
    if given.calls:
        for name in groups:
            GROUPS[name]()
        print(DONE)
        return 0
    program = sanitizer()
    own = [sys.executable, str(Path(__file__).resolve()), "--calls", "--group"]
    print("compiling, without a tool", flush=True)
    worst = 0
    for tool in (None, *(given.tool or TOOLS)):
        options = ["--tool", str(tool), "--error-exitcode", str(FOUND), "--print-limit", str(LIMIT)]
        before = [] if tool is None else [program, *options]
        running = {name: started([*before, *own, name]) for name in groups}
        for name, process in running.items():
            output = process.communicate()[0]
            status = process.returncode
            verdict = {0: "nothing found", FOUND: "FOUND ERRORS"}.get(status, f"failed: {status}")
            if tool == "racecheck" and status in (0, FOUND):
                faults = unexplained(output) if DONE in output else [output or "no output"]
                status = FOUND if faults else 0
                count = output.count("Race reported")
                verdict = "FOUND ERRORS" if faults else f"{count} reports, all explained"
                output = "\n\n".join(faults)
            print(f"{tool or 'without a tool'}, {name}: {verdict}", flush=True)
            if status:
                print(output, flush=True)
            worst = max(worst, abs(status))
    return worst


if __name__ == "__main__":
    sys.exit(main())
