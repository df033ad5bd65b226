"""examples/train_gpt.py as a user runs it."""

import io
import re

import pytest
import torch

SIZES = {"seq-len": 48, "layers": 2, "d-model": 32, "n-heads": 2, "batch": 4}
SMALL = [f"--{name}={n}" for name, n in {**SIZES, "log-every": 1, "sample": 16}.items()]
DEVICE = ["--device", "cpu"]


@pytest.fixture(scope="module")
def module(load):
    return load("train_gpt.py")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(500)))
    return path


def losses(output):
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.fixture(scope="module")
def trained(example, text, tmp_path_factory):
    """What 40 steps with dropout print and save."""
    path = tmp_path_factory.mktemp("trained") / "gpt.pt"
    output = train(example, text, steps=40, more=["--dropout", "0.1", "--save", path])
    return output, torch.load(path, weights_only=True)


def train(example, text, steps, more=(), device=DEVICE, **expected):
    arguments = ["--text", text, "--steps", steps, *SMALL, *device, *more]
    return example("train_gpt.py", *arguments, **expected).stdout


def test_learns_and_writes(trained):
    output, saved = trained
    printed = losses(output)
    assert len(printed) == 40 and printed == [round(x, 6) for x in saved["losses"]]
    assert printed[0] == pytest.approx(5.545, abs=0.1)  # ln 256
    assert printed[-1] < printed[0] - 1.5
    assert re.search(r"[\d,]+ tokens/s  peak +[\d,]+ MiB", output)
    assert len(output.split("gpt.pt\n")[1].encode()) >= 16  # the sample after "saved"


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_resuming_changes_no_bit(example, text, trained, tmp_path):
    half, whole = tmp_path / "half.pt", tmp_path / "whole.pt"
    dropout = ["--dropout", "0.1"]
    train(example, text, steps=20, more=[*dropout, "--save", half])
    output = train(example, text, steps=40, more=[*dropout, "--resume", half, "--save", whole])
    assert len(losses(output)) == 20
    assert equal(torch.load(whole, weights_only=True), trained[1])


def test_activation_checkpointing_changes_no_bit(example, text, trained):
    output = train(example, text, steps=6, more=["--dropout", "0.1", "--checkpoint"])
    assert losses(output) == losses(trained[0])[:6]


@pytest.mark.parametrize("window", [[], ["--window", "8"]], ids=["full", "window"])
def test_every_attention_takes_the_same_steps(example, text, window):
    runs = {
        name: losses(train(example, text, steps=6, more=["--attention", name, *window]))
        for name in ("tilewise", "standard", "sdpa")
    }
    for name in ("standard", "sdpa"):
        assert runs["tilewise"] == pytest.approx(runs[name], abs=1e-5)


POSITIVE = ["n-heads", "seq-len", "batch", "steps", "layers", "d-model", "log-every"]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("number", ["0", "-1", "1.5"])
def test_refuses_what_is_not_positive(module, refused, name, number):
    assert refused(module.main, f"--{name}", number).startswith(f"argument --{name}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-heads", "3"], "--d-model must be a multiple of --n-heads"),
        (["--window", "-2"], "argument --window: -2 is less than -1"),
        (["--sample", "-1"], "argument --sample: -1 is less than 0"),
        (["--prompt", ""], "--prompt: give at least one character"),
        *((["--dropout", p], f"--dropout: {p} is not in [0, 1)") for p in ("-0.1", "1", "nan")),
        *(
            (["--learning-rate", x], f"--learning-rate: {x} is not positive and finite")
            for x in ("0", "-0.1", "nan", "inf")
        ),
        (["--learning-rate", "fast"], "argument --learning-rate: invalid rate value: 'fast'"),
        (["--device", "cuda"], "--device cuda: torch.cuda.is_available() is False"),
        (["--text", "missing"], "argument --text: missing: No such file"),
        (["--text", "folder"], "argument --text: folder: Is a directory"),
        (["--text", "empty"], "--text has 0 bytes"),
        (["--seq-len", "1000000"], "a shorter --seq-len"),
        (["--save", "no/such/folder.pt"], "argument --save: there is no folder no/such"),
        (["--save", "folder"], "argument --save: folder is a folder"),
        (["--save", ""], "argument --save: . is a folder"),
        (["--resume", "missing"], "argument --resume: missing: No such file"),
        (["--resume", "folder"], "argument --resume: folder: Is a directory"),
        *(
            (["--resume", name], f"argument --resume: {name}: not a file that --save wrote")
            for name in ("empty", "text", "half.pt", "other.pt", "tensor.pt")
        ),
    ],
)
def test_says_what_is_wrong(module, text, refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"model": {}}, tmp_path / "other.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    whole = (tmp_path / "other.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    assert message in refused(module.main, "--text", text, *SMALL, *DEVICE, *arguments)


def test_says_why_it_cannot_resume(module, text, refused, capsys, tmp_path):
    path = tmp_path / "gpt.pt"
    arguments = ["--text", str(text), *SMALL, *DEVICE]
    module.main([*arguments, "--steps", "2", "--save", str(path)])
    capsys.readouterr()
    arguments += ["--resume", str(path)]
    assert "--steps 1: --resume has taken 2" in refused(module.main, *arguments, "--steps", 1)
    assert "give --n-heads 2" in refused(module.main, *arguments, "--n-heads", 4)
    module.main([*arguments, "--steps", "2"])  # only samples
    assert not losses(capsys.readouterr().out)


def test_one_byte_at_a_time(module, text, capsys):
    module.main(["--text", str(text), *SMALL, *DEVICE, "--seq-len", "1", "--steps", "2"])
    assert len(losses(capsys.readouterr().out)) == 2


def test_reads_standard_input_and_writes_ascii(module, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc \xff" * 100)))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    # the sample's bytes that begin no character are decoded as U+FFFD; "\udce9" is a typed \xe9
    more = ["--text", "-", "--steps", "1", "--sample", "300", "--prompt", "\udce9"]
    module.main([*SMALL, *DEVICE, *more])
    assert b" 500 bytes\n" in written.getvalue() and b"??" in written.getvalue()


@pytest.mark.gpu
@pytest.mark.parametrize("more", [[], ["--compile"], ["--compile", "--checkpoint"]], ids=" ".join)
def test_learns_on_a_gpu(example, text, more):
    sizes = ["--d-model", "128", "--n-heads", "2", "--seq-len", "128", "--dropout", "0.1"]
    device = ["--device", "cuda", "--dtype", "bfloat16"]
    printed = losses(train(example, text, steps=40, more=[*sizes, *more], device=device))
    assert len(printed) == 40 and printed[-1] < printed[0] - 1.5


@pytest.mark.gpu
def test_every_attention_takes_the_same_steps_on_a_gpu(example, text):
    sizes = ["--d-model", "128", "--n-heads", "2", "--seq-len", "128"]
    device = ["--device", "cuda", "--dtype", "bfloat16"]
    runs = [
        losses(train(example, text, steps=6, more=[*sizes, "--attention", name], device=device))
        for name in ("tilewise", "standard", "sdpa")
    ]
    assert runs[0] == pytest.approx(runs[1], abs=0.02)
    assert runs[0] == pytest.approx(runs[2], abs=0.02)
