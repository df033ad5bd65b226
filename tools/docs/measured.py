"""The page of benchmarks, from the files that ``tilewise bench`` wrote into benchmarks/results.

What is newest stands first. A file that is added is taken up by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from markdown_text import facts, markdown

from tilewise.bench import panels, plots, pretraining, report
from tilewise.bench.cells import GENERATIONS_SUITE
from tilewise.bench.gpt import GPT2
from tilewise.bench.providers import DIRECTIONS
from tilewise.bench.results import Row
from tilewise.bench.training import Run
from tilewise.cli.bench_cells import GENERATION_LABELS, NOTES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DRAWN = ROOT / "out" / "docs" / "measured"
SITE_FOLDER = "measured"
_DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward + backward"}
# In the order of a day's sections, and as a heading has them.
_KINDS = {
    "fwd": "Forward",
    "bwd": "Backward",
    "fwd_bwd": "Forward and backward",
    "generations": "Generations",
    "train": "Training",
}
_WORDS = {"h200": "H200", "h100": "H100", "cpu": "CPU", "triton": "Triton"}
_OURS = ("tilewise-gluon", "tilewise", "tilewise-triton", "tilewise-fa1")


@dataclass(frozen=True)
class Result:
    """One file of rows."""

    path: Path
    content: dict[str, Any]

    @cached_property
    def rows(self) -> list[Row]:
        known = {f.name for f in fields(Row)}
        return [Row(**{k: v for k, v in r.items() if k in known}) for r in self.content["rows"]]

    @property
    def board(self) -> dict[str, Any]:
        return self.content["board"]

    @property
    def on_gpu(self) -> bool:
        return "gpu" in self.board

    @property
    def suite(self) -> str:
        """ "generations", "train", or "" for directions alone."""
        return self.rows[0].suite if self.rows[0].suite not in DIRECTIONS else ""

    @property
    def title(self) -> str:
        year, month, day, kind, *rest = self.path.stem.split("-")
        words = " ".join(_WORDS.get(word, word) for word in rest)
        return f"{_KINDS.get(kind, kind)}, {words}, {year}-{month}-{day}"

    def figures(self) -> list[Path]:
        """The figures, drawn anew when the file or what draws it has changed."""
        key = hashlib.sha256(self.path.read_bytes())
        for module in (panels, plots, pretraining, report):
            key.update(Path(module.__file__).read_bytes())
        stem = f"{self.path.stem}-{key.hexdigest()[:12]}"
        drawn = sorted(DRAWN.glob(f"{stem}*.svg"))
        if not drawn:
            self._draw(DRAWN / f"{stem}.svg")
            drawn = sorted(DRAWN.glob(f"{stem}*.svg"))
        return drawn

    def _draw(self, path: Path) -> None:
        if self.suite == pretraining.SUITE:
            runs = {name: Run(**run) for name, run in self.content["training"]["runs"].items()}
            pretraining.draw(runs, self.board, path)
        elif self.on_gpu:
            labels = GENERATION_LABELS if self.suite else {"eager": "standard"}
            panels.draw(self.rows, self.board, path, labels)
        else:
            plots.benchmark(self.rows, self.board, path)


def _files() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        yield path, json.loads(path.read_text())


def results() -> list[Result]:
    """Files with rows of ``tilewise bench``: by day, the newest first, and then by kind."""
    found = [
        Result(path, content)
        for path, content in _files()
        if content.get("rows") and "suite" in content["rows"][0]
    ]
    kinds = list(_KINDS)

    def place(result: Result) -> tuple[bool, int, str]:
        kind = result.path.stem.split("-")[3]
        known = kinds.index(kind) if kind in kinds else len(kinds)
        return not result.on_gpu, known, result.path.stem

    return sorted(sorted(found, key=place), key=lambda r: r.path.stem[:10], reverse=True)


def page() -> str:
    """A section for each file."""
    return "\n\n".join(_section(result) for result in results())


def _section(r: Result) -> str:
    texts = [f"## {r.title}", f"{facts(r.board)}. {_providers(r)}"]
    texts.append(f"```sh\n{command(r)}\n```")
    for path in r.figures():
        uri = f"{SITE_FOLDER}/{path.name}"
        texts.append(f"[![{r.title}]({uri})]({uri})")
    if r.suite == pretraining.SUITE:
        return "\n\n".join([*texts, _training(r)])
    ratios = _ratios(r)
    if ratios is not None:
        texts.append(ratios)
    for protocol in dict.fromkeys(x.protocol for x in r.rows if x.ms is not None):
        unit = "TFLOPS" if r.on_gpu else "GFLOP/s"
        note = f"{unit}, protocol {protocol}: {NOTES[protocol]}"
        texts.append(_folded(note, report.speed_cells(r.rows, protocol, r.on_gpu)))
    peaks = report.peak_cells(r.rows)
    if peaks is not None:
        texts.append(_folded("Peak MiB beyond the inputs", peaks))
    short = [replace(x, error=x.error and x.error.split(". ")[0]) for x in r.rows]
    missing = report.reasons(short) + report.absent(r.content.get("absent", {}))
    left_out = r.content.get("left_out", [])
    if missing:
        texts.append("No number:\n\n" + "\n".join(f"- {line}" for line in missing))
    if left_out:
        texts.append(f"Left out for the time limit: {'; '.join(left_out)}.")
    return "\n\n".join(texts)


def _providers(r: Result) -> str:
    found = {x.provider: x.provider_version for x in r.rows}
    return ", ".join(f"{name} {version or ''}".strip() for name, version in found.items()) + "."


def _folded(title: str, cells: report.Cells) -> str:
    header, lines = cells
    kept = [i for i in range(len(header)) if i >= 6 or {line[i] for line in lines} != {"-"}]
    table = markdown(
        [header[i] for i in kept],
        [[line[i] for i in kept] for line in lines],
        left=sum(i < 6 for i in kept),
    )
    body = "\n".join(f"    {line}" for line in table.splitlines())
    return f'??? note "{title}"\n\n{body}'


def _ratios(r: Result) -> str | None:
    """How many times as fast the first of ours is as each other provider, over the cells."""
    ours = next((name for name in _OURS if any(x.provider == name for x in r.rows)), None)
    timed = {
        (x.protocol, x.direction or x.suite, report.group(x), x.seqlen_q, x.provider): x.ms
        for x in r.rows
        if x.ms is not None
    }
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for (protocol, direction, kind, n, provider), ms in timed.items():
        mine = timed.get((protocol, direction, kind, n, ours or ""))
        if provider != ours and mine:
            ratios.setdefault((protocol, direction, provider), []).append(ms / mine)
    if not ratios:
        return None
    lines = [
        [
            f"{_DIRECTIONS[direction]}, {protocol}",
            provider,
            str(len(x)),
            f"{math.exp(sum(map(math.log, x)) / len(x)):.2f}",
            f"{min(x):.2f}",
            f"{max(x):.2f}",
        ]
        for (protocol, direction, provider), x in ratios.items()
    ]
    header = ["what", "against", "cases", "geometric mean", "least", "most"]
    return f"Speed of {ours} as a multiple of:\n\n" + markdown(header, lines, left=2)


def _training(r: Result) -> str:
    training, lines = r.content["training"], []
    gaps = training["largest_gap_to_standard"]
    for x in r.rows:
        f, run = x.features, training["runs"].get(x.features["run"], {})
        gap = gaps.get(f["run"])
        before, after = run.get("held_out_before"), run.get("held_out_after")
        lines.append(
            [
                f["run"],
                f"{before:.4f}" if before else "-",
                f"{after:.4f}" if after else "-",
                f"{f['steps_per_s']:.1f}" if "steps_per_s" in f else "-",
                f"{f['tokens_per_s']:,.0f}" if "tokens_per_s" in f else "-",
                "-" if gap is None else f"{gap:.1e}",
            ]
        )
    header = ["run", "held-out loss before", "after", "steps/s", "tokens/s", "gap"]
    note = (
        "Loss in nats per byte. Gap: the largest difference from the curve of standard attention, "
        f"both smoothed over {training['window']} steps."
    )
    ended = [f"- {x.features['run']}: {x.error.split('. ')[0]}" for x in r.rows if x.error]
    reasons = ["Not trained to the end:\n\n" + "\n".join(ended)] if ended else []
    return "\n\n".join([markdown(header, lines), note, *reasons])


def command(r: Result) -> str:
    """The command that measures the file's rows anew; it may measure others beside them."""
    rows = [x for x in r.rows if x.ms is not None]
    words = [f"tilewise bench --device {'cuda' if r.on_gpu else 'cpu'}"]

    def add(flag: str, values: Sequence[Any]) -> None:
        words.append(f"--{flag} {','.join(map(str, dict.fromkeys(values)))}")

    directions = [d for d in DIRECTIONS if any((x.direction or x.suite) == d for x in rows)]
    if r.suite == pretraining.SUITE:
        config = r.content["training"]["config"]
        add("suite", [r.suite])
        if (model := config["model"].get("name")) in GPT2:
            add("model", [model])
        if config["model"]["dropout_p"] > 0:
            add("dropout", [config["model"]["dropout_p"]])
        add("only", [x.features["run"] for x in rows])
        add("steps", [config["steps"]])
        add("batch", [config["batch"]])
        add("seq-len", [config["model"]["context"]])
        add("dtype", [config["dtype"]])
        add("seed", [config["seed"]])
        return _broken([*words, f"--json {r.path.name}"])
    add("suite", [r.suite] if r.suite else directions)
    if r.suite == GENERATIONS_SUITE:
        add("direction", directions)
    # of several numbers of heads, those that the suite has of itself
    of_its_own = r.suite == GENERATIONS_SUITE and len({x.nheads for x in rows}) > 1
    if (r.suite or not r.on_gpu) and not of_its_own:
        add("n-heads", [x.nheads for x in rows])
    if any(x.nheads_kv != x.nheads for x in rows):
        add("n-heads-kv", sorted({x.nheads_kv for x in rows}))
    if any(x.lengths for x in rows):
        words.append("--packed")
    else:
        add("seq-len", sorted({x.seqlen_q for x in rows}))
    if not of_its_own:
        add("d-head", sorted({x.head_dim for x in rows}))
    if len(masks := {x.causal for x in rows}) == 1:
        words.append("--causal" if masks.pop() else "--no-causal")
    add("dtype", [rows[0].dtype])
    if any(x.inputs != "randn" for x in rows):
        add("inputs", [x.inputs for x in rows])
    if r.on_gpu:
        add("protocol", [x.protocol for x in rows])
    add("only", [x.provider for x in rows])
    return _broken([*words, f"--json {r.path.name}"])


def _broken(words: Sequence[str]) -> str:
    """Lines of up to 100 characters, which a shell takes as one."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > 96:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def device_tests() -> str:
    """A line for each run of ``tools/gpu_tests.py``, and what failed there."""
    lines, failures = [], []
    for path, content in _files():
        if "shards" not in content:
            continue
        counts = content["counts"]
        told = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        if not content["complete"]:
            told += "; not all had their turn"
        seconds = f"{content['seconds']:.0f} s"
        lines.append([f"`{path.name}`", facts(content["board"]), told, seconds])
        failures += [f"- `{f['test']}`: {f['message']}" for f in content["failures"]]
    found = markdown(["file", "where", "outcome", "time"], lines, left=3)
    return found + ("\n\n" + "\n".join(failures) if failures else "")
