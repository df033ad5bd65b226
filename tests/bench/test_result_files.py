import json
import math
import subprocess

import pytest
import torch

from tilewise.bench import console, results, text
from tilewise.bench.providers import PROVIDERS, Shape


def test_the_board_names_the_commit_of_a_checkout(monkeypatch):
    answers = {"ls-files": "__init__.py", "rev-parse": "abc", "status": " M api.py"}
    monkeypatch.setattr(results, "_git", lambda *arguments: answers[arguments[0]])
    monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    board = results.board()
    assert (board["commit"], board["dirty"]) == ("abc", True)
    monkeypatch.setenv(results.COMMIT_VARIABLE, "named")  # of a copy whose history is another's
    assert results.commit() == ("named", None)
    assert (board["torch"], board["threads"]) == (torch.__version__, torch.get_num_threads())


@pytest.mark.parametrize("named", ["abc", None])
def test_without_a_checkout_the_environment_names_it(monkeypatch, tmp_path, named):
    (tmp_path / "__init__.py").touch()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # that does not track it
    monkeypatch.setattr(results, "_PACKAGE", tmp_path)
    if named:
        monkeypatch.setenv(results.COMMIT_VARIABLE, named)
    else:
        monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    assert results.commit() == (named, None)


def test_rows_hold_what_was_measured(tmp_path):
    shape = Shape(batch=2, seqlen=100, nheads=3, head_dim=16, causal=False, dtype="bfloat16")
    row = results.row("bwd", PROVIDERS["eager"], shape, "interleaved", seconds=0.5)
    results.write(tmp_path / "r.json", [row], note="n")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["note"] == "n"
    assert found["rows"][0]["ms"] == 500.0
    assert math.isclose(found["rows"][0]["tflops"], 10 * 2 * 3 * 100**2 * 16 / 0.5 / 1e12)
    assert found["rows"][0]["peak_mib"] is None
    assert found["rows"][0]["provider_version"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_table_is_aligned():
    lines = console.table(["name", "n"], [["a", "100"], ["long name", "1"]]).splitlines()
    assert lines == ["name         n", "---------  ---", "a          100", "long name    1"]


def test_batches_are_text_and_the_byte_after_it():
    data = torch.arange(200, dtype=torch.uint8)
    x, y = text.batch_of(data, 4, 10, seed=1)
    assert torch.equal(x + 1, y) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, text.batch_of(data, 4, 10, seed=1)[0])
    assert not torch.equal(x, text.batch_of(data, 4, 10, seed=2)[0])


def test_the_text_is_the_standard_library():
    found = text.standard_library(limit=50_000)
    whole = bytes(torch.cat([found.train, found.held_out]).tolist())
    assert len(whole) == 50_000 and len(found.held_out) == 5_000
    assert b"import sys" in whole
