"""Every feature alone and every pair of features, against the float64 oracle."""

import pytest
import torch

from tilewise.testing import CASES, make_inputs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_results_and_gradients_are_within_the_rule(case, dtype, engine, assert_agrees):
    got = assert_agrees(make_inputs(case, dtype), engine)
    assert got.out.dtype == dtype and got.out.is_contiguous()
    assert got.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, gradient in got.items():
        if name in ("dq", "dk", "dv", "dbias"):
            assert gradient.dtype == dtype, name
