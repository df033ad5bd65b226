"""What compute-sanitizer's racecheck reports of the Hopper kernels, told apart.

racecheck follows ``bar.sync`` of all threads, and neither named barriers between warp groups nor
mbarriers. Two things that warp groups say to each other through plain stores to shared memory are
therefore reported in every kernel with warp groups, though they are ordered:

- the number of the next tile (``kernels/gluon/schedule.py``): the producer waits for ``empty``,
  stores and arrives at ``full``; a consumer's threads wait for ``full``, load, meet at the barrier
  of their warp group, and one of them arrives at ``empty``;
- what each warp group shall run, a byte that Triton's ``warp_specialize`` stores: the groups wait
  for a barrier of all of them before they read it and after, and the reports name lines of the
  kernel's own function, which says nothing else through shared memory.

Any other report is a fault until it is explained here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "src/tilewise/kernels/gluon"
_PLACE = re.compile(r"access at (\w+)\+0x[0-9a-f]+ in (\S+\.py):(\d+)")
_SUMMARY = re.compile(
    r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, (\d+) warnings\)"
)


def unexplained(output: str) -> list[str]:
    """Those of racecheck's reports that are neither of the two kinds; and a sentence if it left
    reports out, or said nothing of how many there are."""
    blocks = re.split(r"^=+ *$", output, flags=re.MULTILINE)
    reports = [block.strip() for block in blocks if "Race reported" in block]
    found = [report for report in reports if not _explained(report)]
    summary = _SUMMARY.search(output)
    if summary is None:
        return [*found, "racecheck did not end with its summary"]
    displayed, errors, warnings = map(int, summary.groups())
    if displayed != errors + warnings or displayed != len(reports):
        found.append(f"{len(reports)} of {errors + warnings} reports were read")
    return found


def _explained(report: str) -> bool:
    places = [(kernel, file, int(line)) for kernel, file, line in _PLACE.findall(report)]
    if len(places) != report.count(" access at "):
        return False
    tile = {*_lines("schedule.py", "announce"), *_lines("schedule.py", "told")}
    if all(file == "schedule.py" and line in tile for _kernel, file, line in places):
        return True
    return all(line in _lines(file, kernel, "warp_specialize") for kernel, file, line in places)


@cache
def _lines(file: str, function: str, calls: str = "") -> range:
    """The lines of a function of a file of kernels, if it calls ``calls``."""
    path = KERNELS / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
    for node in tree.body:
        named = isinstance(node, ast.FunctionDef) and node.name == function
        if named and calls in ast.unparse(node):
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(0)
