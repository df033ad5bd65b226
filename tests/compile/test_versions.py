"""Each kernel compiles on every supported version of Triton, not only the pinned one.

One row of each kernel, on sm_90 and with the features that touch most of Triton; the whole matrix
runs on the pinned version (``test_rows.py``, ``test_features.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewise.kernels import compat

from .checks import compiles

pytestmark = pytest.mark.compile

VERSIONS = ("3.6.0", "3.8.0", "3.9.0")
CALLS = {
    "fwd": ["dropout", "softcap"],
    "bwd_preprocess": [],
    "bwd_dkdv": ["dropout", "softcap"],
    "bwd_dq": ["dropout", "softcap"],
    "bwd_dbias": ["attn_bias"],
    "fa1_fwd": ["varlen"],
    "fa1_bwd": ["varlen"],
}


def test_the_versions_are_those_that_do_not_warn() -> None:
    assert {".".join(v.split(".")[:2]) for v in VERSIONS} | {"3.7"} == set(compat.TESTED)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kernel", CALLS)
def test_a_kernel_compiles_on_another_triton(
    version: str, kernel: str, compiler: Callable[..., Any]
) -> None:
    call = {"kernel": kernel, "head_dim": 64, "mask": "causal", "features": CALLS[kernel]}
    facts = compiles(compiler(version, **call, arch="sm_90"), "sm_90")
    assert facts["triton"] == version


@pytest.mark.parametrize("version", ["", *VERSIONS])
def test_tensor_descriptors_compile(version: str, compiler: Callable[..., Any]) -> None:
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "use_tma": True}
    call = {"kernel": "fwd", "head_dim": 64, "config": config, "arch": "sm_90"}
    facts = compiles(compiler(version, **call), "sm_90")
    assert facts["cp.async.bulk.tensor"] > 0
