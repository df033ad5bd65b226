"""What compute-sanitizer's racecheck reports of the Hopper kernels, told apart.

racecheck does not seem to follow the barriers between warp groups. Two things that these say to
each other through plain stores to shared memory are reported in every kernel that has them, though
they are ordered, as its PTX shows:

- the number of the next tile (``kernels/gluon/schedule.py``): the producer waits for ``empty``,
  stores and arrives at ``full``; a consumer's threads wait for ``full``, load, meet at the barrier
  of their warp group, and one of them arrives at ``empty``;
- what each warp group shall run, a byte that Triton's ``warp_specialize`` stores: the groups wait
  for a barrier of all of them before they read it and after, and the reports name the kernel's
  first line, or those from ``warp_specialize`` on.

Any other report is a fault until it is explained here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "src/tilewise/kernels/gluon"
Access = tuple[str, str, str, int]  # "Read" or "Write", kernel, file, line

_SAID = re.compile(r"^=========(.*)$", re.MULTILINE)
_HEAD = re.compile(r"Error: Race reported between (.+)")
_MORE = re.compile(r"    and (.+) \[\d+ hazards?\]")
_ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\w+\.py):(\d+)")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, 0 warnings\)")


def unexplained(output: str) -> list[str]:
    """Whatever racecheck says in ``output`` but explained reports and, once, how many reports there
    are; and a sentence if that is not how many were read."""
    found: list[str] = []
    reports: list[list[str]] = []  # the accesses of each
    totals: list[int] = []
    for said in (line.strip("\r") for line in _SAID.findall(output)):
        if head := _HEAD.search(said):
            reports.append([head[1]])
        elif (more := _MORE.search(said)) and reports:
            reports[-1].append(more[1])
        elif summary := _SUMMARY.search(said):
            totals += [int(summary[1]), int(summary[2])]
        elif said.strip() not in ("", "COMPUTE-SANITIZER"):
            found.append(said.strip())
    found += [" and ".join(accesses) for accesses in reports if not _explained(accesses)]
    if totals != [len(reports)] * 2:
        found.append(f"{len(reports)} reports were read, and the summaries say {totals}")
    return found


def _explained(accesses: list[str]) -> bool:
    """Whether one access races with others of the other kind, in one kernel, at places that the
    first lines of this file name."""
    matches = [_ACCESS.fullmatch(access) for access in accesses]
    places = [(m[1], m[2], m[3], int(m[4])) for m in matches if m is not None]
    first, *others = [kind for kind, *_ in places] or [""]
    one_kernel = len({kernel for _, kernel, *_ in places}) == 1
    if len(places) != len(accesses) or not others or first in others or not one_kernel:
        return False
    return all(map(_tells_a_tile, places)) or all(map(_starts_warp_groups, places))


def _tells_a_tile(access: Access) -> bool:
    kind, kernel, file, line = access
    function = "announce" if kind == "Write" else "told"
    of_ours = any(_lines(path.name, kernel, "warp_specialize") for path in KERNELS.glob("*.py"))
    return of_ours and file == "schedule.py" and line in _lines(file, function)


def _starts_warp_groups(access: Access) -> bool:
    _, kernel, file, line = access
    return line in _dispatch(file, kernel)


@cache
def _dispatch(file: str, kernel: str) -> set[int]:
    """The first line of a kernel with warp groups, and those from their start on."""
    body = _lines(file, kernel, "warp_specialize")
    text = (KERNELS / file).read_text(encoding="utf-8").splitlines() if body else []
    starts = [line for line in body if "gl.warp_specialize(" in text[line - 1]]
    return {body[0], *range(starts[0], body[-1] + 1)} if starts else set()


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
