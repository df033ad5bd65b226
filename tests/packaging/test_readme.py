"""What the README says is so."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_feature_table_is_the_code_s():
    subprocess.run([sys.executable, ROOT / "tools/readme_table.py", "--check"], check=True)


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    scope: dict = {}
    exec(example, scope)
    assert scope["q"].grad.isfinite().all()
    assert scope["q"].grad.abs().max() > 0
    assert capsys.readouterr().out.startswith("cpu (fa2)")
