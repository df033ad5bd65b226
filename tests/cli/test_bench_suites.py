import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.bench import cells, memory, meters, pretraining, results, rivals, timing
from tilewise.bench.providers import PROVIDERS
from tilewise.cli import bench_cpu, bench_train, main

PNG = b"\x89PNG\r\n\x1a\n"
CPU = ["bench", "--device", "cpu", "--seconds", "0.001"]


@pytest.fixture
def known_peaks(monkeypatch):
    """Peaks by a formula, without processes."""
    monkeypatch.setattr(memory, "peak_extra", lambda name, shape: shape.seqlen << 20)


@pytest.fixture
def host_as_gpu(monkeypatch):
    """The GPU's path with tensors and a clock of the host, as far as it is not torch.cuda's."""
    true = cells.Asked.shape

    def shape(self, *sizes):
        return replace(true(self, *sizes), device="cpu", dtype="float32")

    def peak(function):
        function()
        return 7 << 20

    def seconds(call, launches):
        call()
        return 1e-3

    monkeypatch.setattr(cells.Asked, "shape", shape)
    monkeypatch.setattr(memory, "device_peak", peak)
    monkeypatch.setattr(timing, "event_seconds", seconds)
    monkeypatch.setattr(timing, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(
        timing, "sustained", lambda calls, s: {n: seconds(c, 1) for n, c in calls.items()}
    )
    monkeypatch.setattr(meters, "_recover", lambda reason: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    board = {"gpu": "Board", "cpu": "C", "threads": 1, "torch": "T"}
    monkeypatch.setattr(results, "board", lambda device="cpu": board)


def test_generations_on_a_cpu(capsys, tmp_path, known_peaks):
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    files += ["--plot", str(tmp_path / "r.png")]
    assert main([*CPU, "--suite", "generations", "--seq-len", "32,48", *files]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    rows = found["rows"]
    seen = {
        (r["provider"], r["direction"], r["causal"], r["features"].get("dropout_p"), r["seqlen_q"])
        for r in rows
    }
    assert len(rows) == len(seen) == 3 * 3 * 2 * 2 * 2
    assert {r["suite"] for r in rows} == {"generations"} and all(r["ms"] > 0 for r in rows)
    assert {r["provider"] for r in rows} == {"eager", "tilewise-fa1", "tilewise"}
    assert {r["peak_mib"] for r in rows if r["direction"] == "fwd_bwd"} == {32.0, 48.0}
    assert found["left_out"] == found["wrong"] == []
    with (tmp_path / "r.csv").open() as lines:
        assert [row["provider"] for row in csv.DictReader(lines)] == [r["provider"] for r in rows]
    assert (tmp_path / "r.png").read_bytes()[:8] == PNG
    assert "Peak MiB beyond the inputs" in capsys.readouterr().out


def test_a_wrong_generation_ends_with_1_and_has_no_speed(capsys, monkeypatch, tmp_path):
    true = PROVIDERS["tilewise"]
    wrong = replace(true, bind=lambda shape: lambda q, k, v: true.bind(shape)(q, k, v) * 1.01)
    monkeypatch.setitem(rivals.PROVIDERS, "tilewise", wrong)
    path = tmp_path / "r.json"
    line = ["--suite", "generations", "--direction", "fwd", "--seq-len", "32"]
    assert main([*CPU, *line, "--causal", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert all(r["error"].startswith("wrong: ") for r in rows if r["provider"] == "tilewise")
    assert all(r["ms"] > 0 for r in rows if r["provider"] != "tilewise")
    captured = capsys.readouterr()
    assert "no speed is reported" in captured.err and "No number:" in captured.out
    assert "dropout 0.1" in captured.err  # checked with the mask of its seed


def test_training_on_a_cpu(capsys, tmp_path):
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    assert main(["bench", "--device", "cpu", "--suite", "train", "--steps", "4", *files]) == 0
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [r["features"]["run"] for r in rows] == list(pretraining.RUNS)
    assert (tmp_path / "t.png").read_bytes()[:8] == PNG
    out = capsys.readouterr().out
    assert "tilewise differs from standard attention of the same seed by" in out
    assert "tokens/s" in out and "two masks" not in out
    assert out.startswith("tiny, a GPT of 2 layers, 2 heads, width 64, over bytes, dropout 0,")


def test_training_with_dropout(capsys, tmp_path):
    path = tmp_path / "t.json"
    line = ["--suite", "train", "--steps", "2", "--dropout", "0.1", "--only", "standard,tilewise"]
    assert main(["bench", "--device", "cpu", *line, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [r["features"]["dropout_p"] for r in found["rows"]] == [0.1, 0.1]
    assert found["training"]["config"]["model"]["dropout_p"] == 0.1
    out = capsys.readouterr().out
    assert "over bytes, dropout 0.1," in out and "gap may be that of two masks" in out


def _without_dropout(monkeypatch):
    provider = replace(PROVIDERS["sdpa-flash"], name="fa3", has_dropout=False)
    monkeypatch.setitem(PROVIDERS, "fa3", provider)


def test_what_has_no_dropout_is_no_failure_beside_what_has(capsys, monkeypatch, tmp_path):
    _without_dropout(monkeypatch)
    line = ["bench", "--device", "cpu", "--suite", "train", "--steps", "1", "--dropout", "0.1"]
    path = tmp_path / "t.json"
    assert main([*line, "--only", "fa3,tilewise", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["provider"], r["error"]) for r in rows] == [
        ("tilewise", None),
        ("fa3", "fa3 has no dropout"),
    ]
    assert "fa3: fa3 has no dropout" in capsys.readouterr().out
    assert main([*line, "--only", "fa3"]) == 1


def test_rivals_are_trained_by_default_on_a_gpu_alone(capsys, monkeypatch, host_as_gpu):
    trained = []
    monkeypatch.setattr(bench_train.Pretraining, "run", lambda self: trained.append(self.only))
    for name in ("flash-attn", "fa3", "fa4"):
        _take_away(monkeypatch, name)
    _without_dropout(monkeypatch)  # there, on a CPU
    for line in (["--device", "cuda"], ["--device", "cpu"], ["--only", "sdpa-cudnn,sdpa"]):
        assert main(["bench", "--suite", "train", *line]) == 0
    four = list(pretraining.RUNS)
    assert trained == [[*four, "sdpa-flash", "sdpa-cudnn"], four, ["sdpa", "sdpa-cudnn"]]
    with pytest.raises(SystemExit):
        main(["bench", "--suite", "train", "--only", "fa4,sdpa"])
    told = "fa4: must be of standard, standard-other-seed, tilewise, sdpa, sdpa-flash, sdpa-cudnn"
    assert f"{told} here" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", [None, "gpt2-small", "gpt2-medium"])
def test_the_model_of_a_gpu(capsys, monkeypatch, host_as_gpu, name):
    def run(self):
        trained.append(self.config)

    trained = []
    monkeypatch.setattr(bench_train.Pretraining, "run", run)
    line = ["--suite", "train", "--seq-len", "4096", *(["--model", name] if name else [])]
    assert main(["bench", *line]) == 0
    (config,) = trained
    assert (config.model.name, config.batch) == (name or "gpt2-small", 8)
    layers = 24 if name == "gpt2-medium" else 12
    out = capsys.readouterr().out
    assert out.startswith(f"{config.model.name}, a GPT of {layers} layers, ")
    assert "context 4096, batch 8, bfloat16" in out


def test_only_training_on_a_gpu_has_a_model(capsys, host_as_gpu):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--suite", "generations", "--model", "gpt2-medium"])
    assert ended.value.code == 2
    assert "argument --model: for --suite train on a GPU" in capsys.readouterr().err


def test_both_directions_and_csv_of_the_cpu_table(tmp_path, known_peaks):
    path = tmp_path / "r.csv"
    line = ["--suite", "fwd_bwd", "--seq-len", "32", "--n-heads", "1", "--d-head", "16", "--causal"]
    assert main([*CPU, *line, "--csv", str(path)]) == 0
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert {r["suite"] for r in rows} == {"fwd_bwd"}
    assert len([r for r in rows if r["ms"]]) == len([r for r in rows if r["peak_mib"]]) == 4


def test_the_time_limit_of_the_cpu_table(capsys, monkeypatch, tmp_path, known_peaks):
    clock = iter([0.0, 1.0] + [99.0] * 100)
    monkeypatch.setattr(bench_cpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    path = tmp_path / "r.json"
    line = ["--seq-len", "32,64", "--direction", "fwd", "--n-heads", "1", "--d-head", "16"]
    assert main([*CPU, *line, "--causal", "--time-limit", "10", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {r["seqlen_q"] for r in found["rows"]} == {32}
    assert "fwd causal 64 tilewise" in found["left_out"]
    assert "left out: time limit" in capsys.readouterr().out


def _take_away(monkeypatch, name):
    found = rivals.providers_on("cuda")
    monkeypatch.setitem(found, name, replace(found[name], absent=lambda: "no such module"))


def test_the_papers_suite_of_a_gpu(capsys, monkeypatch, tmp_path, host_as_gpu):
    _take_away(monkeypatch, "fa3")
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    sizes = ["--batch", "1", "--n-heads", "1", "--d-head", "32,64", "--seq-len", "32,64"]
    line = ["--suite", "fwd,bwd", "--only", "tilewise,eager,tilewise-gluon,fa3", *sizes, *files]
    assert main(["bench", *line]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert {r["protocol"] for r in found["rows"]} == {"burst", "sustained"}
    assert {r["provider"] for r in found["rows"]} >= {"tilewise", "eager"}
    measured = [r for r in found["rows"] if r["provider"] in ("tilewise", "eager")]
    assert len(measured) == 2 * 2 * 2 * 2 * 2 * 2
    assert all(r["ms"] == 1.0 and r["peak_mib"] == 7.0 for r in measured)
    assert found["absent"]["fa3"] == "no such module" and found["memory"] == memory.ALLOCATOR
    assert (tmp_path / "r.png").read_bytes()[:8] == PNG
    out = capsys.readouterr().out
    assert "TFLOPS, protocol burst" in out and "not here: fa3:" in out


def test_nothing_that_is_there_is_an_error(capsys, monkeypatch, host_as_gpu):
    _take_away(monkeypatch, "fa4")
    assert main(["bench", "--only", "fa4"]) == 1
    assert "fa4: no such module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--suite", "train,fwd"], "train runs alone"),
        (["--suite", "fwd", "--direction", "bwd"], "the suites name the directions already"),
        (["--suite", "sideways"], "sideways: must be of fwd"),
        (["--only", "fa4"], "fa4: must be of tilewise"),
        (["--suite", "train", "--only", "eager"], "eager: must be of standard"),
        (["--suite", "train", "--only", "sdpa-cudnn"], "sdpa-cudnn: must be of standard"),
        (["--suite", "train", "--seq-len", "8,9"], "train takes one"),
        (
            ["--suite", "train", "--model", "gpt2-medium"],
            "for --suite train on a GPU, not on this CPU",
        ),
        (["--model", "gpt2-small"], "--model: for --suite train on a GPU"),
        (["--protocol", "burst"], "for a GPU"),
        (["--d-head", "16,32"], "one on a CPU"),
        (["--dropout", "0.1"], "on a CPU for --suite generations"),
        (["--dropout", "0.999999"], "0.999999: must be in [0, 1 - 2^-17)"),
        (["--dropout", "half"], "invalid probability value"),
        (["--suite", "train", "--n-heads", "4"], "--n-heads: not for train"),
        (["--suite", "train", "--no-causal"], "--causal: not for train"),
        (["--time-limit", "0"], "must be positive"),
    ],
)
def test_what_means_nothing_is_refused(line, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "cpu", *line])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_gpu_that_is_not_there_is_refused(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--device", "cuda"])
    assert ended.value.code == 2 and "torch sees no GPU" in capsys.readouterr().err


def test_the_help_names_the_variable_of_the_commit(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "TILEWISE_COMMIT" in capsys.readouterr().out
