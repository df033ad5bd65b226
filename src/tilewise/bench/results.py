"""Result files: what was measured, on which board, from which commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .providers import Provider, Shape

_PACKAGE = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "TILEWISE_COMMIT"


@dataclass(frozen=True, slots=True)
class Row:
    """One number of one provider; what was not measured is None."""

    suite: str
    provider: str
    provider_version: str | None
    protocol: str
    dtype: str
    batch: int
    nheads: int
    nheads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    ms: float | None = None
    tflops: float | None = None
    peak_mib: float | None = None
    inputs: str = "randn"
    lengths: list[int] = field(default_factory=list)
    features: dict[str, Any] = field(default_factory=dict)


def row(
    suite: str,
    provider: Provider,
    shape: Shape,
    protocol: str,
    *,
    seconds: float | None = None,
    peak: int | None = None,
) -> Row:
    """The row of a time in seconds, or of a peak in bytes."""
    return Row(
        suite=suite,
        provider=provider.name,
        provider_version=provider.version,
        protocol=protocol,
        dtype=shape.dtype,
        batch=shape.batch,
        nheads=shape.nheads,
        nheads_kv=shape.nheads,
        seqlen_q=shape.seqlen,
        seqlen_k=shape.seqlen,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim,
        causal=shape.causal,
        ms=None if seconds is None else seconds * 1e3,
        tflops=None if seconds is None else shape.flops(suite) / seconds / 1e12,
        peak_mib=None if peak is None else peak / 2**20,
    )


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """Version of an installed package, without importing it; None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in the package's folder; None when there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout that holds the package.

    A package that git does not track, such as an installed one, has the commit that the environment
    variable TILEWISE_COMMIT names, and nothing is known of its being dirty.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return os.environ.get(COMMIT_VARIABLE), None
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "."))


def board() -> dict[str, Any]:
    """The machine, the versions and the commit that a measurement belongs to."""
    found, dirty = commit()
    return {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": found,
        "dirty": dirty,
    }


def write(path: Path, rows: list[Row], **extra: Any) -> None:
    """Writes ``{"board": ..., "rows": [...]}`` and ``extra`` beside them; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"board": board(), "rows": [asdict(r) for r in rows], **extra}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
