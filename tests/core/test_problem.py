"""AttentionProblem: frozen facts that a decision can be cached by."""

import dataclasses

import pytest

from tilewise.core.mask import MaskSpec
from tilewise.core.problem import AttentionProblem
from tilewise.core.units import LN2, LOG2E

FACTS = {
    "device": "cpu", "dtype": "float32", "layout": "dense", "batch": 2,
    "seqlen_q": 5, "seqlen_k": 7,
    "nheads": 6, "nheads_kv": 2, "head_dim": 8, "head_dim_v": 16, "mask": MaskSpec(3, 0),
    "softmax_scale": 0.5, "softcap": 1.0, "dropout_p": 0.1,
    "features": frozenset({"causal", "gqa"}),
    "needs_grad": True, "deterministic": True, "arch": "sm_90",
}  # fmt: skip
OTHER = {
    "device": "cuda", "dtype": "float16", "layout": "varlen", "batch": 3,
    "seqlen_q": 6, "seqlen_k": 8,
    "nheads": 4, "nheads_kv": 1, "head_dim": 9, "head_dim_v": 17, "mask": MaskSpec(3, 1),
    "softmax_scale": 0.25, "softcap": 2.0, "dropout_p": 0.2, "features": frozenset({"causal"}),
    "needs_grad": False, "deterministic": False, "arch": "sm_80",
}  # fmt: skip


def test_equal_facts_are_one_key():
    a, b = AttentionProblem(**FACTS), AttentionProblem(**FACTS)
    assert a == b and hash(a) == hash(b) and {a: 1}[b] == 1


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_counts(name):
    a, b = AttentionProblem(**FACTS), AttentionProblem(**FACTS | {name: OTHER[name]})
    assert a != b and len({a, b}) == 2


def test_no_fact_is_forgotten_here():
    assert {f.name for f in dataclasses.fields(AttentionProblem)} == FACTS.keys() == OTHER.keys()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionProblem(**FACTS).batch = 1


def test_group_is_the_query_heads_of_one_key_head():
    assert AttentionProblem(**FACTS).group == 3


def test_features_outside_of_the_table_are_refused():
    with pytest.raises(KeyError, match="teleport"):
        AttentionProblem(**FACTS | {"features": frozenset({"teleport"})})


def test_units_are_each_other_s_inverse():
    assert pytest.approx(1.0, rel=1e-15) == LOG2E * LN2
