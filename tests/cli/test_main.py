import subprocess
import sys

import pytest

import tilewise
from tilewise.bench import fresh
from tilewise.cli import main


def test_python_m_tilewise():
    done = subprocess.run(
        fresh.command("tilewise", ["--version"]),
        env=fresh.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"tilewise {tilewise.__version__}\n"


def test_importing_tilewise_imports_no_command_and_no_plots():
    code = (
        "import sys, tilewise; print([m for m in sys.modules if m.startswith("
        "('tilewise.cli', 'tilewise.bench', 'tilewise.testing', 'matplotlib', 'rich'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=fresh.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_no_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "env" in capsys.readouterr().err
