"""explain() and dispatch: which backend, why not the others, and what is refused."""

import pytest
import torch

import tilewise
from tilewise import InvalidInputError, UnsupportedError, explain


def x(device="cpu", dtype=torch.float32):
    return torch.zeros(1, 6, 2, 8, device=device, dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_takes_the_cpu_backend_and_says_why_not_the_reference(device):
    choice = explain(x(device), x(device), x(device), causal=True)
    assert (choice.backend, choice.algorithm) == ("cpu", "fa2")
    reasons = dict(choice.reasons)
    assert set(reasons) == {"gluon", "triton", "reference"}
    assert 'backend="auto"' in reasons["reference"][0] and "O(N^2)" in reasons["reference"][0]
    lines = str(choice).splitlines()
    assert lines[0] == "cpu (fa2)" and lines[-1].startswith("  not reference: ")


def test_named_backends_and_algorithms():
    assert explain(x(), x(), x(), backend="reference").algorithm == "standard"
    assert explain(x(), x(), x(), backend="reference").backend == "reference"
    choice = explain(x(), x(), x(), algorithm="fa1")
    assert (choice.backend, choice.algorithm) == ("cpu", "fa1")
    assert "reference" in dict(explain(x(), x(), x(), backend="cpu").reasons)


@pytest.mark.parametrize("function", [explain, tilewise.flash_attn_func], ids=["explain", "call"])
def test_a_named_backend_refuses_and_never_falls_back(function):
    with pytest.raises(UnsupportedError, match="fa3") as error:
        function(x(), x(), x(), backend="cpu", algorithm="fa3")
    assert set(error.value.reasons) == {"cpu"}
    with pytest.raises(UnsupportedError, match="fa2"):
        function(x(), x(), x(), backend="reference", algorithm="fa2")


@pytest.mark.parametrize("algorithm", ["fa3", "standard"])
@pytest.mark.parametrize("function", [explain, tilewise.flash_attn_func], ids=["explain", "call"])
def test_auto_never_takes_the_reference(function, algorithm):
    with pytest.raises(UnsupportedError) as error:
        function(x(), x(), x(), algorithm=algorithm)
    assert set(error.value.reasons) == {"cpu", "gluon", "triton", "reference"}
    assert any('backend="auto"' in reason for reason in error.value.reasons["reference"])


def test_unknown_names_are_refused():
    with pytest.raises(InvalidInputError, match=r"backend: got 'gpu'.*'cpu'"):
        explain(x(), x(), x(), backend="gpu")
    with pytest.raises(InvalidInputError, match=r"algorithm: got 'fa9'.*'fa2'"):
        explain(x(), x(), x(), algorithm="fa9")
    with pytest.raises(TypeError, match="colour"):
        explain(x(), x(), x(), colour="red")


def test_packed_calls():
    q, cu = torch.zeros(6, 2, 8, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    choice = explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3)
    assert choice.backend == "cpu"
    with pytest.raises(UnsupportedError, match="block_table"):
        explain(
            q,
            q,
            q,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=3,
            max_seqlen_k=3,
            block_table=cu,
        )


def test_bad_arguments_are_refused_as_in_a_call():
    with pytest.raises(InvalidInputError, match="v: got dtype"):
        explain(x(), x(), x(dtype=torch.float16))


def test_explaining_leaves_the_generator_alone():
    before = torch.get_rng_state()
    explain(x(), x(), x(), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_missing_features_are_reasons(monkeypatch):
    from tilewise import dispatch
    from tilewise.core import features

    lacking = tuple(
        features.Feature(f.name, f.argument, f.meaning, bwd=frozenset({"reference"}))
        if f.name == "softcap" else f
        for f in features.FEATURES
    )  # fmt: skip
    monkeypatch.setattr(features, "FEATURES", lacking)
    dispatch.choose.cache_clear()
    try:
        assert explain(x(), x(), x(), softcap=1.0).backend == "cpu"
        leaf = x().requires_grad_()
        with pytest.raises(UnsupportedError, match="cpu: no backward of softcap"):
            explain(leaf, x(), x(), softcap=1.0)
        with pytest.raises(UnsupportedError, match="cpu: no backward of softcap"):
            tilewise.flash_attn_func(leaf, x(), x(), softcap=1.0)
        with torch.no_grad():
            assert explain(leaf, x(), x(), softcap=1.0).backend == "cpu"
            tilewise.flash_attn_func(leaf, x(), x(), softcap=1.0)
    finally:
        dispatch.choose.cache_clear()
