"""examples/train_gpt.py as a user runs it."""

import re

import pytest
import torch

SIZES = {"seq-len": 48, "layers": 2, "d-model": 32, "n-heads": 2, "batch": 4}
SMALL = [f"--{name}={n}" for name, n in {**SIZES, "log-every": 1, "sample": 16}.items()]
DEVICE = ["--device", "cpu"]


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
    other = ["--resume", half, "--n-heads", "4"]
    said = example("train_gpt.py", "--text", text, *SMALL, *DEVICE, *other, status=1).stderr
    assert "give --n-heads 2" in said


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-heads", "3"], "multiple of --n-heads"),
        (["--save", "no/such/folder.pt"], "no folder no/such"),
        (["--seq-len", "1000000"], "shorter --seq-len"),
    ],
)
def test_says_what_to_do(load, text, arguments, message, capsys):
    module = load("train_gpt.py")

    def start():
        options = module.options_of([*SMALL, *DEVICE, *arguments])
        module.read_text(text, options.seq_len)

    with pytest.raises(SystemExit) as stopped:
        start()
    assert message in capsys.readouterr().err + str(stopped.value)


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
