"""Markdown of what result files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table: the first ``left`` columns to the left, the others to the right."""
    rules = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rules, *lines))


def facts(board: Mapping[str, Any]) -> str:
    """The machine, the versions, the date and the commit, in a line."""
    if board.get("gpu"):
        cudnn = board.get("cudnn")
        found = [
            board["gpu"],
            f"driver {board['driver']}" if board.get("driver") else "",
            f"torch {board['torch']}",
            f"triton {board['triton']}" if board.get("triton") else "",
            f"CUDA {board['cuda']}" if board.get("cuda") else "",
            f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "",
        ]
    else:
        found = [board["cpu"], f"{board['threads']} threads", f"torch {board['torch']}"]
        found[1] = found[1].removesuffix("s") if board["threads"] == 1 else found[1]
    state = ", with changes" if board.get("dirty") else ""
    commit = f"commit `{board['commit'][:10]}`{state}" if board.get("commit") else ""
    return ", ".join(x for x in (*found, board["date"][:10], commit) if x)
