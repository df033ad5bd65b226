"""Runs small calls of every kernel under compute-sanitizer: memcheck, then racecheck.

    python tools/sanitize.py [--tool memcheck] [--tool racecheck]

Each kernel runs with rows loaded through pointers and through tensor descriptors. The status is 0
when no tool reports anything. Needs a GPU and compute-sanitizer, in PATH or below /usr/local/cuda*.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
FOUND = 99


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


def calls() -> None:
    """Forward and backward of each kernel, in both ways of loading: what the tools watch."""
    import torch

    from tilewise import testing
    from tilewise.testing import Case, make_inputs
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
    for tma in (False, True):

        def config(*arguments: object, tma: bool = tma) -> object:
            return replace(found(*arguments), use_tma=tma)  # type: ignore[arg-type]

        lookup.config, lookup.epoch = config, object()  # type: ignore[assignment]
        for algorithm in ("fa2", "fa1"):
            for case in cases:
                for dtype in (torch.bfloat16, torch.float32):
                    inputs = make_inputs(case, dtype, "cuda")
                    testing.run(**inputs, backend="triton", algorithm=algorithm)
                    torch.cuda.synchronize()
                    print(f"tma={tma} {algorithm} {case.id} {dtype}", flush=True)
    for bounds in ([0, 10**6, 60], [-5, 70, 10**6], [50, 20, 2**31 - 1]):
        x = torch.randn(64, 2, 64, dtype=torch.bfloat16, device="cuda")
        cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 64, "max_seqlen_k": 64}
        testing.run(x, x, x, **packing, backend="triton")
        torch.cuda.synchronize()
        print(f"boundaries {bounds}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    parser.add_argument("--calls", action="store_true", help="make the calls, without a tool")
    given = parser.parse_args()
    if given.calls:
        calls()
        return 0
    program = sanitizer()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        # each tensor an allocation of its own, so that memcheck sees where one ends
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    own = [sys.executable, str(Path(__file__).resolve()), "--calls"]
    print("compiling, without a tool", flush=True)
    subprocess.run(own, check=True, env=environment, stdout=subprocess.DEVNULL)
    worst = 0
    for tool in given.tool or TOOLS:
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        status = subprocess.run([program, *options, *own], env=environment).returncode
        verdict = {0: "nothing found", FOUND: "FOUND ERRORS"}.get(status, f"failed: {status}")
        print(f"{tool}: {verdict}", flush=True)
        worst = max(worst, abs(status))
    return worst


if __name__ == "__main__":
    sys.exit(main())
