"""The Gluon kernels compile for Hopper into the pipelines that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .checks import compiles
from .test_versions import VERSIONS

pytestmark = pytest.mark.compile

WIDTHS = [(64, 64), (128, 128), (256, 256), (192, 128), (64, 256), (256, 64)]
FEATURES = ["softcap", "alibi", "sink", "dropout", "varlen", "seqused"]
TWO_PASS = ["bwd_dkdv_sm90", "bwd_dq_sm90"]
# dK and dV of the others come from the one pass, without dQ
FIRST_PASS_WIDTHS = [widths for widths in WIDTHS if min(widths) > 128 or widths[0] != widths[1]]
ONE_PASS = [pytest.param([], id="with-dq"), pytest.param(["deterministic"], id="without-dq")]
# A few reloads in a loop of some 700 instructions cost nothing that could be measured.
MOST_LOOP_SPILLS = 16


def check(answer: list[dict[str, Any]], loops: int, most_spills: int = MOST_LOOP_SPILLS) -> None:
    facts = compiles(answer, "sm_90")
    # ptxas says so when it puts WGMMAs one after another (C7510 and its kin)
    assert not facts["remarks"]
    assert facts["wgmma.mma_async"] > 0 and facts["cp.async.bulk.tensor"] > 0
    assert facts["setmaxnreg"] > 0
    assert facts["loops"] == loops, "over blocks, of all consumer warpgroups"
    assert facts["loop_spills"] <= most_spills
    # where ptxas believes that threads of a warp may differ, it guards every wait: 15 % slower
    assert facts["loop_divergence"] == 0
    assert facts["mbarrier.init"] == facts["mbarrier.inval"], "else their memory is given away"


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"{w[0]}-{w[1]}")
def test_the_forward(widths: tuple[int, int], mask: str, compiler: Callable[..., Any]) -> None:
    answer = compiler(
        kernel="fwd_sm90", dtype="bfloat16", head_dim=widths[0], head_dim_v=widths[1], mask=mask
    )
    check(answer, 3 if widths == (64, 64) else 2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_forward(
    feature: str, head_dim: int, compiler: Callable[..., Any]
) -> None:
    features = ["varlen", feature] if feature == "seqused" else [feature]
    answer = compiler(kernel="fwd_sm90", head_dim=head_dim, mask="causal", features=features)
    check(answer, 3 if head_dim == 64 else 2)


@pytest.mark.parametrize("more", ONE_PASS)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_one_pass_backward(
    head_dim: int, mask: str, more: list[str], compiler: Callable[..., Any]
) -> None:
    answer = compiler(
        kernel="bwd_sm90", dtype="bfloat16", head_dim=head_dim, mask=mask, features=more
    )
    # a loop for blocks that are cut and one for whole ones; with a left side three
    check(answer, 6 if mask == "window" else 4, 24)


@pytest.mark.parametrize("more", ONE_PASS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_one_pass_backward(
    feature: str, head_dim: int, more: list[str], compiler: Callable[..., Any]
) -> None:
    features = [*more, feature] + ["varlen"] * (feature == "seqused")
    answer = compiler(kernel="bwd_sm90", head_dim=head_dim, mask="causal", features=features)
    # dropout at d 128: 13 stores in loops of some 750 instructions (whole blocks) and 1,000
    check(answer, 4, 48 if feature == "dropout" else 24)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("widths", FIRST_PASS_WIDTHS, ids=lambda w: f"{w[0]}-{w[1]}")
def test_the_first_of_two_passes(
    widths: tuple[int, int], mask: str, compiler: Callable[..., Any]
) -> None:
    answer = compiler(
        kernel="bwd_dkdv_sm90", dtype="bfloat16", head_dim=widths[0], head_dim_v=widths[1],
        mask=mask, features=["deterministic"],
    )  # fmt: skip
    check(answer, 2)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"{w[0]}-{w[1]}")
def test_the_second_of_two_passes(
    widths: tuple[int, int], mask: str, compiler: Callable[..., Any]
) -> None:
    answer = compiler(
        kernel="bwd_dq_sm90", dtype="bfloat16", head_dim=widths[0], head_dim_v=widths[1],
        mask=mask, features=["deterministic"],
    )  # fmt: skip
    check(answer, 2)


@pytest.mark.parametrize(
    ("kernel", "head_dim"), [("bwd_dkdv_sm90", 256), ("bwd_dq_sm90", 64), ("bwd_dq_sm90", 256)]
)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_two_pass_backward(
    feature: str, kernel: str, head_dim: int, compiler: Callable[..., Any]
) -> None:
    features = ["deterministic", feature] + ["varlen"] * (feature == "seqused")
    check(compiler(kernel=kernel, head_dim=head_dim, mask="causal", features=features), 2)


@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [("fwd_sm90", 64), ("fwd_sm90", 128), ("bwd_sm90", 64), ("bwd_sm90", 128),
     ("bwd_dkdv_sm90", 256), ("bwd_dq_sm90", 256)],
)  # fmt: skip
def test_alibi_converts_no_number_per_element(
    kernel: str, head_dim: int, compiler: Callable[..., Any]
) -> None:
    facts = compiles(compiler(kernel=kernel, head_dim=head_dim, features=["alibi"]), "sm_90")
    # a thread has 30 distances and more in each block
    assert facts["cvt.rn.f32"] < 30


@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions_of_triton(version: str, compiler: Callable[..., Any]) -> None:
    check(compiler(version, kernel="fwd_sm90", mask="causal"), 2)
    check(compiler(version, kernel="bwd_sm90", mask="causal"), 4, 24)
    for kernel in TWO_PASS:
        check(compiler(version, kernel=kernel, head_dim=256, mask="causal"), 2)
