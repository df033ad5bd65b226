import json
from dataclasses import replace

import pytest

from tilewise.bench import memory, providers
from tilewise.bench.providers import INPUTS
from tilewise.cli import main
from tilewise.cli.gate import gate

PNG = b"\x89PNG\r\n\x1a\n"
TINY = ["bench", "--device", "cpu", "--n-heads", "1", "--d-head", "16", "--seconds", "0.001"]


@pytest.fixture
def known_peaks(monkeypatch):
    """Peaks by a formula, without processes."""

    def peak_extra(provider, shape, backward=True):
        return (shape.seqlen**2 if provider == "eager" else 100 * shape.seqlen) * 1024

    monkeypatch.setattr(memory, "peak_extra", peak_extra)


def test_tables_file_and_plot_of_one_run(capsys, tmp_path, known_peaks):
    result, plot = tmp_path / "new" / "r.json", tmp_path / "r.png"
    files = ["--json", str(result), "--plot", str(plot)]
    assert main([*TINY, "--seq-len", "64,32", *files]) == 0
    found = json.loads(result.read_text())
    expected_board = {"cpu", "threads", "torch", "triton", "cuda", "date", "commit", "dirty"}
    assert set(found["board"]) == expected_board
    timed = [row for row in found["rows"] if row["suite"] != "fwd_bwd"]
    seen = {(r["suite"], r["causal"], r["seqlen_q"], r["provider"]) for r in timed}
    assert len(timed) == len(seen) == 2 * 2 * 2 * 4
    assert {row["protocol"] for row in timed} == {"interleaved"}
    for row in timed:
        flops = 4 * 64**2 * 16 * (row["seqlen_q"] / 64) ** 2
        flops *= (0.5 if row["causal"] else 1) * (2.5 if row["suite"] == "bwd" else 1)
        assert row["tflops"] * row["ms"] == pytest.approx(flops / 1e9)
    peaks = {(r["provider"], r["seqlen_q"]): r["peak_mib"] for r in found["rows"] if r["peak_mib"]}
    assert peaks["eager", 64] == 4.0 and peaks["tilewise", 64] == 6.25
    assert plot.read_bytes()[:8] == PNG and plot.stat().st_size > 10_000
    captured = capsys.readouterr()
    grown = [line.split() for line in captured.out.splitlines() if "x2.00" in line]
    assert ["eager", "64", "4.0", "x4.00", "x2.00", "x4.00"] in grown
    assert ["tilewise", "64", "6.2", "x2.00", "x2.00", "x4.00"] in grown
    assert "memory eager 64" in captured.err


def test_flags_choose_what_is_measured(capsys, tmp_path, known_peaks):
    result = tmp_path / "r.json"
    flags = ["--no-causal", "--only", "eager,tilewise", "--direction", "bwd", "--batch", "2"]
    assert main([*TINY, "--seq-len", "32", *flags, "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [(r["suite"], r["provider"]) for r in rows] == [
        ("bwd", "tilewise"),
        ("bwd", "eager"),
        ("fwd_bwd", "tilewise"),
        ("fwd_bwd", "eager"),
    ]
    assert all((r["causal"], r["batch"], r["dtype"]) == (False, 2, "float32") for r in rows)
    assert "sdpa-flash" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tilewise", "sdpa-flash"])
def test_no_speed_of_a_wrong_provider(capsys, monkeypatch, tmp_path, known_peaks, name):
    true = providers.PROVIDERS[name].bind
    wrong = replace(
        providers.PROVIDERS[name],
        bind=lambda shape: lambda q, k, v: true(shape)(q, k, v) * 1.0001,
    )
    monkeypatch.setitem(providers.PROVIDERS, name, wrong)
    result = tmp_path / "r.json"
    assert main([*TINY, "--seq-len", "32", "--json", str(result)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and f"{name} out" in captured.err
    assert not result.exists()


def test_the_gate_sees_a_wrong_gradient_alone():
    def bind(shape):
        eager = providers.EAGER.bind(shape)
        return lambda q, k, v: 2 * eager(q, k, v) - eager(q, k, v.detach())  # doubles dv alone

    wrong = replace(providers.EAGER, name="wrong", bind=bind)
    lines = gate([wrong], providers.Shape(1, 65, 2, 16))
    assert [line.split()[1] for line in lines] == ["dv"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_gate_passes_every_provider(dtype):
    for causal in (True, False):
        shape = providers.Shape(1, 577, 2, 64, causal, dtype)
        assert gate(list(providers.PROVIDERS.values()), shape) == []


def test_what_would_not_fit_is_skipped_and_said(capsys, monkeypatch, tmp_path, known_peaks):
    monkeypatch.setattr(memory, "available", lambda: 3 * 64 * 64 * 4)
    result = tmp_path / "r.json"
    assert main([*TINY, "--seq-len", "64", "--causal", "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    # the forward's two matrices and mask fit, four do not
    assert {r["suite"] for r in rows if r["provider"] == "eager"} == {"fwd"}
    assert {r["suite"] for r in rows if r["provider"] == "tilewise"} == {"fwd", "bwd", "fwd_bwd"}
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "eager" in line and "skipped: would need" in line]) == 2


def test_without_matplotlib_it_says_how_to_get_it(capsys, monkeypatch, tmp_path, known_peaks):
    monkeypatch.setattr("tilewise.bench.plots.available", lambda: False)
    plot = tmp_path / "r.png"
    assert main([*TINY, "--seq-len", "32", "--only", "tilewise", "--plot", str(plot)]) == 0
    assert "pip install" in capsys.readouterr().out and not plot.exists()


@pytest.mark.parametrize(
    "flags", [["--only", "tilewsie"], ["--seq-len", "0"], ["--direction", "up"]]
)
def test_bad_flags_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *flags])
    assert stop.value.code == 2 and flags[1] in capsys.readouterr().err


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("lengths", [(), (40, 1, 65)], ids=["dense", "packed"])
def test_the_gate_takes_every_kind_of_call(inputs, lengths):
    ours = providers.PROVIDERS["tilewise"]
    shape = providers.Shape(3, 65, 4, 16, nheads_kv=2, inputs=inputs, lengths=lengths)
    assert gate([ours], shape) == []

    def other_keys(shape):
        attend = ours.bind(shape)
        return lambda q, k, v: attend(q, k.flip(-3), v)

    assert gate([replace(ours, bind=other_keys)], shape)


def test_a_grouped_call_by_every_provider():
    shape = providers.Shape(1, 65, 4, 16, nheads_kv=2)
    assert gate(list(providers.PROVIDERS.values()), shape) == []
    packed = replace(shape, lengths=(65,))
    refusals = {n: p.refusal(packed, "fwd") for n, p in providers.PROVIDERS.items()}
    assert {n for n, reason in refusals.items() if reason} == {"sdpa-flash", "eager"}


@pytest.mark.parametrize(
    "flags",
    [["--packed"], ["--inputs", "large"], ["--n-heads-kv", "2"]],
    ids=lambda flags: flags[0],
)
@pytest.mark.parametrize("suite", ["fwd", "generations", "train"])
def test_what_only_the_papers_shapes_have_is_refused_elsewhere(flags, suite, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--device", "cpu", "--suite", suite, *flags])
    assert f"argument {flags[0]}: for fwd, bwd, fwd_bwd on a GPU" in capsys.readouterr().err
