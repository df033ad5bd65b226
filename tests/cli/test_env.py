import json

import torch

import tilewise
from tilewise.cli import main
from tilewise.dispatch import BACKENDS


def test_text_names_versions_and_reasons(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert tilewise.__version__ in text and torch.__version__ in text
    assert "cpu, bfloat16, causal: cpu (fa2)" in text
    assert "not reference: never taken" in text


def test_json_agrees_with_dispatch(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["tilewise"] == tilewise.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["backends"] == {name: list(b.algorithms) for name, b in BACKENDS.items()}
    on_cpu = [call for call in found["calls"] if call["device"] == "cpu"]
    assert {"float32", "bfloat16, causal, dropout"} <= {call["call"] for call in on_cpu}
    for call in on_cpu:
        assert {call["backend"], *call["reasons"]} == set(BACKENDS)
        assert all(call["reasons"].values())


def test_a_call_that_no_backend_takes_has_every_reason(capsys, monkeypatch, fresh_choices):
    for backend in BACKENDS.values():
        monkeypatch.setattr(type(backend), "supports", lambda self, problem: ("not today",))
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "cpu, float32: none" in text and "not cpu: not today" in text
