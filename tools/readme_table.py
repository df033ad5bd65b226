"""Writes README.md's feature table from core/features.py; with --check, says if it would."""

import sys
from pathlib import Path

from tilewise.core.features import markdown_table

README = Path(__file__).parents[1] / "README.md"
START, STOP = "by tools/readme_table.py -->\n", "<!-- /features -->"


def updated(text: str) -> str:
    head, rest = text.split(START)
    return f"{head}{START}{markdown_table()}\n{STOP}{rest.split(STOP)[1]}"


if __name__ == "__main__":
    before = README.read_text()
    after = updated(before)
    if "--check" in sys.argv:
        sys.exit(before != after)
    README.write_text(after)
