"""Tables, the nearest row, heuristics and what is legal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tilewise.core.config import TileConfig
from tilewise.core.mask import MaskSpec
from tilewise.core.problem import AttentionProblem
from tilewise.tuning import feasible, lookup
from tilewise.tuning.keys import (
    ARCHS,
    DTYPES,
    HEAD_DIMS,
    KERNELS,
    MASKS,
    OPERANDS,
    RowKey,
    arch_of,
    row_key,
)

ALL_KEYS = [RowKey(*x) for x in itertools.product(KERNELS, DTYPES, HEAD_DIMS, MASKS, OPERANDS)]
PLAIN = TileConfig(64, 64, 4, 2)


def problem(**facts: Any) -> AttentionProblem:
    base: dict[str, Any] = dict(  # noqa: C408  as a call is written
        device="cuda", dtype="float16", layout="dense", batch=2, seqlen_q=128, seqlen_k=128,
        nheads=2, nheads_kv=2, head_dim=64, head_dim_v=64,
    )  # fmt: skip
    return AttentionProblem(**(base | facts))


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_every_call_on_every_device_gets_something_legal(arch: str) -> None:
    smallest = TileConfig(16, 16, 4, 1)
    for key in ALL_KEYS:
        config = lookup.find(key, arch)
        assert not feasible.reasons_against(config, key, arch) or config == smallest, key


@pytest.mark.parametrize("table", lookup.tables())
def test_a_table_is_well_formed(table: str) -> None:
    rows = lookup.rows(table)
    assert rows and table in ARCHS
    assert len({row.key for row in rows}) == len(rows), "two rows of one key"
    for row in rows:
        assert row.key in ALL_KEYS
        assert not feasible.reasons_against(row.config, row.key, table), row
        if isinstance(row.provenance, str):
            assert row.provenance.startswith("estimated: ")
        else:
            assert {"gpu", "triton", "date", "commit", "tflops"} <= row.provenance.keys()


def test_every_device_is_served_by_a_table_that_exists() -> None:
    for name, arch in ARCHS.items():
        assert name == "interpret" or arch.table in lookup.tables()


def test_an_exact_row_is_taken() -> None:
    for row in lookup.rows("sm_90"):
        assert lookup.find(row.key, "sm_90") == row.config


def test_the_nearest_row_is_of_a_wider_head() -> None:
    key = RowKey("fwd", "half", 128, "causal", "plain")
    wider = RowKey("fwd", "half", 256, "causal", "plain")
    narrower = RowKey("fwd", "half", 64, "causal", "plain")
    assert lookup._distance(key, wider) < lookup._distance(key, narrower)
    assert lookup._distance(key, replace(key, mask="window")) < lookup._distance(key, wider)
    extra = replace(key, operands="extra")
    assert lookup._distance(key, extra) < lookup._distance(key, wider)
    assert lookup._distance(extra, replace(extra, head_dim=256)) < lookup._distance(extra, key)


def test_sizes_choose_nothing() -> None:
    one = row_key("fwd", problem())
    other = problem(batch=64, seqlen_q=1, seqlen_k=100_000, nheads=12, nheads_kv=3)
    assert row_key("fwd", other) == one


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, ("half", 64, "full", "plain")),
        ({"dtype": "bfloat16", "mask": MaskSpec(None, 0)}, ("half", 64, "causal", "plain")),
        ({"dtype": "float32", "head_dim": 65}, ("float32", 128, "full", "plain")),
        ({"head_dim_v": 200, "mask": MaskSpec(8, None)}, ("half", 256, "window", "plain")),
        ({"features": frozenset({"dropout"})}, ("half", 64, "full", "extra")),
        ({"head_dim": 1, "head_dim_v": 1}, ("half", 16, "full", "plain")),
        ({"head_dim": 512}, ("half", 512, "full", "plain")),
    ],
)
def test_the_key_of_a_call(facts: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert row_key("fwd", problem(**facts)) == RowKey("fwd", *expected)


def test_the_interpreter_gets_small_tiles() -> None:
    assert lookup.config("fwd", "interpret", problem()) == TileConfig(32, 32, 4, 1)


@pytest.mark.parametrize(
    ("name", "relative"),
    [("sm_75", "sm_75"), ("sm_88", "sm_87"), ("sm_130", "sm_121"), ("gfx90c", "gfx90a"),
     ("gfx1300", "gfx1201"), ("gfx803", "gfx90a"), ("sm_101", "sm_100")],
)  # fmt: skip
def test_an_unknown_device_is_taken_for_an_older_relative(name: str, relative: str) -> None:
    assert arch_of(name) is ARCHS[relative]


def test_a_pin_answers_until_it_is_taken_out() -> None:
    before = lookup.config("fwd", "sm_90", problem())
    with lookup.pinned("fwd", PLAIN):
        assert lookup.config("fwd", "sm_90", problem()) == PLAIN
        with lookup.pinned("fwd", replace(PLAIN, num_warps=8)):
            assert lookup.config("fwd", "sm_90", problem()).num_warps == 8
        assert lookup.config("fwd", "sm_90", problem()) == PLAIN
        assert lookup.config("bwd_dq", "sm_90", problem()) != PLAIN
    assert lookup.config("fwd", "sm_90", problem()) == before


@pytest.mark.parametrize(
    ("change", "kernel", "arch", "word"),
    [
        ({"BLOCK_M": 8}, "fwd", "sm_90", "BLOCK_M"),
        ({"BLOCK_N": 96}, "fwd", "sm_90", "BLOCK_N"),
        ({"num_warps": 3}, "fwd", "sm_90", "warps"),
        ({"num_stages": 0}, "fwd", "sm_90", "num_stages"),
        ({"maxnreg": 8}, "fwd", "sm_90", "maxnreg"),
        ({"maxnreg": 128}, "fwd", "gfx942", "maxnreg"),
        ({"use_tma": True}, "fwd", "sm_80", "TMA"),
        ({"warp_specialize": True}, "fwd", "sm_90", "warp_specialize"),
        ({"use_tma": True, "warp_specialize": True}, "bwd_dq", "sm_90", "warp_specialize"),
        ({"BLOCK_M": 256}, "bwd_dq", "sm_90", "backward"),
        ({"num_stages": 8}, "fwd", "sm_86", "shared memory"),
        ({"BLOCK_M": 128, "BLOCK_N": 128}, "bwd_dkdv", "sm_90", "registers"),
    ],
)
def test_what_is_not_legal_says_why(
    change: dict[str, Any], kernel: str, arch: str, word: str
) -> None:
    key = RowKey(kernel, "half", 128, "full", "plain")
    assert not feasible.reasons_against(PLAIN, replace(key, kernel="fwd"), "sm_90")
    reasons = feasible.reasons_against(replace(PLAIN, **change), key, arch)
    assert any(word in reason for reason in reasons), reasons


def test_values_much_narrower_than_queries_get_tiles_that_compile_right():
    narrow = replace(problem(), head_dim=256, head_dim_v=32)
    assert lookup.config("fwd", "sm_90", narrow) == TileConfig(32, 32, 4, 1)
    wider = replace(problem(), head_dim=256, head_dim_v=64)
    assert lookup.config("fwd", "sm_90", wider) != TileConfig(32, 32, 4, 1)
