"""What commands write to a terminal: aligned tables, and progress on stderr."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

_PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal
_BAR = 30


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns aligned by spaces: the first ``left`` to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


class Progress:
    """A bar on stderr: rich's on a terminal that has rich, else plain text.

    Without a terminal it writes a line every ten seconds and one at the end.
    """

    def __init__(self, total: int, title: str) -> None:
        self._total, self._title = total, title
        self._done, self._text = 0, ""
        self._started = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._rich = _rich_bar() if self._terminal else None
        self._task = self._rich.add_task(title, total=total, text="") if self._rich else None

    def __enter__(self) -> Self:
        if self._rich:
            self._rich.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rich:
            self._rich.stop()
        else:
            self._write(end="\n")

    def advance(self, text: str = "", steps: int = 1) -> None:
        """Moves the bar and says what is going on."""
        self._done += steps
        self._text = text
        if self._rich:
            self._rich.update(self._task, advance=steps, text=text)
        elif self._terminal:
            self._write(start="\r", end="\x1b[K")
        elif time.monotonic() - self._last > _PLAIN_INTERVAL:
            self._last = time.monotonic()
            self._write(end="\n")

    def _write(self, start: str = "", end: str = "") -> None:
        filled = _BAR * self._done // max(1, self._total)
        bar = "#" * filled + "." * (_BAR - filled)
        elapsed = time.monotonic() - self._started
        count = f"{self._done}/{self._total}"
        text = f"{start}{self._title} [{bar}] {count} {elapsed:.0f} s {self._text}".rstrip()
        print(text, end=end, file=sys.stderr, flush=True)


def _rich_bar() -> Any:
    """rich's progress bar, or None without rich."""
    if importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
        console=Console(stderr=True),
    )
