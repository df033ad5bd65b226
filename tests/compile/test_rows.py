"""Every row of every tuning table compiles for its device, within its memory and registers.

No GPU is needed: the launchers run as they are, and what they hand to Triton is compiled to the
device's machine code (``tools/compiling.py``). Covered here are all rows, for one device kind that
reads each table - the table of sm_86 for sm_120 - and one row of each kernel for the other kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewise.tuning import feasible, lookup
from tilewise.tuning.keys import ARCHS, arch_of

from .checks import compiles, uses_matrix_units

pytestmark = pytest.mark.compile

# Beside small tiles the compiler takes this much more, to bring an output to its layout.
OUTPUT_BYTES = 16384
# The device kind that stands for each table, and others that read it.
STANDS_FOR = {"sm_86": "sm_120"}
OTHERS = {"sm_86": ("sm_86", "sm_89"), "gfx942": ("gfx950",)}


def _rows() -> list[Any]:
    cases = []
    for table in lookup.tables():
        first_of_kernel = set()
        for row in lookup.rows(table):
            archs = [STANDS_FOR.get(table, table)]
            if row.key.kernel not in first_of_kernel:
                archs += OTHERS.get(table, ())
                first_of_kernel.add(row.key.kernel)
            k = row.key
            name = f"{k.kernel}-{k.dtype}-{k.head_dim}-{k.mask}-{k.operands}"
            cases += [pytest.param(arch, row, id=f"{arch}-{name}") for arch in archs]
    return cases


def case_of(arch: str, key: Any) -> dict[str, Any]:
    """The call that a row is for, as ``tools/compiling.py`` takes it."""
    features = []
    if key.kernel == "bwd_dbias":
        features = ["attn_bias"]
    elif key.operands == "extra":
        features = ["dropout"]
    return {
        "kernel": key.kernel,
        "arch": arch,
        "dtype": "float32" if key.dtype == "float32" else "float16",
        "head_dim": key.head_dim,
        "mask": key.mask,
        "features": features,
    }


@pytest.mark.parametrize(("arch", "row"), _rows())
def test_a_row_compiles(arch: str, row: lookup.Row, compiler: Callable[..., Any]) -> None:
    assert not feasible.reasons_against(row.config, row.key, arch)
    facts = compiles(compiler(**case_of(arch, row.key)), arch)
    # a quarter more, since a row may have been made with another version of Triton
    assert facts["stack"] <= max(feasible.SPILL_BUDGET, 1.25 * row.spilled)
    if not arch.startswith("gfx"):
        most = feasible.shared_bytes(row.config, row.key, arch_of(arch))
        assert facts["shared"] <= most + OUTPUT_BYTES
    if row.key.dtype == "half":
        assert uses_matrix_units(facts, row.config, arch)
    if row.config.use_tma:
        assert facts["cp.async.bulk.tensor"] > 0


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - {"interpret", "sm_75", "gfx90a", "gfx1200"}))
def test_a_device_kind_without_rows_of_its_own_compiles(
    arch: str, compiler: Callable[..., Any]
) -> None:
    if arch_has_rows(arch):
        pytest.skip("its rows are compiled one by one")
    compiles(compiler(kernel="fwd", arch=arch, head_dim=64, mask="causal"), arch)


def arch_has_rows(arch: str) -> bool:
    return arch in lookup.tables() or arch in STANDS_FOR.values()
