"""examples/embed.py as a user runs it."""

import re

import pytest

pytest.importorskip("transformers")
LINES = "Cats purr.\nA cat makes a low sound when it is content and someone strokes it.\nTaxes.\n"
QUICK = ["--device", "cpu", "--repeats", "1"]


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


def test_reads_files_and_says_what_to_do(load, tmp_path):
    module = load("embed.py")
    with pytest.raises(SystemExit, match=r"no config\.json"):
        module.model_folder(tmp_path)
    lines = tmp_path / "lines.txt"
    lines.write_text("One.\n\n Two.\n")
    assert module.read_sentences(str(lines)) == ["One.", "Two."]
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(SystemExit, match="no sentences; give one a line"):
        module.read_sentences(str(empty))
