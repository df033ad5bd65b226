"""The wheel holds the package, and imports where nothing else of the project is in reach."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("tilewise-*.whl")
    return path


def test_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "tilewise/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tilewise"}
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)


def test_imports_and_computes_in_a_clean_environment(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import tilewise, torch; from importlib.metadata import version, entry_points;"
        "x = torch.ones(1, 3, 1, 4); assert torch.equal(tilewise.flash_attn_func(x, x, x), x);"
        "assert version('tilewise') == tilewise.__version__; print(tilewise.__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))


def test_version_is_the_same_from_the_source_tree(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    program = "import tilewise; print(tilewise.__version__)"
    shown = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    text = (ROOT / "src/tilewise/_version.py").read_text()
    assert f'__version__ = "{shown.stdout.strip()}"' in text
