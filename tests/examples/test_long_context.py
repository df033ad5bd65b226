"""examples/long_context.py: as a user runs it, and whether its check sees what is wrong."""

import re
from dataclasses import replace

import pytest
import torch

import tilewise

NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def module(load):
    return load("long_context.py")


def call(module, mask, nheads=2, nheads_kv=1, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, mask.seqlen, heads, 32, dtype=dtype)
        for heads in (nheads, nheads_kv, nheads_kv, nheads)
    )
    return module.run(q, k, v, dout, mask)[0]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", []),
        ("float16", ["--no-causal", "--window", "50"]),
        ("bfloat16", ["--window", "100", "--n-heads-kv", "2"]),
    ],
)
def test_is_right(example, options, dtype):
    arguments = ["--device", "cpu", "--seq-len", 700, "--dtype", dtype]
    output = example("long_context.py", *arguments, *options).stdout
    assert output.endswith("right\n")
    errors = dict(re.findall(r"(\w+) (\d\.\de[-+]\d+)", output.splitlines()[-2]))
    assert set(errors) == set(NAMES)
    assert len(re.findall(r"ward +[\d.]+ s +[\d.]+ TFLOPS", output)) == 2
    assert "the score matrix of standard attention" in output


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 20])
def test_the_check_passes_float64(module, causal, window):
    mask = module.Mask(300, causal, window)
    errors = module.check(call(module, mask, dtype=torch.float64), mask, seed=0)
    # lse is float64 too, and the scale that errors are relative to is not zero
    assert max(errors.values()) < 1e-13


def test_the_check_sees_each_wrong_result(module):
    mask = module.Mask(300, True, -1)
    right = call(module, mask)
    limit = module.LIMITS[torch.float32]
    assert max(module.check(right, mask, 0).values()) < limit
    for name in NAMES:
        wrong = replace(right, **{name: getattr(right, name) * 1.001})
        assert module.check(wrong, mask, 0)[name] > limit, name
        lost = replace(right, **{name: torch.full_like(getattr(right, name), float("nan"))})
        assert module.check(lost, mask, 0)[name] == float("inf"), name


@pytest.mark.parametrize("wrong", [(True, 20), (False, 19), (False, -1)])
def test_the_check_sees_a_wrong_mask(module, wrong):
    mask, taken = module.Mask(300, False, 20), module.Mask(300, *wrong)
    errors = module.check(call(module, taken), mask, 0)
    assert min(errors.values()) > module.LIMITS[torch.float32]


def test_pairs_are_those_that_are_seen(module):
    every = torch.arange(30)
    for causal in (True, False):
        for window in (-1, 0, 4, 40):
            mask = module.Mask(30, causal, window)
            assert mask.pairs() == mask.sees(every, every).sum()


def test_the_status_of_a_wrong_result_is_1(module, monkeypatch, capsys):
    right = tilewise.flash_attn_func
    arguments = ["--device", "cpu", "--seq-len", "300", "--n-heads", "1"]
    assert module.main(arguments) == 0

    def without_the_mask(*tensors, causal, **others):
        return right(*tensors, **others | {"window_size": (-1, -1)})

    monkeypatch.setattr(tilewise, "flash_attn_func", without_the_mask)
    assert module.main(arguments) == 1
    assert "WRONG" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--seq-len", "--d-head", "--n-heads", "--n-heads-kv"])
@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_refuses_what_is_not_positive(module, refused, name, number):
    assert refused(module.main, name, number).startswith(f"argument {name}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-heads", "4", "--n-heads-kv", "3"], "--n-heads, 4, must be a multiple"),
        (["--n-heads-kv", "999"], "must be a multiple of --n-heads-kv, 999"),
        (["--window", "-2"], "argument --window: -2 is less than -1"),
        (["--device", "cuda"], "--device cuda: torch.cuda.is_available() is False"),
    ],
)
def test_says_what_is_wrong(module, refused, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in refused(module.main, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [[], ["--no-causal"], ["--window", "1000", "--n-heads", "8", "--n-heads-kv", "2"]],
)
def test_is_right_on_a_gpu(example, options, dtype):
    arguments = ["--device", "cuda", "--seq-len", 32768, "--dtype", dtype]
    assert example("long_context.py", *arguments, *options).stdout.endswith("right\n")


@pytest.mark.gpu
@pytest.mark.alone
def test_256k_tokens_are_right_on_a_gpu(example):
    output = example("long_context.py", "--device", "cuda").stdout
    assert "262,144 tokens" in output and "cannot be held" in output
    assert output.endswith("right\n")
