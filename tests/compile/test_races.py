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


FILES = ("fwd_sm90.py", "bwd_sm90.py", "bwd_dq_sm90.py", "bwd_dkdv_sm90.py")


@pytest.mark.parametrize("file", FILES)
def test_what_warp_groups_say_to_each_other_is_explained(file):
    kernel = _kernel_of(file)
    first, last = _lines(file, kernel)
    output = _report(
        ("Read", kernel, f"{file}:{first}"), ("Write", kernel, f"{file}:{last}")
    ) + _report(("Write", kernel, "schedule.py:25"), ("Read", kernel, "schedule.py:33"))
    assert unexplained(output + SUMMARY.format(2)) == []


@pytest.mark.parametrize(
    "other",
    [
        ("Write", "flash_fwd_sm90_kernel", "rows.py:40"),
        ("Write", "flash_fwd_sm90_kernel", "schedule.py:13"),
        ("Write", "flash_fwd_sm90_kernel", "fwd_sm90.py:{step}"),
        ("Write", "flash_fwd_kernel", "fwd.py:100"),
        ("Write", "another_kernel", "fwd_sm90.py:{kernel}"),
    ],
)
def test_anything_else_is_not(other):
    step, kernel = (
        _lines("fwd_sm90.py", "_step")[0],
        _lines("fwd_sm90.py", _kernel_of("fwd_sm90.py"))[0],
    )
    kind, name, place = other
    place = place.format(step=step + 5, kernel=kernel)
    reports = (
        _report(("Read", _kernel_of("fwd_sm90.py"), f"fwd_sm90.py:{kernel}"), (kind, name, place)),
        _report(("Read", _kernel_of("fwd_sm90.py"), "schedule.py:33"), (kind, name, place)),
    )
    for report in reports:
        assert unexplained(report + SUMMARY.format(1)) == [report.rstrip().rstrip("= \n")]


def test_a_report_without_places_is_not_explained():
    report = "========= Error: Race reported between Read access at k+0x10\n========= \n"
    assert len(unexplained(report + SUMMARY.format(1))) == 1


def test_reports_that_were_left_out_are_missed():
    report = _report(("Write", "k", "schedule.py:25"), ("Read", "k", "schedule.py:33"))
    assert unexplained(report + SUMMARY.format(1)) == []
    cut = "========= RACECHECK SUMMARY: 1 hazards displayed (2 errors, 0 warnings)\n"
    assert unexplained(report + cut) == ["1 of 2 reports were read"]
    assert unexplained(report) == ["racecheck did not end with its summary"]
