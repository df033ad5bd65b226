"""Calls of random sizes and features on this machine's GPU, against the float64 oracle.

    python tools/random_calls.py --seconds 240 --processes 14

Each process draws a kind of call (features, widths, dtype), then several sizes of it, forward and
backward. A call that does not return is reported by its arguments, and a result whose error is more
than twice what the tests' rule allows: small results may exceed the rule itself by chance, a fault
of a kernel exceeds it by far. The status is 0 when all calls returned and agreed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

FEATURES = (
    "causal", "window", "softcap", "alibi", "sink", "dropout", "gqa", "head_dim_v", "varlen",
    "seqused", "deterministic",
)  # fmt: skip
SIZES_OF_A_KIND = 12
LONGEST = 3000
SLACK = 2.0  # times what the rule allows


class Watch:
    """Ends the process when a call takes longer than ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit, self.name, self.since = limit, "", time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def call(self, name: str) -> None:
        """A call of this name begins."""
        self.name, self.since = name, time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            if time.monotonic() - self.since > self.limit:
                print(f"DID NOT RETURN: {self.name}", flush=True)
                os._exit(3)


def length(draw: random.Random) -> int:
    """Short ones as often as long ones."""
    return int(LONGEST ** draw.random())


def work(arguments: argparse.Namespace) -> int:
    """Draws and checks until the time is over."""
    import torch

    from tilewise import testing
    from tilewise.errors import UnsupportedError
    from tilewise.testing import Case, make_inputs

    draw = random.Random(arguments.seed)
    watch = Watch(arguments.limit)
    stop = time.monotonic() + arguments.seconds
    calls = wrong = 0
    while time.monotonic() < stop:
        features = tuple(name for name in FEATURES if draw.random() < 0.25)
        d = 8 * draw.randint(1, 31)
        dtype = draw.choice((torch.float16, torch.bfloat16))
        for _ in range(SIZES_OF_A_KIND):
            if time.monotonic() >= stop:
                break
            case = Case(
                features, draw.randint(1, 3), length(draw), length(draw), 2 * draw.randint(1, 3), d,
                draw.randint(0, 10**6),
            )  # fmt: skip
            name = f"{case} {dtype}"
            watch.call(name)
            inputs: dict[str, Any] = make_inputs(case, dtype, "cuda")
            try:
                with testing.poisoned_memory():
                    got = testing.run(**inputs, backend=arguments.backend)
            except UnsupportedError:
                break
            ref, plain = testing.oracle(**inputs), testing.plain(**inputs)
            calls += 1
            for result, x in got.items():
                twins = getattr(ref, result), getattr(plain, result)
                error, allowed = testing.excess(result, x, *twins, dtype)
                if not error <= SLACK * allowed:
                    wrong += 1
                    print(f"WRONG by {error:.1e} ({allowed:.1e}): {result} of {name}", flush=True)
    print(f"seed {arguments.seed}: {calls} calls, {wrong} wrong results", flush=True)
    return 1 if wrong or not calls else 0


def main() -> int:
    """Runs the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first process")
    parser.add_argument("--backend", default="gluon", help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of a call; %(default)s")
    given = parser.parse_args()
    if given.processes == 1:
        return work(given)
    same = [f"--{n}={getattr(given, n)}" for n in ("seconds", "backend", "limit")]
    own = [sys.executable, str(Path(__file__).resolve()), *same]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*own, f"--seed={given.seed + i}"], env=environment)
        for i in range(given.processes)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
