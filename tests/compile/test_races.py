"""``tools/races.py``: which of racecheck's reports are explained."""

import ast
from pathlib import Path

import pytest
from races import KERNELS, unexplained

SUMMARY = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"


def _report(*places):
    lines = [f"{kind} access at {kernel}+0x240 in {place}" for kind, kernel, place in places]
    head = f"========= Error: Race reported between {lines[0]}\n"
    return (
        head + "".join(f"=========     and {x} [22 hazards]\n" for x in lines[1:]) + "========= \n"
    )


def _lines(file, function):
    tree = ast.parse((KERNELS / file).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    return node.lineno, node.end_lineno


def _kernel_of(file):
    return f"flash_{Path(file).stem}_kernel"


STORED = f"schedule.py:{_lines('schedule.py', 'announce')[1] - 1}"
LOADED = f"schedule.py:{_lines('schedule.py', 'told')[1] - 1}"
CHOSEN = f"schedule.py:{_lines('schedule.py', 'step_tile')[0] + 4}"
FILES = ("fwd_sm90.py", "bwd_sm90.py", "bwd_dq_sm90.py", "bwd_dkdv_sm90.py")


@pytest.mark.parametrize("file", FILES)
def test_what_warp_groups_say_to_each_other_is_explained(file):
    kernel = _kernel_of(file)
    first, last = _lines(file, kernel)
    output = _report(
        ("Read", kernel, f"{file}:{first}"), ("Write", kernel, f"{file}:{last}")
    ) + _report(("Write", kernel, STORED), ("Read", kernel, LOADED))
    assert unexplained(output + SUMMARY.format(2)) == []


FORWARD = "flash_fwd_sm90_kernel"
LINES = {
    "init": (KERNELS / "fwd_sm90.py").read_text().split("mbarrier.init(")[0].count("\n") + 1,
    "kernel": _lines("fwd_sm90.py", FORWARD)[0],
    "step": _lines("fwd_sm90.py", "_step")[0] + 5,
}


@pytest.mark.parametrize(
    "accesses",
    [
        [("Read", FORWARD, LOADED), ("Write", FORWARD, "rows.py:40")],
        [("Read", FORWARD, LOADED), ("Write", FORWARD, CHOSEN)],
        [("Read", FORWARD, LOADED), ("Write", FORWARD, f"elsewhere/{STORED}")],
        [("Write", FORWARD, STORED), ("Write", FORWARD, STORED)],
        [
            ("Write", "another_kernel", STORED),
            ("Read", "another_kernel", LOADED),
        ],
        [("Write", FORWARD, STORED), ("Read", "flash_bwd_sm90_kernel", LOADED)],
        [("Write", FORWARD, STORED)],
        [("Read", FORWARD, "fwd_sm90.py:{kernel}"), ("Write", FORWARD, "fwd_sm90.py:{step}")],
        [("Read", FORWARD, "fwd_sm90.py:{kernel}"), ("Write", FORWARD, "fwd_sm90.py:{init}")],
        [("Write", FORWARD, "fwd_sm90.py:{kernel}"), ("Write", FORWARD, "fwd_sm90.py:{kernel}")],
        [("Read", FORWARD, "fwd_sm90.py:{kernel}"), ("Write", "flash_fwd_kernel", "fwd.py:100")],
        [("Read", "other", "fwd_sm90.py:{kernel}"), ("Write", "other", "fwd_sm90.py:{kernel}")],
    ],
)
def test_anything_else_is_not(accesses):
    report = _report(*((kind, kernel, place.format(**LINES)) for kind, kernel, place in accesses))
    (found,) = unexplained(report + SUMMARY.format(1))
    assert all(place.format(**LINES) in found for _, _, place in accesses)


TILE = ("Write", FORWARD, STORED), ("Read", FORWARD, LOADED)


@pytest.mark.parametrize(
    "line",
    [
        "Program hit CUDA_ERROR_ILLEGAL_ADDRESS (error 700)",
        "Error: Internal Sanitizer Error: the target kernel ran out of memory",
        "Error: Potential WAW hazard detected at __shared__ 0x0 in block (0, 0, 0) :",
        "Target application returned an error",
    ],
)
def test_whatever_else_is_said_is_not(line):
    assert unexplained(_report(*TILE) + f"========= {line}\n" + SUMMARY.format(1)) == [line]


def test_reports_that_cannot_be_read_are_not_explained():
    for report in (
        "========= Error: Race reported between Read access at k+0x10\n========= \n",
        "========= Error: Race reported between this\n=========     and that\n========= \n",
    ):
        assert unexplained(report + SUMMARY.format(1))


def test_reports_that_were_left_out_are_missed():
    report = _report(*TILE)
    assert unexplained(report + SUMMARY.format(1)) == []
    for summary in (
        "========= RACECHECK SUMMARY: 1 hazards displayed (2 errors, 0 warnings)\n",
        "========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 1 warnings)\n",
        SUMMARY.format(1) + SUMMARY.format(5),
        "",
    ):
        assert unexplained(report + summary)
