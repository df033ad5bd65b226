"""Result files: what was measured, on which board, from which commit."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch

from .providers import DIRECTIONS, Provider, Shape

_PACKAGE = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "TILEWISE_COMMIT"


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one provider in one call; what was not measured is None.

    ``suite`` is the table that the row belongs to, ``direction`` what was timed: "fwd", "bwd" or
    "fwd_bwd". A row without numbers says in ``error`` why there are none.
    """

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
    direction: str | None = None
    error: str | None = None
    inputs: str = "randn"
    lengths: list[int] = field(default_factory=list)
    features: dict[str, Any] = field(default_factory=dict)


def row(
    suite: str,
    provider: Provider,
    shape: Shape,
    protocol: str,
    *,
    direction: str | None = None,
    seconds: float | None = None,
    peak: int | None = None,
    error: str | None = None,
) -> Row:
    """The row of a time in seconds, of a peak in bytes, of both, or of the reason for neither.

    ``direction`` may be left out where the suite is one.
    """
    direction = direction or suite
    assert direction in DIRECTIONS, direction
    return Row(
        suite=suite,
        provider=provider.name,
        provider_version=provider.version,
        protocol=protocol,
        dtype=shape.dtype,
        batch=shape.batch,
        nheads=shape.nheads,
        nheads_kv=shape.heads_kv,
        seqlen_q=shape.seqlen,
        seqlen_k=shape.seqlen,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim,
        causal=shape.causal,
        ms=None if seconds is None else seconds * 1e3,
        tflops=None if seconds is None else shape.flops(direction) / seconds / 1e12,
        peak_mib=None if peak is None else peak / 2**20,
        direction=direction,
        error=error,
        inputs=shape.inputs,
        lengths=list(shape.lengths),
        features={"dropout_p": shape.dropout_p} if shape.dropout_p > 0 else {},
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

    The environment variable TILEWISE_COMMIT comes first, for a package that git does not track or a
    copy beside another history; nothing is then known of its being dirty.
    """
    named = os.environ.get(COMMIT_VARIABLE)
    if named is not None or _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return named, None
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "."))


def driver_version() -> str | None:
    """The NVIDIA driver's version as nvidia-smi gives it; None where there is no such program."""
    line = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    versions = done.stdout.split()
    return versions[0] if done.returncode == 0 and versions else None


def board(device: str = "cpu") -> dict[str, Any]:
    """The machine, the versions and the commit that a measurement on ``device`` belongs to."""
    found, dirty = commit()
    gpu = {}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        gpu = {
            "gpu": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "driver": driver_version(),
            "cudnn": torch.backends.cudnn.version(),
        }
    return {
        **gpu,
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": found,
        "dirty": dirty,
    }


def machine(board: dict[str, Any]) -> str:
    """The board in a few words, for a title."""
    if "gpu" in board:
        return f"{board['gpu']}, torch {board['torch']}"
    return f"{board['cpu']}, {board['threads']} threads, torch {board['torch']}"


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a reader, or a kill, never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def write(path: Path, rows: list[Row], **extra: Any) -> None:
    """Writes ``{"board": ..., "rows": [...]}`` and ``extra`` beside them; makes the folder."""
    Output(path, None, board()).save(rows, **extra)


def as_csv(rows: list[Row]) -> str:
    """A header and a line for each row; lists and mappings as JSON, an absent number empty."""
    out = io.StringIO()
    names = [f.name for f in fields(Row)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row)
        for name in ("lengths", "features"):
            cells[name] = json.dumps(cells[name])
        writer.writerow(cells)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Output:
    """Where a run's rows go, written anew after each cell so that a killed run leaves its rows.

    Attributes:
        json: the result file, or None.
        csv: the rows alone as CSV, or None.
        board: read once, when the run starts.
    """

    json: Path | None
    csv: Path | None
    board: dict[str, Any]

    @classmethod
    def of(cls, json: Path | None, csv: Path | None, device: str) -> Self:
        """Of a run on ``device`` that starts now."""
        return cls(json, csv, board(device))

    def save(self, rows: list[Row], **extra: Any) -> None:
        """Writes the files that were asked for; ``extra`` stands beside the rows in the JSON."""
        if self.json is not None:
            content = {"board": self.board, "rows": [asdict(r) for r in rows], **extra}
            _replace(self.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
        if self.csv is not None:
            _replace(self.csv, as_csv(rows))

    def names(self) -> list[Path]:
        """The files that ``save`` writes."""
        return [path for path in (self.json, self.csv) if path is not None]
