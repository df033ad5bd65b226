"""The configuration of a kernel for a call."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from ..core.config import TileConfig
from ..core.problem import AttentionProblem
from .feasible import reasons_against
from .keys import RowKey, arch_of, row_key

# What has more keys cut than a mask asks for comes first.
_NEAREST_MASKS = {
    "full": ("full", "causal", "window"),
    "causal": ("causal", "window", "full"),
    "window": ("window", "causal", "full"),
}
# (rows, keys, warps, stages) of what a program owns and what it loops over, best guess first.
_PREFERENCES = (
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 3),
    (64, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 8, 2),
    (64, 32, 4, 2),
    (64, 32, 8, 1),
    (64, 32, 4, 1),
    (32, 32, 8, 1),
    (32, 32, 4, 1),
    (32, 16, 8, 1),
    (32, 16, 4, 1),
    (16, 16, 8, 1),
    (16, 16, 4, 1),
)
# Exact float32 products run on no matrix unit, with their operands in registers: the elements of
# a tile of scores, by head dim, that leave room for them.
_FLOAT32_ELEMENTS = {
    16: 64 * 64,
    32: 64 * 64,
    64: 64 * 32,
    128: 32 * 32,
    256: 32 * 16,
    512: 16 * 16,
}

# With values this many times narrower than queries Triton 3.6 reads past the end of shared memory
# (seen on sm_90 at 256 and 16, in tiles that use WGMMA); tiles too small for WGMMA are right.
_TOO_NARROW = 8
_SMALL = TileConfig(32, 32, 4, 1)

_PINNED: dict[str, TileConfig] = {}

# Another object whenever the same call may have another configuration than before.
epoch = object()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: how to run the calls of one key, and where that is known from.

    Attributes:
        key: which calls.
        config: how to run them.
        provenance: "estimated: ..." or, measured, the board, versions, commit, speed and runner-up.
        spilled: bytes of a thread in local memory, where over ``feasible.SPILL_BUDGET``.
    """

    key: RowKey
    config: TileConfig
    provenance: str | dict[str, Any]
    spilled: int = 0


@lru_cache(maxsize=1)
def tables() -> tuple[str, ...]:
    """The archs that have a table."""
    folder = resources.files(__package__) / "tables"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml")))


@lru_cache(maxsize=32)
def rows(table: str) -> tuple[Row, ...]:
    """The rows of ``tables/<table>.toml``, none where there is no such file."""
    if table not in tables():
        return ()
    text = (resources.files(__package__) / "tables" / f"{table}.toml").read_text(encoding="utf-8")
    return parsed(text)


def parsed(text: str) -> tuple[Row, ...]:
    """The rows of a table's text."""
    return tuple(
        Row(
            RowKey(x["kernel"], x["dtype"], x["head_dim"], x["mask"], x["operands"]),
            TileConfig(**x["config"]),
            x["provenance"],
            x.get("spilled", 0),
        )
        for x in tomllib.loads(text).get("row", ())
    )


def _distance(key: RowKey, row: RowKey) -> tuple[int, int]:
    """How far a row is from a key; wider heads, whose tiles are smaller, are nearer.

    A row without extra operands is farther from a call that has some than the next wider head.
    """
    steps = row.head_dim.bit_length() - key.head_dim.bit_length()
    steps = steps if steps >= 0 else 8 - steps
    misfit = 0 if row.operands == key.operands else 1 if row.operands == "extra" else 3
    return 2 * steps + misfit, _NEAREST_MASKS[key.mask].index(row.mask)


def preferences(key: RowKey, arch: str) -> Iterator[TileConfig]:
    """Feasible configurations without any measurement, the best guess first; at least one."""
    for owned, looped, num_warps, num_stages in _PREFERENCES:
        if key.dtype == "float32" and owned * looped > _FLOAT32_ELEMENTS[key.head_dim]:
            continue
        block_m, block_n = owned, looped
        if key.kernel in ("bwd_dkdv", "fa1_bwd"):
            block_m, block_n = looped, owned
        wide = key.head_dim >= (128 if key.dtype == "float32" else 256)
        separate = key.kernel == "bwd_dkdv" and wide
        config = TileConfig(block_m, block_n, num_warps, num_stages, separate=separate)
        if not reasons_against(config, key, arch):
            yield config
    yield TileConfig(16, 16, 4, 1)


@lru_cache(maxsize=1024)
def find(key: RowKey, arch: str) -> TileConfig:
    """The exact row of the arch's table, or the nearest that is legal, or a heuristic."""
    if arch == "interpret":
        return TileConfig(32, 32, 4, 1)
    same = [
        row
        for row in rows(arch_of(arch).table)
        if (row.key.kernel, row.key.dtype) == (key.kernel, key.dtype)
    ]
    for row in sorted(same, key=lambda row: _distance(key, row.key)):
        if not reasons_against(row.config, key, arch):
            return row.config
    return next(preferences(key, arch))


def config(kernel: str, arch: str, problem: AttentionProblem) -> TileConfig:
    """The configuration of a kernel.

    No length, batch size or head count has a say, so that a kernel once compiled serves them all.

    Args:
        kernel: "fwd", "bwd_dkdv", "bwd_dq", "bwd_dbias", "fa1_fwd" or "fa1_bwd".
        arch: such as "sm_90" or "gfx942", or "interpret".
        problem: the call.
    """
    if kernel in _PINNED:
        return _PINNED[kernel]
    if problem.head_dim_v * _TOO_NARROW <= problem.head_dim:
        return _SMALL
    return find(row_key(kernel, problem), arch)


@contextmanager
def pinned(kernel: str, config: TileConfig) -> Iterator[None]:
    """Within, ``config`` answers for ``kernel`` whatever the call: for tuning and tests alone.

    It holds in all threads, since autograd runs a backward in one of its own.
    """
    global epoch
    before, epoch_before = _PINNED.get(kernel), epoch
    _PINNED[kernel], epoch = config, object()
    try:
        yield
    finally:
        epoch = epoch_before
        if before is None:
            del _PINNED[kernel]
        else:
            _PINNED[kernel] = before
