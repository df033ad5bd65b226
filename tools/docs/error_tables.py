"""Tables of errors, from what ``tilewise check --json`` wrote into benchmarks/results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from markdown_text import facts, markdown

from tilewise.cli import check

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def runs() -> dict[Path, dict[str, Any]]:
    """The newest run on each kind of board."""
    found = {}
    for path in sorted(RESULTS.glob("*-check-*.json")):
        content = json.loads(path.read_text())
        found[content["board"].get("gpu", content["board"].get("cpu"))] = path, content
    return dict(found.values())


def verdicts(content: dict[str, Any]) -> list[check.Verdict]:
    """As ``tilewise check`` had them: null is an error that was not finite."""
    return [
        check.Verdict(**{**{k: v for k, v in row.items() if k != "ok"}, "error": _error(row)})
        for row in content["rows"]
    ]


def _error(row: dict[str, Any]) -> float:
    return math.inf if row["error"] is None else row["error"]


def _heading(path: Path, content: dict[str, Any]) -> str:
    rows = content["rows"]
    outside = sum(not row["ok"] for row in rows)
    told = f"{len(rows)} results, {outside or 'none'} outside the rule"
    return f"`tilewise check` on {facts(content['board'])}: {told} (`{path.name}`)."


def tables() -> str:
    """For each run, a line for each dtype and result: the largest error over the cases."""
    texts = []
    for path, content in runs().items():
        found = verdicts(content)
        ways = [f"{backend}/{algorithm}" for backend, algorithm in check.ways_taken(found)]
        header = ["dtype", "result", "plain torch", *ways, "allowed", "closest to it"]
        lines = [line[:-1] for line in check.table_lines(found)]
        texts += [_heading(path, content), markdown(header, lines, left=2)]
    return "\n\n".join(texts)


def cases() -> str:
    """For each run and case, the largest share of what is allowed, by dtype and way."""
    texts = []
    for content in runs().values():
        found = verdicts(content)
        ways, dtypes = check.ways_taken(found), dict.fromkeys(v.dtype for v in found)
        columns = [(dtype, way) for dtype in dtypes for way in ways if way[0] != "reference"]
        lines = []
        for case in dict.fromkeys(v.case for v in found):
            cells = []
            for dtype, way in columns:
                here = (v for v in found if (v.case, v.dtype, v.backend, v.algorithm) == (
                    case, dtype, *way))  # fmt: skip
                used = max((v.used for v in here), default=None)
                cells.append("-" if used is None else f"{used:.0%}")
            lines.append([case, *cells])
        header = ["case", *(f"{dtype} {way[0]}/{way[1]}" for dtype, way in columns)]
        texts.append(markdown(header, lines))
    return "\n\n".join(texts)
