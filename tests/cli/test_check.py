import json

import pytest

from tilewise.backends.cpu import CpuBackend
from tilewise.backends.reference import ReferenceBackend
from tilewise.cli import check, main
from tilewise.dispatch import BACKENDS


def test_every_backend_passes_and_the_table_says_so(capsys):
    assert main(["check", "--device", "cpu", "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines() if line.startswith("float32")]
    assert [cells[1] for cells in lines] == ["out", "lse", "dq", "dk", "dv", "dbias", "dsink"]
    assert all(cells[-1] == "ok" for cells in lines)
    assert "check [" in captured.err and "check [" not in captured.out


def test_json_has_every_way_case_and_result(capsys):
    assert main(["check", "--device", "cpu", "--dtype", "bfloat16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = {(row["backend"], row["algorithm"]) for row in found["rows"]}
    refused = {b for b in BACKENDS if any(f"backend {b!r} cannot" in x for x in found["refused"])}
    assert ways == {(b, a) for b in BACKENDS.keys() - refused for a in BACKENDS[b].algorithms}
    assert {("cpu", "fa1"), ("cpu", "fa2"), ("reference", "standard")} <= ways
    assert {row["case"] for row in found["rows"]} == set(check.cases())
    assert all(0 <= row["error"] <= row["allowed"] for row in found["rows"])
    assert any(row["plain_error"] > 0 for row in found["rows"])
    assert found["board"]["cpu"]


def _spoil(monkeypatch, factor):
    true = CpuBackend.fwd

    def fwd(self, problem, tensors, algorithm):
        out, lse = true(self, problem, tensors, algorithm)
        return (out * factor if problem.softcap > 0 else out), lse

    monkeypatch.setattr(CpuBackend, "fwd", fwd)


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_result_fails_and_is_named(capsys, monkeypatch, factor):
    _spoil(monkeypatch, factor)
    assert main(["check", "--device", "cpu", "--dtype", "float32"]) == 1
    text = capsys.readouterr().out
    assert "FAIL cpu/fa2 float32 softcap out" in text
    assert "FAIL cpu/fa2 float32 causal out" not in text
    assert "FAIL reference" not in text


def test_json_of_an_error_that_is_not_finite_is_valid(capsys, monkeypatch):
    _spoil(monkeypatch, float("nan"))
    assert main(["check", "--device", "cpu", "--dtype", "float32", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    wrong = {(row["backend"], row["result"]) for row in found["rows"] if row["error"] is None}
    assert ("cpu", "out") in wrong and not found["ok"]


def test_what_a_backend_refuses_is_listed_and_is_no_failure(capsys, monkeypatch, fresh_choices):
    monkeypatch.setattr(ReferenceBackend, "supports", lambda self, problem: ("on holiday",))
    assert main(["check", "--device", "cpu", "--dtype", "float64"]) == 0
    text = capsys.readouterr().out
    assert "refused: float64 plain and 11 more: backend 'reference' cannot" in text
    assert "on holiday" in text


def test_an_unknown_dtype_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check", "--device", "cpu", "--dtype", "float31"])
    assert stop.value.code == 2 and "float31" in capsys.readouterr().err
