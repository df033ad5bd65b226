"""The site builds without a warning and needs no network; what is drawn is up to date."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")

from tilewise import cli
from tilewise.bench import cells

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "docs"


def program(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # with --quiet mkdocs would count no warnings
    done = program("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    assert "Documentation built" in done.stderr and "WARNING" not in done.stderr
    return folder


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import measured

    return measured


def test_builds_and_holds_what_it_generates(site):
    text = {p.relative_to(site).as_posix(): p.read_text() for p in site.rglob("*.html")}
    assert "TFLOPS, protocol sustained" in text["benchmarks.html"]
    assert "float64 oracle" in text["index.html"]  # README.md
    assert "outside the rule" in text["errors.html"]
    assert 'id="tilewise.api.flash_attn_func"' in text["reference/functions.html"]
    assert "--d-head" in text["reference/command-line.html"]
    assert "⟨out, dout⟩" in text["reference/testing.html"]
    assert "<blockquote>" not in text["reference/functions.html"]  # examples are code
    for name, page in text.items():
        assert name.startswith("source/") or 'class="arithmatex"' not in page, name
    assert "<math" in text["algorithms/backward.html"]
    lines = re.findall(r'href="([^"]*/source/[^"]*)#(__codelineno[^"]*)"', text["errors.html"])
    lines += re.findall(r'href="(source/[^"]*)#(__codelineno[^"]*)"', text["errors.html"])
    assert lines
    for page, anchor in lines:
        assert f'id="{anchor}"' in text[page], page


def test_needs_no_network(site):
    for page in site.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="http[^"]*"', page.read_text()
        )
        assert not asked, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(.?https?:", sheet.read_text()), sheet


def test_what_is_not_there_is_found_out(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import hooks

    path = "src/tilewise/core/mask.py"
    assert (
        "def keys_of"
        in (ROOT / path).read_text().splitlines()[hooks.line_of(path, "MaskSpec.keys_of") - 1]
    )
    assert hooks.line_of(path, "MaskSpec.nothing") is None
    assert hooks.line_of(path, "nothing") is None


def test_figures_are_what_is_drawn():
    program(str(TOOLS / "figures.py"), "--check")


def test_a_command_measures_its_file_anew(measured):
    for result in measured.results():
        words = shlex.split(measured.command(result).replace("\\\n", " "))
        asked = cli.parser().parse_args(words[1:])
        assert asked.device == ("cuda" if result.on_gpu else "cpu")
        if result.suite == "train" or not result.on_gpu:
            continue
        wanted = cells.Asked(
            asked.device, asked.batch, asked.n_heads, asked.seq_len, asked.d_head, asked.causal,
            asked.dtype, asked.dropout, asked.n_heads_kv, asked.inputs or ("randn",), asked.packed,
        )  # fmt: skip
        if result.suite:
            found = cells.generations(wanted, asked.direction)
        else:
            found = cells.papers(wanted, asked.suite)
        kinds = {
            (c.direction, s.batch, s.nheads, s.heads_kv, s.seqlen, s.head_dim, s.causal, s.inputs)
            for c in found
            for s in [c.shape]
        }
        rows = {
            (
                r.direction,
                r.batch,
                r.nheads,
                r.nheads_kv,
                r.seqlen_q,
                r.head_dim,
                r.causal,
                r.inputs,
            )
            for r in result.rows
        }
        assert rows <= kinds, result.path.name
        assert {r.provider for r in result.rows} == set(asked.only)


def _whole_training(measured):
    """A result of which standard attention and torch's own came to the end."""
    return next(
        r
        for r in measured.results()
        if r.suite == "train" and {"standard", "sdpa"} <= r.content["training"]["runs"].keys()
    )


def test_training_that_ended_early_has_its_reason(measured, tmp_path):
    found = _whole_training(measured)
    content = json.loads(found.path.read_text())
    model = content["training"]["config"]["model"]
    model.update(name="gpt2-medium", dropout_p=0.1)
    row = next(r for r in content["rows"] if r["features"]["run"] == "standard")
    del content["training"]["runs"]["standard"]
    row.update(ms=None, error="OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.")
    row["features"] = {"run": "standard"}
    changed = measured.Result(tmp_path / "2099-01-02-train-somewhere.json", content)
    page = measured._training(changed)
    assert "- standard: OutOfMemoryError: CUDA out of memory\n" in page + "\n"
    line = next(line for line in page.splitlines() if line.startswith("| standard |"))
    assert set(line.split("|")[2:5]) == {" - "}
    command = measured.command(changed).replace("\\\n", " ")
    assert "--model gpt2-medium --dropout 0.1 " in command
    asked = cli.parser().parse_args(shlex.split(command)[1:])
    assert (asked.model, asked.dropout) == ("gpt2-medium", 0.1) and "standard" not in asked.only


def test_training_by_rivals(measured, monkeypatch, tmp_path):
    found = _whole_training(measured)
    content = json.loads(found.path.read_text())
    runs, gaps = (content["training"][key] for key in ("runs", "largest_gap_to_standard"))
    row = next(r for r in content["rows"] if r["features"]["run"] == "sdpa")
    runs["flash-attn"], gaps["flash-attn"] = {**runs["sdpa"], "attention": "flash-attn"}, 0.125
    features = {**row["features"], "run": "flash-attn"}
    content["rows"].append({**row, "provider": "flash-attn", "features": features})
    features = {"run": "fa4", "seed": 0}
    error = "fa4 has no dropout"
    content["rows"].append(
        {**row, "provider": "fa4", "ms": None, "error": error} | {"features": features}
    )
    path = tmp_path / "2099-01-02-train-somewhere.json"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(measured, "DRAWN", tmp_path / "drawn")
    page = measured.page()
    assert "- fa4: fa4 has no dropout" in page and "| 1.2e-01 |" in page
    assert len(list((tmp_path / "drawn").glob("*.svg"))) == 1
    (result,) = measured.results()
    asked = cli.parser().parse_args(shlex.split(measured.command(result).replace("\\\n", " "))[1:])
    assert set(asked.only) == {r.features["run"] for r in result.rows} - {"fa4"}


def test_a_new_file_is_a_new_section(measured, monkeypatch, tmp_path):
    newest = measured.results()[-1].path
    shutil.copy(newest, tmp_path / "2099-01-02-fwd-somewhere.json")
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(measured, "DRAWN", tmp_path / "drawn")
    page = measured.page()
    assert page.startswith("## Forward, somewhere, 2099-01-02\n")
    assert len(list((tmp_path / "drawn").glob("*.svg"))) == 1
