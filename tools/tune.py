"""Makes rows of tuning tables: compiles candidates in parallel, then times each on a GPU.

    PYTHONPATH=src python tools/tune.py --kernel fwd --head-dim 64,128 --mask full,causal --out DIR
    PYTHONPATH=src python tools/tune.py --estimate --arch sm_80 --kernel fwd,bwd_dq --out DIR
    PYTHONPATH=src python tools/tune.py --merge DIR/rows.toml --arch sm_90

The first measures. DIR/log.json holds every candidate with its compile time, registers, spills and
time; DIR/rows.toml the winners, with provenance; both are rewritten after each step, so that a run
that is cut short has lost nothing. The second needs no GPU: it takes the first configuration of
``lookup.preferences`` that compiles and spills no more than ``feasible.SPILL_BUDGET``. The third
puts rows into the package's table.

A candidate is timed in a process of its own kind, which is replaced when a kernel hangs or faults,
and only counts when its result agrees with the plainest configuration's. Speeds are of the kernel
alone, in bursts: an idle moment, one warm launch, ten timed ones, the median of some rounds.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tilewise.core.config import TileConfig
from tilewise.tuning import lookup
from tilewise.tuning.feasible import SPILL_BUDGET, accumulators, reasons_against
from tilewise.tuning.keys import DTYPES, HEAD_DIMS, KERNELS, MASKS, OPERANDS, RowKey, arch_of

ROOT = Path(__file__).resolve().parents[1]
# Products of a tile pair, each 2 BLOCK_M BLOCK_N head_dim operations.
PRODUCTS = {"fwd": 2, "fa1_fwd": 2, "bwd_dkdv": 4, "bwd_dq": 3, "bwd_dbias": 2, "fa1_bwd": 5}
PLAINEST = TileConfig(32, 32, 4, 1)
MOST_SPILLED = 256  # bytes of a thread; beyond, a candidate is not worth timing
BURST, ROUNDS, FINALISTS = 10, 3, 6


@dataclass
class Target:
    """One row to be made."""

    key: RowKey
    case: dict[str, Any]
    candidates: list[dict[str, Any]] = field(default_factory=list)


def grid(key: RowKey, arch: str, args: argparse.Namespace) -> Iterator[TileConfig]:
    """Feasible candidates, the likelier ones first."""
    device = arch_of(arch)
    owned = (128, 64) if key.head_dim <= 256 else (64, 32)
    looped = (128, 64, 32) if key.head_dim <= 256 else (64, 32, 16)
    if key.dtype == "float32":
        owned, looped = (64, 32, 128), (64, 32, 16)
    ways = []
    if device.tma and "tma" in args.ways:
        ways.append((True, False))
    if "pointers" in args.ways:
        ways.append((False, False))
    if device.warp_specialize and key.kernel == "fwd" and "ws" in args.ways:
        ways.append((True, True))
    found = []
    apart = (True, False) if key.kernel == "bwd_dkdv" and key.head_dim >= 256 else (False,)
    for a, b, warps, stages, (tma, ws), separate, cap in itertools.product(
        owned, looped, (8, 4), args.stages, ways, apart, args.maxnreg
    ):
        m, n = (b, a) if key.kernel in ("bwd_dkdv", "fa1_bwd") else (a, b)
        config = TileConfig(m, n, warps, stages, tma, ws, separate, cap)
        held = accumulators(config, key, device)
        if held >= args.least_registers and not reasons_against(config, key, arch):
            found.append(config)
    # more work for each byte loaded first, then less waiting
    found.sort(key=lambda c: (-c.BLOCK_M * c.BLOCK_N, abs(c.num_stages - 2)))
    yield from found[: args.most] if args.most else found


class Worker:
    """A child process that answers one JSON line with another, and is replaced when it does not."""

    def __init__(self, *command: str) -> None:
        self.command = [sys.executable, *command]
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str] = queue.Queue()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment.pop("TRITON_INTERPRET", None)
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.answers = answers = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()
        return process

    def ask(self, question: dict[str, Any], seconds: float) -> Any:
        """The answer, or a dict with "error" after ``seconds`` or when the process ends."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=seconds)
        except (queue.Empty, BrokenPipeError):
            self.stop()
            return {"error": f"no answer in {seconds:.0f} s"}
        if not answer:
            self.stop()
            return {"error": "the process ended"}
        return json.loads(answer)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def together(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of a candidate that launches its kernel more than once: the worst of each."""
    if not launches:
        return {"error": "nothing was launched"}
    failed = [x for x in launches if "error" in x]
    facts = dict(failed[0] if failed else launches[-1])
    if not failed:
        facts |= {k: max(x[k] for x in launches) for k in ("stack", "shared", "registers")}
        facts["seconds"] = round(sum(x["seconds"] for x in launches), 3)
    return facts


class Compilers:
    """Compiles candidates in ``jobs`` processes; ``results`` gives them as they come."""

    def __init__(self, jobs: int, timeout: float) -> None:
        self.work: queue.Queue[tuple[Target, dict[str, Any]] | None] = queue.Queue()
        self.done: queue.Queue[tuple[Target, dict[str, Any]]] = queue.Queue()
        self.timeout = timeout
        self.stopped = False
        self.workers = [Worker(str(ROOT / "tools" / "compiling.py")) for _ in range(jobs)]
        for worker in self.workers:
            threading.Thread(target=self._run, args=(worker,), daemon=True).start()

    def _run(self, worker: Worker) -> None:
        while (item := self.work.get()) is not None and not self.stopped:
            target, candidate = item
            answer = worker.ask(target.case | {"config": candidate["config"]}, self.timeout)
            if isinstance(answer, list):
                answer = together(answer)
            if answer.get("shared", 0) > arch_of(target.case["arch"]).shared_bytes:
                answer = {"error": f"{answer['shared']} bytes of shared memory"}
            candidate |= {k: v for k, v in answer.items() if k not in ("case", "name", "triton")}
            self.done.put((target, candidate))
        worker.stop()

    def stop(self) -> None:
        self.stopped = True
        for worker in self.workers:
            self.work.put(None)
            worker.stop()


def targets(args: argparse.Namespace, arch: str) -> list[Target]:
    """The rows asked for."""
    found = []
    for kernel, dtype, head_dim, mask, operands in itertools.product(
        args.kernel, args.dtype, args.head_dim, args.mask, args.operands
    ):
        features = []
        if kernel == "bwd_dbias":
            operands, features = "extra", ["attn_bias"]
        elif operands == "extra":
            features = [args.extra]
        case = {
            "kernel": kernel,
            "arch": arch,
            "dtype": "float32" if dtype == "float32" else args.half,
            "head_dim": head_dim,
            "mask": mask,
            "features": features,
            "batch": max(1, args.tokens // args.seqlen),
            "nheads": max(1, args.hidden // head_dim),
            "seqlen_q": args.seqlen,
        }
        found.append(Target(RowKey(kernel, dtype, head_dim, mask, operands), case))
    return list({target.key: target for target in found}.values())


class Output:
    """The files of a run."""

    def __init__(self, folder: Path, provenance: dict[str, Any]) -> None:
        self.folder, self.provenance = folder, provenance
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, all_targets: list[Target], estimate: bool) -> None:
        log = [{"row": asdict(t.key), "case": t.case, "tried": t.candidates} for t in all_targets]
        (self.folder / "log.json").write_text(
            json.dumps(self.provenance | {"targets": log}, indent=1)
        )
        made = []
        for target in all_targets:
            row = estimated(target) if estimate else measured(target, self.provenance)
            if row is not None:
                made.append(row)
        (self.folder / "rows.toml").write_text(toml_of(made))


def tflops(target: Target, ms: float) -> float:
    """Of the operations that a mask leaves."""
    from compiling import MASKS as SPECS

    c = target.case
    n, spec = c["seqlen_q"], SPECS[c["mask"]]
    seen = 0
    for row in range(n):
        start, stop = spec.keys_of(row, row + 1, n, n)
        seen += stop - start
    pairs = c["batch"] * c["nheads"] * seen
    return 2 * PRODUCTS[target.key.kernel] * pairs * c["head_dim"] / ms / 1e9


def short(config: dict[str, Any]) -> str:
    """A configuration in a word, for logs and runners-up."""
    c = TileConfig(**config)
    ways = ("-tma" if c.use_tma else "") + ("-ws" if c.warp_specialize else "")
    ways += "-apart" if c.separate else ""
    cap = f"-r{c.maxnreg}" if c.maxnreg else ""
    return f"{c.BLOCK_M}x{c.BLOCK_N}-w{c.num_warps}-s{c.num_stages}{ways}{cap}"


def measured(target: Target, provenance: dict[str, Any]) -> lookup.Row | None:
    timed = sorted((c for c in target.candidates if "ms" in c), key=lambda c: c["ms"])
    if not timed:
        return None
    best = timed[0]
    facts = {k: provenance[k] for k in ("gpu", "triton", "date", "commit")}
    facts["shape"] = "x".join(
        str(target.case[k]) for k in ("batch", "seqlen_q", "nheads", "head_dim")
    )
    facts["tflops"] = round(tflops(target, best["ms"]), 1)
    if len(timed) > 1:
        second = round(tflops(target, timed[1]["ms"]), 1)
        facts["runner_up"] = f"{short(timed[1]['config'])} {second}"
    return lookup.Row(target.key, TileConfig(**best["config"]), facts, _spilled(best))


def _spilled(tried: dict[str, Any]) -> int:
    return tried["stack"] if tried.get("stack", 0) > SPILL_BUDGET else 0


def estimated(target: Target) -> lookup.Row | None:
    compiled = [c for c in target.candidates if "stack" in c]
    if not compiled:
        return None
    best = min(compiled, key=lambda c: max(c["stack"], SPILL_BUDGET))  # the first of several
    what = "compiles without spills" if best["stack"] == 0 else f"spills {best['stack']} bytes"
    what = f"estimated: {what}"
    return lookup.Row(target.key, TileConfig(**best["config"]), what, _spilled(best))


def toml_of(rows: list[lookup.Row]) -> str:
    """Rows as a table's text, in the order of their keys."""

    def value(x: Any) -> str:
        if isinstance(x, dict):
            return "{ " + ", ".join(f"{k} = {value(v)}" for k, v in x.items()) + " }"
        return str(x).lower() if isinstance(x, bool) else json.dumps(x)

    def place(row: lookup.Row) -> tuple[int, ...]:
        k = row.key
        return (
            KERNELS.index(k.kernel),
            DTYPES.index(k.dtype),
            OPERANDS.index(k.operands),
            k.head_dim,
            MASKS.index(k.mask),
        )

    default = asdict(TileConfig(0, 0, 0, 0))
    lines = []
    for row in sorted(rows, key=place):
        config = {k: v for k, v in asdict(row.config).items() if k.isupper() or v != default[k]}
        lines.append("[[row]]")
        lines += [f"{k} = {value(v)}" for k, v in asdict(row.key).items()]
        lines += [f"config = {value(config)}", f"provenance = {value(row.provenance)}"]
        lines += [f"spilled = {row.spilled}"] if row.spilled else []
        lines.append("")
    return "\n".join(lines)


def tune(args: argparse.Namespace) -> None:
    """Compiles everything in parallel and times what is compiled, until done or out of time."""
    import triton

    deadline = time.monotonic() + args.time_limit
    arch, gpu = args.arch, "none"
    if not args.estimate:
        answer = Worker(__file__, "--worker").ask({"ask": "device"}, 120)
        if "error" in answer:
            raise SystemExit(f"no GPU to measure on: {answer['error']}; see --estimate")
        arch, gpu = answer["arch"], answer["gpu"]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    output = Output(
        Path(args.out),
        {"gpu": gpu, "arch": arch, "triton": triton.__version__, "date": today,
         "commit": args.commit or commit or "unknown"},
    )  # fmt: skip
    wanted = targets(args, arch)
    compilers = Compilers(args.jobs, args.compile_timeout)
    queues = [iter(_candidates(target, arch, args)) for target in wanted]
    total = _hand_out(wanted, queues, compilers, args.estimate)
    print(
        f"{gpu} {arch}: {len(wanted)} rows, {total} candidates, {args.jobs} compilers", flush=True
    )
    timer = Worker(__file__, "--worker")
    left = {id(target): len(target.candidates) for target in wanted}
    seconds: dict[str, list[float]] = {}
    last = time.monotonic()
    while any(left.values()):
        try:
            target, tried = compilers.done.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            print("out of time: not every candidate was compiled", flush=True)
            break
        left[id(target)] -= 1
        if "seconds" in tried:
            seconds.setdefault(target.key.kernel, []).append(tried["seconds"])
        spilled = tried.get("stack", MOST_SPILLED + 1)
        if args.estimate:
            if spilled > SPILL_BUDGET:
                index = wanted.index(target)
                if (config := next(queues[index], None)) is not None:
                    left[id(target)] += 1
                    _add(target, config, compilers)
        elif spilled <= MOST_SPILLED:
            tried |= timer.ask({"case": target.case, "config": tried["config"]}, args.timeout)
        _say(target, tried)
        if not args.estimate and left[id(target)] == 0:
            _finals(target, timer, args, deadline)
        if time.monotonic() - last > 5:
            output.write(wanted, args.estimate)
            last = time.monotonic()
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            break
    compilers.stop()
    if not args.estimate:
        for target in wanted:
            if left[id(target)]:
                _finals(target, timer, args, deadline + 30)
    timer.stop()
    output.write(wanted, args.estimate)
    for kernel, spent in seconds.items():
        print(
            f"cold compile of {kernel}: median {statistics.median(spent):.1f} s, "
            f"most {max(spent):.1f} s of {len(spent)}"
        )
    print((output.folder / "rows.toml").read_text())


def _candidates(target: Target, arch: str, args: argparse.Namespace) -> Iterator[TileConfig]:
    found = lookup.preferences(target.key, arch) if args.estimate else grid(target.key, arch, args)
    return (c for c in found if not args.only or short(asdict(c)) in args.only)


def _add(target: Target, config: TileConfig, compilers: Compilers) -> None:
    candidate: dict[str, Any] = {"config": asdict(config)}
    target.candidates.append(candidate)
    compilers.work.put((target, candidate))


def _hand_out(
    wanted: list[Target], queues: list[Iterator[TileConfig]], compilers: Compilers, one: bool
) -> int:
    """Queues all candidates, row by row; or the first of each row."""
    for target, configs in zip(wanted, queues, strict=True):
        for config in itertools.islice(configs, 1) if one else configs:
            _add(target, config, compilers)
    return sum(len(target.candidates) for target in wanted)


def _finals(target: Target, timer: Worker, args: argparse.Namespace, deadline: float) -> None:
    """Times the best once more, in turn; the least of a candidate's times stands."""
    timed = sorted((c for c in target.candidates if "ms" in c), key=lambda c: c["ms"])[:FINALISTS]
    for _ in range(2):
        for tried in timed:
            if time.monotonic() > deadline:
                break
            again = timer.ask({"case": target.case, "config": tried["config"]}, args.timeout)
            if "ms" in again:
                tried["all_ms"] = [*tried.get("all_ms", [tried["ms"]]), again["ms"]]
                tried["ms"] = statistics.median(tried["all_ms"])
    for tried in sorted(timed, key=lambda c: c["ms"])[:3]:
        _say(target, tried, "final ")


def _say(target: Target, tried: dict[str, Any], prefix: str = "") -> None:
    key = target.key
    text = f"{prefix}{key.kernel} {key.dtype} {key.head_dim} {key.mask} {key.operands} "
    text += f"{short(tried['config']):24}"
    if "stack" in tried:
        text += f" {tried['seconds']:5.1f} s {tried['registers']:3} regs {tried['stack']:4} spilled"
        text += f" {tried['shared']:6} shared"
    if "ms" in tried:
        text += f" {tried['ms']:8.4f} ms {tflops(target, tried['ms']):6.1f} TFLOP/s"
    if "error" in tried:
        text += " " + tried["error"].strip().splitlines()[-1][-100:]
    print(text, flush=True)


# ---- the process that measures


class Bench:
    """One problem's tensors and plainest result, kept from one candidate to the next."""

    def __init__(self, case: dict[str, Any]) -> None:
        import compiling
        import torch

        self.torch, self.compiling = torch, compiling
        self.case = compiling.Case(**(case | {"features": tuple(case["features"])}))
        self.p = self.case.problem()
        torch.manual_seed(0)
        self.t = compiling.tensors(
            self.p, fill=lambda shape, dtype: torch.randn(shape, dtype=dtype, device="cuda")
        )
        self.given = None
        if self.p.needs_grad:
            out, lse = compiling.call("fwd", self.p, self.t)
            self.given = out, lse, torch.randn_like(out)
        with lookup.pinned(self.case.kernel, PLAINEST):
            self.expected = self.outcome()
        self.apart = 0.0
        if self.p.needs_grad and self.case.kernel != "fa1_bwd":
            self.apart = self.milliseconds("bwd_preprocess")

    def outcome(self) -> list[Any]:
        made = self.compiling.call(self.case.kernel, self.p, self.t, self.given)
        if not isinstance(made, tuple):
            made = (made.dq, made.dk, made.dv, made.dbias)
        return [x.float() for x in made if x is not None]

    def milliseconds(self, kernel: str) -> float:
        """Of one launch: the median of ROUNDS bursts."""
        torch = self.torch
        times = []
        launch = self.compiling.prepared(kernel, self.p, self.t, self.given)
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            time.sleep(0.05)
            launch()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(30_000_000)  # the host gets ahead, so that no gap is timed
            start.record()
            for _ in range(BURST):
                launch()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) / BURST)
        return statistics.median(times)

    def measure(self, config: TileConfig) -> dict[str, Any]:
        with lookup.pinned(self.case.kernel, config):
            for got, expected in zip(self.outcome(), self.expected, strict=True):
                finite = self.torch.isfinite(expected)
                error = (got - expected)[finite].norm() / expected[finite].norm()
                if not error < 0.01 or not self.torch.equal(finite, self.torch.isfinite(got)):
                    return {"error": f"wrong result: relative error {float(error):.3g}"}
            return {"ms": self.milliseconds(self.case.kernel) - self.apart}


def worker() -> None:
    """Answers measurements until its input ends."""
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr
    bench: Bench | None = None
    case = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question.get("ask") == "device":
                from tilewise.backends.triton import launch

                x = torch.empty(1, device="cuda")
                answer = {"arch": launch.arch(x), "gpu": torch.cuda.get_device_name(x.device)}
            else:
                if question["case"] != case:
                    bench = None
                    torch.cuda.empty_cache()
                    bench, case = Bench(question["case"]), question["case"]
                assert bench is not None
                answer = bench.measure(TileConfig(**question["config"]))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[-500:]}
            if not isinstance(error, (ValueError, torch.OutOfMemoryError)) and "CUDA" in str(error):
                print(json.dumps(answer), file=answers, flush=True)
                return  # the context may be lost
        print(json.dumps(answer), file=answers, flush=True)


def merge(path: Path, arch: str) -> None:
    """Puts a file's rows into the package's table of ``arch``, in place of those they renew."""
    table = ROOT / "src" / "tilewise" / "tuning" / "tables" / f"{arch}.toml"
    old = list(lookup.rows(arch)) if table.exists() else []
    new = lookup.parsed(path.read_text())
    renewed = {row.key for row in new}
    rows = [row for row in old if row.key not in renewed]
    rows += new
    head = f"# How kernels are run on {arch}, see ../lookup.py; made by tools/tune.py.\n\n"
    table.write_text(head + toml_of(rows))
    print(f"{table}: {len(new)} rows written, {len(rows)} in all")


def arguments() -> argparse.Namespace:
    def several(kind: Any = str) -> Any:
        return lambda text: [kind(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kernel", type=several(), default=["fwd", "bwd_dkdv", "bwd_dq"], help=",".join(KERNELS))
    add("--dtype", type=several(), default=["half"], help=",".join(DTYPES))
    add("--half", default="float16", help="the dtype that stands for half")
    add("--head-dim", type=several(int), default=[64, 128, 256], help=f"of {HEAD_DIMS}")
    add("--mask", type=several(), default=["full", "causal"], help=",".join(MASKS))
    add("--operands", type=several(), default=["plain"], help=",".join(OPERANDS))
    add("--extra", default="dropout", help="the feature that stands for extra operands")
    ways = ["tma", "pointers", "ws"]
    add("--ways", type=several(), default=ways, help=f"of loading: {','.join(ways)}")
    add("--stages", type=several(int), default=[2, 3, 1, 4], help="depths of the pipeline")
    add("--maxnreg", type=several(int), default=[0], help="caps on registers to try; 0 is none")
    add("--least-registers", type=int, default=32, help="of accumulators: skips tiny tiles")
    add("--only", type=several(), default=[], help="candidates to try, in logs' words")
    add("--most", type=int, default=0, help="candidates of a row; 0 is all")
    add("--tokens", type=int, default=16384)
    add("--seqlen", type=int, default=4096)
    add("--hidden", type=int, default=2048)
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    add("--timeout", type=float, default=60.0, help="seconds for measuring one candidate")
    add("--compile-timeout", type=float, default=60.0)
    add("--time-limit", type=float, default=540.0, help="seconds for the whole run")
    add("--estimate", action="store_true", help="no GPU: the first that compiles")
    add("--arch", default="sm_90", help="of --estimate and --merge")
    add("--commit", default="", help="for the provenance, where there is no git")
    add("--out", default="out/tune")
    add("--merge", type=Path, help="a rows.toml to put into the package's table")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.worker:
        worker()
    elif args.merge:
        merge(args.merge, args.arch)
    else:
        tune(args)


if __name__ == "__main__":
    main()
