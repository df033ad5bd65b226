"""The commands on a GPU; small sizes, and no claim about speed."""

import json

import pytest
import torch

from tilewise.bench.providers import Shape
from tilewise.bench.rivals import providers_on
from tilewise.cli import main
from tilewise.cli.gate import gate, verify
from tilewise.dispatch import BACKENDS

pytestmark = pytest.mark.gpu
SIZES = ["--n-heads", "2", "--batch", "1", "--d-head", "64", "--seq-len", "256,512"]
TORCH = ("eager", "sdpa-cudnn", "sdpa-flash", "sdpa-memeff")


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gate_passes_torch(name, dtype):
    for causal in (True, False):
        shape = Shape(1, 512, 2, 64, causal, dtype, device="cuda")
        assert verify(providers_on("cuda")[name], shape, True) is None


def test_the_gate_sees_a_wrong_result_on_a_gpu():
    from dataclasses import replace

    eager = providers_on("cuda")["eager"]
    wrong = replace(eager, bind=lambda shape: lambda q, k, v: 1.1 * eager.bind(shape)(q, k, v))
    lines = gate([wrong], Shape(1, 65, 2, 16, dtype="bfloat16", device="cuda"))
    assert "eager out" in lines[0]


def test_every_provider_that_is_there_has_a_row(tmp_path):
    path = tmp_path / "r.json"
    line = ["--suite", "fwd,bwd", "--causal", "--seconds", "0.05", "--json", str(path)]
    assert main(["bench", "--device", "cuda", *SIZES, *line]) == 0
    found = json.loads(path.read_text())
    assert found["board"]["gpu"] == torch.cuda.get_device_name()
    assert {"driver", "capability", "cuda", "triton", "commit"} <= set(found["board"])
    there = {name for name, p in providers_on("cuda").items() if p.absent() is None}
    for suite in ("fwd", "bwd"):
        rows = [r for r in found["rows"] if r["suite"] == suite]
        assert {r["provider"] for r in rows} == there
        assert all((r["ms"] is None) != (r["error"] is None) for r in rows)
        for name in ("eager", "sdpa-flash"):
            assert all(r["ms"] and r["peak_mib"] for r in rows if r["provider"] == name)


def test_generations_on_a_gpu(tmp_path):
    path, plot = tmp_path / "g.json", tmp_path / "g.png"
    line = ["--suite", "generations", "--seconds", "0.05", "--json", str(path), "--plot", str(plot)]
    assert main(["bench", "--device", "cuda", *SIZES, *line]) == 0
    rows = [r for r in json.loads(path.read_text())["rows"] if r["provider"] == "eager"]
    assert len(rows) == 3 * 4 * 2 and all(r["ms"] for r in rows)
    assert plot.exists()


def test_training_on_a_gpu(tmp_path):
    path = tmp_path / "t.json"
    line = ["--suite", "train", "--steps", "3", "--batch", "2", "--seq-len", "128"]
    only = ["--only", "standard,sdpa", "--json", str(path)]
    assert main(["bench", "--device", "cuda", *line, *only]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert all(r["features"]["tokens_per_s"] > 0 and r["dtype"] == "bfloat16" for r in rows)


def test_check_runs_every_backend_that_takes_a_gpu(capsys):
    code = main(["check", "--device", "cuda", "--dtype", "bfloat16", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, [r for r in found["rows"] if not r["ok"]]
    ran = {r["backend"] for r in found["rows"]}
    assert "reference" in ran and ran <= set(BACKENDS) - {"cpu"}
    assert any("backend 'cpu' cannot take this call" in line for line in found["refused"])
    assert found["board"]["gpu"]


def test_env_describes_the_gpu(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    gpu = found["gpus"]["cuda:0"]
    assert gpu["name"] == torch.cuda.get_device_name(0) and gpu["memory_gib"] > 0
    assert found["versions"]["driver"] and found["versions"]["cudnn"]
    assert any(call["device"] == "cuda:0" for call in found["calls"])
    assert main(["env"]) == 0
    assert f"capability {gpu['capability']}" in capsys.readouterr().out
