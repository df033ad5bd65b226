"""What a compiled kernel must be."""

from __future__ import annotations

from typing import Any

from tilewise.core.config import TileConfig
from tilewise.tuning.keys import arch_of


def compiles(answer: list[dict[str, Any]], arch: str) -> dict[str, Any]:
    """The kernel of an answer, compiled, and within the device's shared memory.

    Of one that is launched more than once, that with the most spilled registers.
    """
    assert answer
    for facts in answer:
        assert "error" not in facts, f"{facts['case']}\n{facts['error']}"
        assert facts["shared"] <= arch_of(arch).shared_bytes
    return max(answer, key=lambda facts: facts["stack"])


def uses_matrix_units(facts: dict[str, Any], config: TileConfig, arch: str) -> bool:
    """Whether products of half precision run on the units that the device has for them."""
    if arch.startswith("gfx"):
        return facts["mfma"] > 0
    if arch == "sm_90" and min(config.BLOCK_M, config.BLOCK_N) >= 64:
        return facts["wgmma.mma_async"] > 0
    if arch == "sm_100" and min(config.BLOCK_M, config.BLOCK_N) >= 64:
        return facts["tcgen05.mma"] > 0
    return facts["wgmma.mma_async"] + facts["tcgen05.mma"] + facts["mma.sync"] > 0
