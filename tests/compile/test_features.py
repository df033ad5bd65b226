"""Every feature, and every pair of features, compiles.

The interpreter accepts what the compiler does not, so these are no duplicates of the tests that
compute. Covered, in float16 at head dims 64 and 80 (the padded kind) for every kernel:

- on sm_90 every pair of features that can meet, ten pairs to a call (``CALLS``);
- on sm_80, sm_100, sm_120 and gfx942 every feature, half of them to a call (``HALVES``);
- on sm_90 each feature alone, in fwd and bwd_dq, within the budget of spilled registers;
- of FlashAttention 1, whose kernels share all of this, only ``HALVES``, on sm_90 and gfx942.

Where several features meet, tiles are small (``SMALL``): a kernel's code, and with it the time to
compile it, grows with them, and what a call's own tiles need is ``test_rows.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from tilewise.core.features import FEATURES
from tilewise.tuning import feasible

from .checks import compiles

pytestmark = pytest.mark.compile

KERNELS = ("fwd", "bwd_dkdv", "bwd_dq", "bwd_dbias", "fa1_fwd", "fa1_bwd")
FA2 = KERNELS[:4]
# They change no kernel: a number of heads, an order of additions, a result of another path.
WITHOUT_CODE = {"gqa", "deterministic", "attn_probs"}
NAMES = tuple(f.name for f in FEATURES if f.name not in WITHOUT_CODE)
CONTRADICT = ({"causal", "window"}, {"attn_bias", "bool_mask"})
PAIRS = {frozenset(pair) for pair in combinations(NAMES, 2) if set(pair) not in CONTRADICT}


def _possible(names: frozenset[str]) -> bool:
    if "seqused" in names and "varlen" not in names:  # seqused is varlen's
        return False
    return not any(pair <= names for pair in CONTRADICT)


def _calls() -> tuple[tuple[str, ...], ...]:
    """Calls of five features which together hold every pair, chosen greedily."""
    left = set(PAIRS)
    calls = []
    candidates = [frozenset(c) for c in combinations(NAMES, 5) if _possible(frozenset(c))]
    while left:
        best = max(candidates, key=lambda c: sum(pair <= c for pair in left))
        left -= {pair for pair in left if pair <= best}
        calls.append(tuple(sorted(best)))
    return tuple(calls)


CALLS = _calls()
SMALL = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
# A tile of a floating bias, beside the scores.
BIAS_BUDGET = 256
HALVES = (
    ("causal", "softcap", "attn_bias", "dropout", "varlen", "seqused"),
    ("window", "alibi", "bool_mask", "sink", "head_dim_v"),
)


def _case(kernel: str, names: tuple[str, ...]) -> dict[str, Any]:
    features = [n for n in names if n not in ("causal", "window")]
    mask = next((n for n in names if n in ("causal", "window")), "full")
    case = {"kernel": kernel, "mask": mask, "features": features, "head_dim": 64}
    if "head_dim_v" in names:
        case |= {"head_dim": 80, "head_dim_v": 64}
    return case


def _has(kernel: str, names: tuple[str, ...]) -> bool:
    """Whether a call of these features launches the kernel."""
    return kernel != "bwd_dbias" or "attn_bias" in names


def _cases(calls: tuple[tuple[str, ...], ...], kernels: tuple[str, ...] = FA2) -> list[Any]:
    return [
        pytest.param(kernel, names, id=f"{kernel}-{'+'.join(names)}")
        for kernel in kernels
        for names in calls
        if _has(kernel, names)
    ]


def test_the_calls_hold_every_pair() -> None:
    held = {frozenset(pair) for call in CALLS for pair in combinations(call, 2)}
    assert held >= PAIRS
    assert {name for half in HALVES for name in half} == set(NAMES)


@pytest.mark.parametrize(("kernel", "names"), _cases(CALLS))
def test_pairs_of_features(
    kernel: str, names: tuple[str, ...], compiler: Callable[..., Any]
) -> None:
    compiles(compiler(**_case(kernel, names), config=SMALL, arch="sm_90"), "sm_90")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize(("kernel", "names"), _cases(HALVES))
def test_features_on_other_devices(
    arch: str, kernel: str, names: tuple[str, ...], compiler: Callable[..., Any]
) -> None:
    compiles(compiler(**_case(kernel, names), config=SMALL, arch=arch), arch)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("kernel", "names"), _cases(HALVES, KERNELS[4:]))
def test_features_of_fa1(
    arch: str,
    kernel: str,
    names: tuple[str, ...],
    compiler: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    if (kernel, arch) == ("fa1_fwd", "gfx942") and "bool_mask" in names:
        reason = "Triton 3.7.1 for gfx942: ConvertTritonAMDGPUToLLVM fails on fa1_fwd's bool_mask"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    compiles(compiler(**_case(kernel, names), config=SMALL, arch=arch), arch)


ALONE = tuple((name,) for name in NAMES if name not in ("sink", "seqused"))


@pytest.mark.parametrize(("kernel", "names"), _cases(ALONE, ("fwd", "bwd_dq")))
def test_a_feature_alone_stays_in_registers(
    kernel: str, names: tuple[str, ...], compiler: Callable[..., Any]
) -> None:
    facts = compiles(compiler(**_case(kernel, names), arch="sm_90"), "sm_90")
    budget = BIAS_BUDGET if names == ("attn_bias",) else feasible.SPILL_BUDGET
    assert facts["stack"] <= budget
