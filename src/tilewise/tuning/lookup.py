"""The configuration of a kernel for a call."""

from __future__ import annotations

from ..core.config import TileConfig
from ..core.problem import AttentionProblem


def config(kernel: str, arch: str, problem: AttentionProblem) -> TileConfig:
    """The configuration of a kernel.

    Args:
        kernel: "fwd", "bwd_dkdv", "bwd_dq", "bwd_dbias", "fa1_fwd" or "fa1_bwd".
        arch: such as "sm_90" or "gfx942", or "interpret".
        problem: the call.
    """
    d = max(problem.head_dim, problem.head_dim_v)
    if arch == "interpret":
        return TileConfig(32, 32, 4, 1)
    if problem.dtype == "float32":
        return TileConfig(32, 32, 4, 1) if d > 64 else TileConfig(64, 32, 4, 2)
    if kernel == "fwd":
        if d <= 128:
            return TileConfig(128, 64, 8, 3)
        return TileConfig(128, 64, 8, 2) if d <= 256 else TileConfig(64, 32, 8, 1)
    if d <= 64:
        return TileConfig(64, 128, 8, 2) if kernel == "bwd_dkdv" else TileConfig(128, 64, 8, 2)
    if d <= 128:
        return TileConfig(64, 128, 8, 2) if kernel == "bwd_dkdv" else TileConfig(128, 64, 8, 2)
    if d <= 256:
        return TileConfig(32, 64, 8, 1) if kernel == "bwd_dkdv" else TileConfig(64, 32, 8, 1)
    return TileConfig(32, 32, 8, 1)
