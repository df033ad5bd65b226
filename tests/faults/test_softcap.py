"""The softcap's formula and gradient, and choices that alternate in one process: C08."""

import itertools

import pytest
import torch

from .tools import F64, SELF, band_mask, check, near, noted, plain_twin, rand, run

pytestmark = pytest.mark.usefixtures("poisoned")

# out, lse, dq, dk0, dk1, dk2 of the call below
WANT = {
    3.0: [-0.384633835, 2.971477313, 0.046685845, 0.538208314, -0.208376903, 0.028082816],
    6.0: [-0.645254118, 3.689746747, -0.141249108, 0.507255342, -0.386269685, 0.017214188],
    0.0: [-0.755577964, 4.129108909, -0.226823380, 0.417628248, -0.429634419, 0.012006171],
}


@pytest.mark.parametrize("entry", ["dense", "kvpacked", "varlen", "varlen_kvpacked"])
def test_c08_the_written_values_with_caps_alternating(entry, backend, dtype):
    """C08 Dao-AILab/flash-attention#2402: wrong factor, no backward, one kernel for two caps."""
    q = torch.tensor([2.0], dtype=dtype).view(1, 1, 1, 1)
    k = torch.tensor([1.0, 2.0, -1.0], dtype=dtype).view(1, 3, 1, 1)
    v = torch.tensor([1.0, -1.0, 2.0], dtype=dtype).view(1, 3, 1, 1)
    for cap in (3.0, 6.0, 3.0, 0.0, 6.0):
        got = run(entry, backend, q, k, v, softcap=cap, softmax_scale=1.0)
        plain = plain_twin(q, k, v, softcap=cap, scale=1.0)
        want = torch.tensor(WANT[cap], dtype=F64)
        # the case allows 1e-6
        tolerance = 1e-6 if dtype in (F64, torch.float32) else None
        for name, number in (("out", want[0]), ("lse", want[1]), ("dq", want[2])):
            near(got[name].flatten(), number[None], dtype, name, plain[name].flatten(), tolerance)
        near(got["dk"].flatten(), want[3:], dtype, "dk", plain["dk"].flatten(), tolerance)


@pytest.mark.parametrize("entry", SELF)
def test_c08_softcap_against_the_formula(entry, backend, dtype):
    """C08: from a cap that flattens most to one that does nothing."""
    for cap in (0.25, 1.0, 50.0, 1e6):
        with noted(cap):
            q, k, v = (rand(2, 31, 2, 8, seed=s, scale=2.0, dtype=dtype) for s in (1, 2, 3))
            dlse = rand(2, 2, 31, seed=4)
            got = run(entry, backend, q, k, v, softcap=cap, dlse=dlse)
            check(got, q, k, v, softcap=cap, dlse=dlse)


@pytest.mark.parametrize("causal", [False, True])
def test_c08_softcap_across_tiles(causal, backend):
    """C08: several tiles, with a bias that is added after the cap."""
    q, k, v = (rand(1, s, 2, 8, seed=n, scale=3.0) for n, s in enumerate((600, 530, 530)))
    bias = rand(1, 2, 600, 530, seed=5)
    seen = band_mask(600, 530, -1, 0) if causal else None
    got = run("dense", backend, q, k, v, attn_bias=bias, softcap=2.0, causal=causal)
    check(got, q, k, v, attn_bias=bias, softcap=2.0, seen=seen)


CHOICES = {
    "causal": (False, True),
    "window": ((-1, -1), (2, 1)),
    "scale": (0.25, 1.5),
    "head_dim": (8, 24),
    "dtype": (F64, torch.float32),
    "strided": (False, True),
    "softcap": (0.0, 2.0),
}


@pytest.mark.parametrize("entry", ["dense", "qkvpacked", "varlen"])
@pytest.mark.parametrize("choice", CHOICES)
def test_c08_every_other_choice_alternates_in_one_process(choice, entry, backend):
    """C08: what one call was prepared with must not be taken for the next call."""
    first, second = CHOICES[choice]
    plain = {name: values[0] for name, values in CHOICES.items()}
    for value in (first, second, first, second):
        one_call(entry, backend, **{**plain, choice: value})


def test_c08_all_choices_in_one_process(backend):
    """C08: all 128 combinations, each after another."""
    for values in itertools.product(*CHOICES.values()):
        one_call("dense", backend, **dict(zip(CHOICES, values, strict=True)))


def one_call(entry, backend, causal, window, scale, head_dim, dtype, strided, softcap):
    q, k, v = (rand(1, 6, 2, head_dim, seed=s, dtype=dtype) for s in (1, 2, 3))
    if strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    right = 0 if causal else window[1]
    got = run(
        entry, backend, q, k, v, causal=causal, window_size=window, softmax_scale=scale,
        softcap=softcap,
    )  # fmt: skip
    check(got, q, k, v, seen=band_mask(6, 6, window[0], right), scale=scale, softcap=softcap)
