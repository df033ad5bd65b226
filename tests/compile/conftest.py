"""Child processes that compile: Triton is interpreted in the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Beside the one in the environment; tools/setup.sh puts them there.
TRITONS = Path(sys.prefix) / "tritons"


class Compiler:
    """One process of ``tools/compiling.py``, with one version of Triton."""

    def __init__(self, cache: Path, version: str) -> None:
        paths = [str(ROOT / "src")]
        if version:
            folder = TRITONS / version
            if not (folder / "triton").is_dir():
                pytest.fail(
                    f"Triton {version} is not in {TRITONS}; run: {sys.executable} -m pip install "
                    f"--no-deps --target {folder} triton=={version}",
                    pytrace=False,
                )
            paths.insert(0, str(folder))
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRITON_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "compiling.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **fields: Any) -> Any:
        """The answer to one line of ``tools/compiling.py``."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the compiling process died"
        answer = json.loads(line)
        assert isinstance(answer, list), answer["error"]
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def compiler(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """``compiler(version="", **fields)``: what ``tools/compiling.py`` says, on a Triton version."""
    assert request.config.cache is not None
    cache = request.config.cache.mkdir("tilewise-triton")
    compilers: dict[str, Compiler] = {}

    def ask(version: str = "", **fields: Any) -> Any:
        if version not in compilers or compilers[version].process.poll() is not None:
            compilers[version] = Compiler(cache, version)
        return compilers[version].ask(**fields)

    yield ask
    for compiler in compilers.values():
        compiler.stop()
