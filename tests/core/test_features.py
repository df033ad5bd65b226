"""The features table: what dispatch, the documentation and the cases of the tests are read from."""

import itertools

import pytest
import torch

from tilewise.arguments import Options, Packing, dense_call, packed_call
from tilewise.core import features
from tilewise.core.features import BACKEND_NAMES, BY_NAME, DTYPES, FEATURES
from tilewise.ops.schema import describe
from tilewise.testing import CASES, Case, feature_arguments, make_inputs

CASE_FEATURES = [f.name for f in FEATURES if f.name != "attn_probs"]


def described(case):
    inputs = make_inputs(case, torch.float32)
    packing = {n: inputs.pop(n) for n in Packing._fields if n in inputs}
    q, k, v = (inputs.pop(n) for n in "qkv")
    if packing:
        t, s = packed_call(q, k, v, Packing(**packing), Options(**inputs))
    else:
        t, s = dense_call(q, k, v, Options(**inputs))
    return describe(t, s, needs_grad=False)


@pytest.mark.parametrize("name", CASE_FEATURES)
def test_every_feature_has_a_builder_whose_case_uses_it(name):
    feature_arguments(Case((name,)))
    assert name in described(Case((name,))).features


def test_a_plain_case_uses_no_feature():
    assert described(Case()).features == frozenset()


def test_every_name_of_describe_is_in_the_table():
    x = torch.empty(1, 2, 1, 4)
    t, s = dense_call(x, x, x, Options())
    names = set()
    for case in CASES:
        names |= described(case).features
    names |= describe(t, s, needs_grad=False, attn_probs=True).features
    assert names == BY_NAME.keys()


def test_cases_are_every_feature_and_every_pair_once():
    found = [frozenset(c.features) for c in CASES]
    assert len(found) == len(set(found))
    wanted = {frozenset(c) for r in (0, 1, 2) for c in itertools.combinations(CASE_FEATURES, r)}
    assert set(found) == wanted - {frozenset({"attn_bias", "bool_mask"})}
    assert len({c.id for c in CASES}) == len(CASES)


def test_names_are_unique_and_backends_known():
    assert len(BY_NAME) == len(FEATURES)
    assert DTYPES.keys() == set(BACKEND_NAMES)
    for feature in FEATURES:
        assert feature.fwd <= set(BACKEND_NAMES) and feature.bwd <= set(BACKEND_NAMES)
        assert feature.backends("fwd") == feature.fwd and feature.backends("bwd") == feature.bwd


def test_markdown_table_has_a_column_for_each_backend_and_a_row_for_each_feature():
    header, rule, *rows = features.markdown_table().splitlines()
    assert [c.strip(" `") for c in header.strip("|").split("|")][3:] == list(BACKEND_NAMES)
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1
    assert [r.split("|")[1].strip() for r in rows] == [*(f.name for f in FEATURES), "dtypes"]
    (probs,) = (r for r in rows if r.startswith("| attn_probs "))
    assert "bwd" not in probs and probs.count("fwd") == len(BACKEND_NAMES)


def test_reasons_name_what_is_missing(monkeypatch):
    none = features.reasons_against("cpu", "float32", frozenset(BY_NAME), True)
    assert none == ()
    (dtype,) = features.reasons_against("cpu", "int8", frozenset(), False)
    assert "int8" in dtype and "float32" in dtype
    lacking = (
        features.Feature("sink", "", "", fwd=frozenset(), bwd=frozenset()),
        features.Feature("alibi", "", "", fwd=frozenset({"cpu"}), bwd=frozenset({"reference"})),
    )
    monkeypatch.setattr(features, "FEATURES", lacking)
    both = frozenset({"sink", "alibi"})
    assert features.reasons_against("cpu", "float32", both, False) == ("no sink",)
    assert features.reasons_against("cpu", "float32", both, True) == (
        "no sink",
        "no backward of alibi",
    )
    assert features.reasons_against("cpu", "float32", frozenset(), True) == ()
