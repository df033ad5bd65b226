"""Fresh Python processes that find this package and share the processor well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WAIT_POLICY = "OMP_WAIT_POLICY"
_ROOT = str(Path(__file__).resolve().parents[2])


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a child that imports this very package.

    OpenMP threads that spin while they wait make a small step take seconds as soon as something
    else runs on the machine. OpenMP reads the policy once, when it is loaded, so only a child can
    have it.
    """
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([_ROOT, inherited] if inherited else [_ROOT])
    return {WAIT_POLICY: "passive", **os.environ, "PYTHONPATH": path, **more}


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """``python -m module arguments`` with this process's Python."""
    return [sys.executable, "-m", module, *arguments]


def again(arguments: Sequence[str]) -> int | None:
    """Runs ``tilewise`` once more with waiting threads that do not spin.

    Returns:
        Its exit code, or None where this process already waits as its environment says.
    """
    if WAIT_POLICY in os.environ:
        return None
    return subprocess.call(command("tilewise", arguments), env=environment())
