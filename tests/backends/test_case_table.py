"""Every feature alone and every pair of features, against the float64 oracle."""

from dataclasses import replace

import pytest
import torch

from tilewise.testing import CASES, make_inputs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SINGLES = [case for case in CASES if len(case.features) < 2]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def check(case, dtype, engine, assert_agrees):
    got = assert_agrees(make_inputs(case, dtype), engine)
    assert got.out.dtype == dtype and got.out.is_contiguous()
    assert got.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, gradient in got.items():
        if name in ("dq", "dk", "dv", "dbias"):
            assert gradient.dtype == dtype, name


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_results_and_gradients_are_within_the_rule(case, dtype, engine, assert_agrees):
    check(case, dtype, engine, assert_agrees)


# By Triton's interpreter, which takes its time: few heads, and pairs on a batch of one. Whole
# tables are tests/device's.
FEW = [replace(case, nheads=2, batch=2 if case in SINGLES else 1) for case in CASES]
INTERPRETED = [
    *(("fa2", torch.float32, case) for case in FEW),
    *(("fa2", torch.float16, case) for case in (*FEW[: len(SINGLES)], *FEW[len(SINGLES) :: 6])),
    *(("fa1", torch.float32, case) for case in FEW[: len(SINGLES)]),
]


@pytest.mark.interpret
@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of log2(0)
@pytest.mark.parametrize(
    ("algorithm", "dtype", "case"),
    INTERPRETED,
    ids=lambda x: x if isinstance(x, str) else getattr(x, "id", None) or name_of(x),
)
def test_kernels_are_within_the_rule(algorithm, dtype, case, assert_agrees):
    check(case, dtype, {"backend": "triton", "algorithm": algorithm}, assert_agrees)
