"""Runs the tests for a GPU on this machine's in parallel processes, and sums them up.

    python tools/gpu_tests.py --out out/gpu --shards 14

Most of the time goes into compiling kernels, which a process does one by one; all share Triton's
cache. Tests marked ``alone`` follow one after another. Writes ``summary.json``, ``junit.xml`` and,
for what failed, ``failures.txt`` into the folder; prints the short messages of failures and, last,
the sum.
The status is 0 when every test had its turn, some passed and none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PATHS = ["tests/device", "tests/examples", "tests/cli/test_on_gpu.py"]
Outcome = dict[str, Any]


class Shard:
    """One process after another, until every test of the shard has an outcome."""

    def __init__(self, folder: Path, name: str, shard: str, pytest_args: list[str]) -> None:
        self.results = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        self.command = [
            sys.executable, "-m", "pytest", "-p", "shards", "--shard", shard,
            "--results", str(self.results), "-q", "-p", "no:cacheprovider", *pytest_args,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self.problem = ""
        self.start()

    def start(self) -> None:
        paths = [str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        }
        self.started = time.time()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def lines(self) -> list[Outcome]:
        if not self.results.exists():
            return []
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def outcomes(self) -> list[Outcome]:
        return [line for line in self.lines() if line["event"] == "end"]

    def running(self) -> str | None:
        """The test that has begun and not ended."""
        lines = self.lines()
        return lines[-1]["test"] if lines and lines[-1]["event"] == "start" else None

    def fail(self, test: str, message: str) -> None:
        line = {"event": "end", "test": test, "outcome": "failed", "seconds": 0.0}
        with self.results.open("a") as out:
            out.write(json.dumps({**line, "message": message, "text": message}) + "\n")

    def poll(self, per_test: float) -> bool:
        """Whether the shard is done; starts it again when a test took its process along."""
        assert self.process is not None
        if self.status is not None:
            return True
        status = self.process.poll()
        if status is None:
            lines = self.lines()
            last = lines[-1] if lines else {"event": "end"}
            if last["event"] == "start" and time.time() - last["time"] > per_test:
                self.process.kill()
                self.process.wait()
                self.fail(last["test"], f"did not end within {per_test:.0f} s")
                self.start()
            return False
        if status in (0, 1, 5):  # 5: no test in this shard
            self.status = status
            return True
        test = self.running()
        if test is not None:
            self.fail(test, f"the process died with status {status}")
        elif not any(line["event"] == "end" for line in self.lines()) or (
            time.time() - self.started < 5
        ):
            self.status = status
            self.problem = self.log.read_text(errors="replace")[-4000:]
            return True
        self.start()
        return False

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            self.problem = f"stopped while in {self.running()}"


def board() -> dict[str, Any]:
    """What the tests ran on."""
    import torch
    import triton

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(
                ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": os.environ.get("TILEWISE_COMMIT") or git("rev-parse", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain")) if git("rev-parse", "HEAD") else None,
    }


def junit(outcomes: list[Outcome], path: Path) -> None:
    counts = Counter(o["outcome"] for o in outcomes)
    suite = ElementTree.Element(
        "testsuite",
        name="gpu",
        tests=str(len(outcomes)),
        failures=str(counts["failed"]),
        skipped=str(counts["skipped"]),
        errors="0",
    )
    for o in outcomes:
        file, _, name = o["test"].partition("::")
        case = ElementTree.SubElement(
            suite, "testcase", classname=file, name=name, time=f"{o['seconds']:.3f}"
        )
        if o["outcome"] == "failed":
            ElementTree.SubElement(case, "failure", message=o["message"][:500]).text = _plain(
                o["text"]
            )
        elif o["outcome"] == "skipped":
            ElementTree.SubElement(case, "skipped", message=o["message"])
    ElementTree.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)


def _plain(text: str) -> str:
    """Without the control characters that XML has no form for."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def run_phase(
    folder: Path, name: str, shards: int, pytest_args: list[str], deadline: float, per_test: float
) -> list[Shard]:
    running = [Shard(folder, f"{name}-{i}", f"{i}/{shards}", pytest_args) for i in range(shards)]
    shown = time.time()
    while sum(not s.poll(per_test) for s in running):
        if time.time() > deadline:
            for s in running:
                s.stop()
            break
        if time.time() - shown > 30:
            shown = time.time()
            done = sum(len(s.outcomes()) for s in running)
            print(f"[{name}] {done} tests done", flush=True)
        time.sleep(0.2)
    return running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--shards", type=int, default=max(1, (os.cpu_count() or 4) - 2))
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--per-test", type=float, default=240.0, help="seconds for one test")
    parser.add_argument("--cache", type=Path, help="Triton's cache folder, instead of its default")
    parser.add_argument("-k", default=None, help="as pytest's -k")
    parser.add_argument("--skip-alone", action="store_true", help="leave out tests marked alone")
    parser.add_argument("--markers", default="gpu", help="as pytest's -m")
    parser.add_argument("paths", nargs="*", default=PATHS)
    given = parser.parse_args()
    if given.cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(given.cache.resolve())
    given.out.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    deadline = begun + given.limit
    selected = [*given.paths, *(["-k", given.k] if given.k else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        together = [*selected, "-m", f"({given.markers}) and not alone"]
        phases = run_phase(folder, "together", given.shards, together, deadline, given.per_test)
        if not given.skip_alone:
            alone = [*selected, "-m", f"({given.markers}) and alone"]
            phases += run_phase(folder, "alone", 1, alone, deadline, given.per_test)
        outcomes = [o for s in phases for o in s.outcomes()]
        problems = [f"{s.log.stem}: {s.problem}" for s in phases if s.problem]
    return report(given.out, given.shards, outcomes, problems, time.time() - begun)


def report(
    out: Path, shards: int, outcomes: list[Outcome], problems: list[str], seconds: float
) -> int:
    counts = Counter(o["outcome"] for o in outcomes)
    failed = [o for o in outcomes if o["outcome"] == "failed"]
    slowest = sorted(outcomes, key=lambda o: -o["seconds"])[:15]
    summary = {
        "board": board(),
        "shards": shards,
        "seconds": round(seconds, 1),
        "counts": dict(counts),
        "complete": not problems,
        "problems": problems,
        "skipped": dict(Counter(o["message"] for o in outcomes if o["outcome"] == "skipped")),
        "failures": [{"test": o["test"], "message": o["message"]} for o in failed],
        "slowest": [{"test": o["test"], "seconds": round(o["seconds"], 2)} for o in slowest],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    junit(outcomes, out / "junit.xml")
    texts = [f"{'=' * 100}\n{o['test']}\n{o['text']}\n" for o in failed]
    (out / "failures.txt").write_text("".join(texts))
    for o in failed:
        lines = o["message"].strip().splitlines() or [""]
        print(f"FAILED {o['test']}\n    {' | '.join(lines[:3])[:300]}")
    for problem in problems:
        print(f"NOT FINISHED {problem}")
    for reason, n in summary["skipped"].items():
        print(f"skipped {n}: {reason}")
    for o in summary["slowest"][:5]:
        print(f"slow {o['seconds']:7.1f} s  {o['test']}")
    b = summary["board"]
    print(f"{b['gpu']}, torch {b['torch']}, triton {b['triton']}, commit {b['commit']}")
    print(f"{dict(counts)} in {seconds:.0f} s with {shards} shards" + (
        "" if not problems else ", NOT ALL FINISHED"))  # fmt: skip
    return 1 if failed or problems or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
