"""The Python of README.md and the pages runs, a page in one namespace; shell lines are right."""

import re
import shlex
from pathlib import Path
from unittest import SkipTest

import pytest
import torch

pytest.importorskip("sybil", reason="the extra 'docs' is not installed")

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tilewise import cli
from tilewise.integrations import flash_attn, sdpa

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SYBIL = Sybil([PythonCodeBlockParser(), SkipParser()], path=str(ROOT), pattern="*.md")
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.S | re.M)
_PROGRAMS = ("tilewise", "make", "pytest", "pip", "python")


@pytest.fixture
def _as_before():
    yield
    flash_attn.uninstall()
    sdpa.deactivate()
    torch.use_deterministic_algorithms(False)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name_of)
def test_python_runs(page, subtests):
    for example in SYBIL.parse(page).examples():
        with subtests.test(f"{name_of(page)}, line {example.line}"):
            try:
                example.evaluate()
            except SkipTest as reason:
                pytest.skip(str(reason))


def shell_lines():
    for page in PAGES:
        for block in _SHELL.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] in _PROGRAMS:
                    yield pytest.param(words, id=f"{page.stem}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(shell_lines()))
def test_a_shell_line_is_right(words):
    program, *arguments = words
    if program == "tilewise":
        cli.parser().parse_args(arguments)
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets)
    elif program == "python":
        options = (ROOT / arguments[0]).read_text()
        for word in arguments[1:]:
            assert not word.startswith("-") or f'"{word}"' in options, word
    elif program == "pytest":
        assert (ROOT / arguments[0]).is_dir()
        if "-m" in arguments:
            markers = (ROOT / "pyproject.toml").read_text()
            assert f'"{arguments[arguments.index("-m") + 1]}: ' in markers
    else:
        (name,) = (w for w in arguments if w not in ("install", "-e"))
        extras = re.findall(r"\[(\w+)\]", name)
        for extra in extras:
            assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
