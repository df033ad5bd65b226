"""A pytest plugin: every n-th test, each outcome written as it comes, the finished left out.

``pytest -p shards --shard 3/14 --results FILE`` (with tools/ on PYTHONPATH) runs the tests number
3, 17, 31, ... of those selected. FILE gets a line of JSON when a test starts and when it ends;
tests that it holds already do not run again, so that a run that died can go on. A CUDA error that
stays with the process ends the run with status ``BROKEN``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

BROKEN = 70


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shards")
    group.addoption("--shard", default="0/1", help="i/n: tests i, i + n, ... of those selected")
    group.addoption("--results", default=None, help="file that gets a line for each outcome")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Shard(config), "shard")


class _Shard:
    def __init__(self, config: pytest.Config) -> None:
        self.index, self.count = map(int, config.getoption("--shard").split("/"))
        path = config.getoption("--results")
        self.file = None if path is None else Path(path)
        self.parts: dict[str, list[Any]] = {}

    def _write(self, **line: Any) -> None:
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        finished = set()
        if self.file is not None and self.file.exists():
            lines = map(json.loads, self.file.read_text().splitlines())
            finished = {line["test"] for line in lines if line["event"] == "end"}
        mine = items[self.index :: self.count]
        kept = [item for item in mine if item.nodeid not in finished]
        chosen = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = kept

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="start", test=nodeid, time=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.parts.setdefault(report.nodeid, []).append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        reports = self.parts.pop(nodeid, [])
        worst = next((r for r in reports if r.failed), None)
        skipped = next((r for r in reports if r.skipped), None)
        outcome, message, text = "passed", "", ""
        if worst is not None:
            outcome, text = "failed", worst.longreprtext
            crash = getattr(worst.longrepr, "reprcrash", None)
            message = text.strip().splitlines()[-1] if crash is None else crash.message
        elif skipped is not None:
            outcome = "xfailed" if hasattr(skipped, "wasxfail") else "skipped"
            reason = skipped.longrepr
            message = str(reason[2] if isinstance(reason, tuple) else reason)
        seconds = sum(r.duration for r in reports)
        self._write(
            event="end", test=nodeid, outcome=outcome, seconds=seconds, message=message, text=text
        )
        if outcome == "failed" and _gpu_is_lost():
            os._exit(BROKEN)


def _gpu_is_lost() -> bool:
    """Whether every further CUDA call of this process will fail."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").cpu()
    except RuntimeError:
        return True
    return False
