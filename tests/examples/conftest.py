"""Runs the examples as a user does: in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Example = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """``load(name)``: the example as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, spec.name, module)  # where dataclasses look
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(main, *arguments)``: the line that says why; the status is 2."""

    def refused(main: Callable[[list[str]], object], *arguments: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert stopped.value.code == 2 and not printed.out
        said = printed.err.partition(": error: ")[2]
        assert said.count("\n") == 1
        return said

    return refused


@pytest.fixture(scope="session")
def example() -> Example:
    """``example(name, *arguments, status=0, text="")``: the finished process, its status held."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("TRITON_INTERPRET", None)  # users interpret no kernels
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    )

    def run(
        name: str, *arguments: object, status: int | None = 0, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, *map(str, arguments)],
            env=environment, input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    return run
