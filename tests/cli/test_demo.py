import json
import sys

import pytest

from tilewise.bench import fresh, gpt, memory, plots
from tilewise.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """In this process, and with peaks that need none of their own."""
    monkeypatch.setenv(fresh.WAIT_POLICY, "passive")
    monkeypatch.setattr(
        memory, "peak_extra", lambda name, shape: (9 if name == "eager" else 3) << 20
    )


def test_both_curves_are_one(capsys, tmp_path):
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "demo.json").read_text())
    standard, tilewise = (found["training"]["runs"][name] for name in ("standard", "tilewise"))
    assert len(standard["losses"]) == len(tilewise["losses"]) == 3
    assert standard["losses"] == pytest.approx(tilewise["losses"], abs=1e-3)
    for name in ("train_before", "train_after", "held_out_before", "held_out_after"):
        assert standard[name] == pytest.approx(tilewise[name], abs=1e-3)
    assert found["training"]["largest_difference"] < 1e-3
    assert 5.3 < standard["train_before"] < 5.9  # log 256 = 5.55
    assert [row["peak_mib"] for row in found["rows"]] == [9.0, 3.0, 9.0, 3.0]
    assert (tmp_path / "demo.png").read_bytes()[:8] == PNG
    captured = capsys.readouterr()
    assert "largest difference along the two curves" in captured.out and "3.0x" in captured.out
    assert "train [" in captured.err


def test_it_learns(tmp_path):
    assert main(["demo", "--quick", "--steps", "40", "--out", str(tmp_path)]) == 0
    run = json.loads((tmp_path / "demo.json").read_text())["training"]["runs"]["tilewise"]
    assert run["train_after"] < run["train_before"] - 1
    assert run["held_out_after"] < run["held_out_before"] - 1


def test_another_seed_of_attention_dropout_shows(tmp_path, monkeypatch):
    def attend(q, k, v, dropout_p, seed):
        return gpt.tilewise_attention(q, k, v, dropout_p, seed + 1)

    monkeypatch.setitem(gpt.ATTENTION, "tilewise", attend)
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "demo.json").read_text())["training"]
    assert found["largest_difference"] > 1e-5


def test_the_seed_changes_the_run_and_repeats_it(tmp_path):
    curves = []
    for i, seed in enumerate(("5", "5", "6")):
        out = tmp_path / str(i)
        main(["demo", "--quick", "--steps", "2", "--seed", seed, "--out", str(out)])
        found = json.loads((out / "demo.json").read_text())
        curves.append(found["training"]["runs"]["standard"]["losses"])
    assert curves[0] == curves[1] != curves[2]


def test_without_matplotlib_it_goes_on(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "available", lambda: False)
    assert main(["demo", "--quick", "--steps", "1", "--out", str(tmp_path)]) == 0
    assert "pip install" in capsys.readouterr().out
    assert (tmp_path / "demo.json").exists() and not (tmp_path / "demo.png").exists()


def test_a_process_that_spins_hands_over_to_one_that_waits(monkeypatch, tmp_path):
    monkeypatch.delenv(fresh.WAIT_POLICY)
    calls = []
    monkeypatch.setattr(fresh.subprocess, "call", lambda line, env: calls.append((line, env)) or 7)
    assert main(["demo", "--quick", "--seed", "4", "--out", str(tmp_path)]) == 7
    line, env = calls[0]
    assert line[:3] == [sys.executable, "-m", "tilewise"]
    assert line[3:] == ["demo", "--seed", "4", "--out", str(tmp_path), "--quick"]
    assert env[fresh.WAIT_POLICY] == "passive"
    assert not (tmp_path / "demo.json").exists()
