"""Every argument that cannot be right raises an error that names it, before anything is written."""

import numpy as np
import pytest
import torch

import tilewise
from tilewise import InvalidInputError, UnsupportedError

from .tools import INF, NAN, int32, rand

ENTRIES = (
    "dense",
    "kvpacked",
    "qkvpacked",
    "varlen",
    "varlen_kvpacked",
    "varlen_qkvpacked",
)
PACKED = ENTRIES[3:]
H, D = 4, 8


def good(entry):
    """A function and arguments that it takes."""
    lead = (6,) if entry in PACKED else (2, 6)
    arguments = {}
    if entry in PACKED:
        cu = int32(0, 2, 6)
        if entry == "varlen_qkvpacked":
            arguments = {"cu_seqlens": cu, "max_seqlen": 4}
        else:
            arguments = {"cu_seqlens_q": cu, "cu_seqlens_k": cu.clone()}
            arguments |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
    if "qkvpacked" in entry:
        tensors = {"qkv": rand(*lead, 3, H, D, seed=1).float()}
    elif "kvpacked" in entry:
        tensors = {"q": rand(*lead, H, D, seed=1).float()}
        tensors |= {"kv": rand(*lead, 2, H, D, seed=2).float()}
    else:
        tensors = {n: rand(*lead, H, D, seed=s).float() for s, n in enumerate(("q", "k", "v"))}
    function = {
        "dense": tilewise.flash_attn_func,
        "kvpacked": tilewise.flash_attn_kvpacked_func,
        "qkvpacked": tilewise.flash_attn_qkvpacked_func,
        "varlen": tilewise.flash_attn_varlen_func,
        "varlen_kvpacked": tilewise.flash_attn_varlen_kvpacked_func,
        "varlen_qkvpacked": tilewise.flash_attn_varlen_qkvpacked_func,
    }[entry]
    return function, {**tensors, **arguments}


def refused(entry, changes, names, error=InvalidInputError, backend=None):
    """The call with ``changes`` raises, names one of ``names``, and leaves everything as it was."""
    function, arguments = good(entry)
    arguments = {**arguments, **changes, **(backend or {})}
    kept = {
        n: (x, x.clone(), x._version)
        for n, x in arguments.items()
        if isinstance(x, torch.Tensor) and x.device.type == "cpu"
    }
    generator = torch.get_rng_state()
    with pytest.raises(error) as caught:
        function(**arguments)
    assert any(name in str(caught.value) for name in names), str(caught.value)
    for name, (x, before, version) in kept.items():
        assert torch.equal(x, before) or bool(before.isnan().any()), name
        assert x._version == version, name
    assert torch.equal(torch.get_rng_state(), generator)


def x(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


# Arguments that every entry shares: id -> (changes, name in the message).
SHARED = {
    "dropout_p 1": ({"dropout_p": 1.0}, "dropout_p"),
    "dropout_p -0.1": ({"dropout_p": -0.1}, "dropout_p"),
    "dropout_p nan": ({"dropout_p": NAN}, "dropout_p"),
    "dropout_p bool": ({"dropout_p": True}, "dropout_p"),
    "dropout_p text": ({"dropout_p": "0.1"}, "dropout_p"),
    "dropout_p None": ({"dropout_p": None}, "dropout_p"),
    "softmax_scale nan": ({"softmax_scale": NAN}, "softmax_scale"),
    "softmax_scale inf": ({"softmax_scale": INF}, "softmax_scale"),
    "softmax_scale bool": ({"softmax_scale": True}, "softmax_scale"),
    "softmax_scale tensor": ({"softmax_scale": torch.ones(())}, "softmax_scale"),
    "softcap negative": ({"softcap": -1.0}, "softcap"),
    "softcap nan": ({"softcap": NAN}, "softcap"),
    "softcap inf": ({"softcap": INF}, "softcap"),
    "softcap bool": ({"softcap": True}, "softcap"),
    "softcap None": ({"softcap": None}, "softcap"),
    "window left -2": ({"window_size": (-2, 0)}, "window_size"),
    "window right -2": ({"window_size": (0, -2)}, "window_size"),
    "window right -2 causal": ({"window_size": (0, -2), "causal": True}, "window_size"),
    "window of one": ({"window_size": (1,)}, "window_size"),
    "window of three": ({"window_size": (1, 2, 3)}, "window_size"),
    "window int": ({"window_size": 3}, "window_size"),
    "window None": ({"window_size": None}, "window_size"),
    "window floats": ({"window_size": (1.0, 2.0)}, "window_size"),
    "window bools": ({"window_size": (True, False)}, "window_size"),
    "slopes with gradient": ({"alibi_slopes": torch.ones(H, requires_grad=True)}, "alibi_slopes"),
    "slopes shape": ({"alibi_slopes": x(H + 1)}, "alibi_slopes"),
    "slopes batch": ({"alibi_slopes": x(3, H)}, "alibi_slopes"),
    "slopes int": ({"alibi_slopes": x(H, dtype=torch.int32)}, "alibi_slopes"),
    "slopes list": ({"alibi_slopes": [0.5] * H}, "alibi_slopes"),
    "slopes device": ({"alibi_slopes": x(H, device="meta")}, "alibi_slopes"),
    "sink shape": ({"sink": x(H + 1)}, "sink"),
    "sink dims": ({"sink": x(1, H)}, "sink"),
    "sink int": ({"sink": x(H, dtype=torch.int64)}, "sink"),
    "sink number": ({"sink": 0.0}, "sink"),
    "sink device": ({"sink": x(H, device="meta")}, "sink"),
    "bias int": ({"attn_bias": x(1, 1, 1, 6, dtype=torch.int32)}, "attn_bias"),
    "bias complex": ({"attn_bias": x(1, 1, 1, 6, dtype=torch.complex64)}, "attn_bias"),
    "bias shape": ({"attn_bias": x(1, 1, 1, 5)}, "attn_bias"),
    "bias heads": ({"attn_bias": x(3, 6, 6)}, "attn_bias"),
    "bias five dims": ({"attn_bias": x(1, 1, 1, 6, 6)}, "attn_bias"),
    "bias number": ({"attn_bias": 1.0}, "attn_bias"),
    "bias device": ({"attn_bias": x(1, 1, 1, 6, device="meta")}, "attn_bias"),
    "backend unknown": ({"backend": "gpu"}, "backend"),
    "backend None": ({"backend": None}, "backend"),
    "algorithm unknown": ({"algorithm": "fa9"}, "algorithm"),
    "algorithm int": ({"algorithm": 2}, "algorithm"),
    "seed float": ({"dropout_p": 0.1, "seed": 1.5}, "seed"),
    "seed bool": ({"dropout_p": 0.1, "seed": True}, "seed"),
    "seed int32": ({"dropout_p": 0.1, "seed": x(1, dtype=torch.int32)}, "seed"),
    "seed of two": ({"dropout_p": 0.1, "seed": x(2, dtype=torch.int64)}, "seed"),
    # the dropout seed is drawn last: a wrong argument beside it leaves the generator alone
    "softcap beside dropout": ({"dropout_p": 0.1, "softcap": -1.0}, "softcap"),
    "scale beside dropout": ({"dropout_p": 0.1, "softmax_scale": NAN}, "softmax_scale"),
    "backend beside dropout": ({"dropout_p": 0.1, "backend": "gpu"}, "backend"),
    "algorithm beside dropout": ({"dropout_p": 0.1, "algorithm": "fa9"}, "algorithm"),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_arguments_of_every_entry(entry, case):
    changes, name = SHARED[case]
    refused(entry, changes, [name])


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_algorithm_that_the_backend_lacks_is_unsupported(entry):
    refused(entry, {"backend": "cpu", "algorithm": "fa3"}, ["fa3"], UnsupportedError)
    refused(entry, {"algorithm": "fa3"}, ["fa3"], UnsupportedError)
    refused(entry, {"backend": "reference", "algorithm": "fa2"}, ["fa2"], UnsupportedError)
    refused(entry, {"backend": "cpu", "algorithm": "standard"}, ["standard"], UnsupportedError)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_arguments_that_cases_start_from_are_good(entry):
    function, arguments = good(entry)
    assert torch.isfinite(function(**arguments)).all()


DTYPES = [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2]


@pytest.mark.parametrize("bad", DTYPES, ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_dtypes_of_the_tensors(entry, bad):
    _, arguments = good(entry)
    names = [n for n in ("q", "k", "v", "kv", "qkv") if n in arguments]
    for name in names:
        refused(entry, {name: arguments[name].to(bad)}, [name[0], str(bad)])
    refused(entry, {n: arguments[n].to(bad) for n in names}, [str(bad)])


@pytest.mark.parametrize("entry", ["dense", "kvpacked", "varlen", "varlen_kvpacked"])
def test_mixed_dtypes_are_both_named(entry):
    function, arguments = good(entry)
    arguments["q"] = arguments["q"].half()
    with pytest.raises(InvalidInputError, match=r"(?s)float32.*float16|float16.*float32"):
        function(**arguments)


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_no_tensor(entry):
    _, arguments = good(entry)
    for name in ("q", "k", "v", "kv", "qkv"):
        if name in arguments:
            refused(entry, {name: None}, [name])
            refused(entry, {name: arguments[name].tolist()}, [name])


@pytest.mark.parametrize("entry", ["dense", "kvpacked", "varlen", "varlen_kvpacked"])
def test_tensors_on_two_devices(entry):
    _, arguments = good(entry)
    for name in ("k", "v", "kv"):
        if name in arguments:
            refused(entry, {name: arguments[name].to("meta")}, [f"{name[0]}: "])


SHAPES = {
    "dense": {
        "q three dims": ({"q": x(6, H, D)}, "q"),
        "k three dims": ({"k": x(6, H, D)}, "k"),
        "v five dims": ({"v": x(1, 2, 6, H, D)}, "v"),
        "k batch": ({"k": x(3, 6, H, D), "v": x(3, 6, H, D)}, "k"),
        "v batch": ({"v": x(1, 6, H, D)}, "v"),
        "v length": ({"v": x(2, 5, H, D)}, "v"),
        "v heads": ({"v": x(2, 6, 2, D)}, "v"),
        "k head_dim": ({"k": x(2, 6, H, D + 1)}, "k"),
        "heads do not divide": ({"k": x(2, 6, 3, D), "v": x(2, 6, 3, D)}, "heads"),
        "more key heads": ({"k": x(2, 6, 8, D), "v": x(2, 6, 8, D)}, "heads"),
        "no heads": ({n: x(2, 6, 0, D) for n in "qkv"}, "heads"),
        "no head_dim": ({n: x(2, 6, H, 0) for n in "qkv"}, "head_dim"),
    },
    "varlen": {
        "q four dims": ({"q": x(1, 6, H, D)}, "q"),
        "k two dims": ({"k": x(6, D)}, "k"),
        "v length": ({"v": x(5, H, D)}, "v"),
        "v heads": ({"v": x(6, 2, D)}, "v"),
        "k head_dim": ({"k": x(6, H, D + 1)}, "k"),
        "heads do not divide": ({"k": x(6, 3, D), "v": x(6, 3, D)}, "heads"),
        "no heads": ({n: x(6, 0, D) for n in "qkv"}, "heads"),
        "no head_dim": ({n: x(6, H, 0) for n in "qkv"}, "head_dim"),
        "bias rows": ({"attn_bias": x(1, 5, 4)}, "attn_bias"),
        "bias columns": ({"attn_bias": x(1, 6, 5)}, "attn_bias"),
        "bias four dims": ({"attn_bias": x(2, H, 4, 4)}, "attn_bias"),
    },
    "kvpacked": {
        "kv four dims": ({"kv": x(6, 2, H, D)}, "kv"),
        "kv of three": ({"kv": x(2, 6, 3, H, D)}, "kv"),
        "kv heads": ({"kv": x(2, 6, 2, 3, D)}, "heads"),
        "kv batch": ({"kv": x(3, 6, 2, H, D)}, "batch"),
        "kv head_dim": ({"kv": x(2, 6, 2, H, D + 1)}, "head_dim"),
    },
    "qkvpacked": {
        "four dims": ({"qkv": x(6, 3, H, D)}, "qkv"),
        "of two": ({"qkv": x(2, 6, 2, H, D)}, "qkv"),
        "heads before": ({"qkv": x(2, 6, H, 3, D)}, "qkv"),
    },
    "varlen_kvpacked": {
        "kv three dims": ({"kv": x(6, H, D)}, "kv"),
        "kv of three": ({"kv": x(6, 3, H, D)}, "kv"),
        "kv heads": ({"kv": x(6, 2, 3, D)}, "heads"),
    },
    "varlen_qkvpacked": {
        "three dims": ({"qkv": x(6, H, D)}, "qkv"),
        "of two": ({"qkv": x(6, 2, H, D)}, "qkv"),
    },
}


@pytest.mark.parametrize(
    ("entry", "case"), [(e, c) for e, cases in SHAPES.items() for c in cases], ids=str
)
def test_shapes(entry, case):
    changes, name = SHAPES[entry][case]
    refused(entry, changes, [name])


BOUNDARIES = {
    "decreasing": int32(0, 4, 2),
    "negative": int32(0, -1, 6),
    "past the data": int32(0, 2, 7),
    "not from 0": int32(1, 2, 6),
    "floating": torch.tensor([0.0, 2.0, 6.0]),
    "bool": torch.tensor([False, True, True]),
    "complex": torch.tensor([0, 2, 6], dtype=torch.complex64),
    "two dimensions": torch.tensor([[0, 2, 6]], dtype=torch.int32),
    "no dimension": torch.tensor(0, dtype=torch.int32),
    "empty": torch.tensor([], dtype=torch.int32),
    "on another device": torch.tensor([0, 2, 6], dtype=torch.int32, device="meta"),
    "a list": [0, 2, 6],
    "None": None,
}


@pytest.mark.parametrize("case", BOUNDARIES)
@pytest.mark.parametrize("entry", PACKED)
def test_boundaries_of_sequences(entry, case, backend):
    value = BOUNDARIES[case]
    if entry == "varlen_qkvpacked":
        refused(entry, {"cu_seqlens": value}, ["cu_seqlens"], backend=backend)
        return
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        refused(entry, {name: value}, [name], backend=backend)


@pytest.mark.parametrize("entry", ["varlen", "varlen_kvpacked"])
def test_boundaries_of_different_batch_sizes(entry, backend):
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        refused(entry, {name: int32(0, 2, 4, 6)}, ["cu_seqlens"], backend=backend)
        refused(entry, {name: int32(0, 6)}, ["cu_seqlens"], backend=backend)


LONGEST = {
    "too small": 3,
    "zero": 0,
    "negative": -1,
    "floating": 4.0,
    "bool": True,
    "None": None,
    "floating tensor": torch.tensor(4.0),
    "text": "4",
    "beyond 32 bits": 2**31,
}


@pytest.mark.parametrize("case", LONGEST)
@pytest.mark.parametrize("entry", PACKED)
def test_longest_sequences(entry, case, backend):
    value = LONGEST[case]
    if entry == "varlen_qkvpacked":
        refused(entry, {"max_seqlen": value}, ["max_seqlen"], backend=backend)
        return
    for name in ("max_seqlen_q", "max_seqlen_k"):
        refused(entry, {name: value}, [name], backend=backend)


@pytest.mark.parametrize("entry", PACKED)
def test_longest_sequences_as_other_integers(entry, backend):
    names = ("max_seqlen",) if entry == "varlen_qkvpacked" else ("max_seqlen_q", "max_seqlen_k")
    function, arguments = good(entry)
    want = function(**arguments, **backend)
    for four in (torch.tensor(4), np.int64(4)):
        got = function(**{**arguments, **dict.fromkeys(names, four)}, **backend)
        assert torch.equal(got, want)


USED = {
    "beyond the sequence": int32(3, 4),
    "negative": int32(-1, 4),
    "too few": int32(2),
    "too many": int32(2, 4, 0),
    "floating": torch.tensor([2.0, 4.0]),
    "bool": torch.tensor([True, True]),
    "two dimensions": torch.tensor([[2, 4]], dtype=torch.int32),
    "on another device": torch.tensor([2, 4], dtype=torch.int32, device="meta"),
    "a list": [2, 4],
}


@pytest.mark.parametrize("case", USED)
@pytest.mark.parametrize("entry", PACKED)
def test_used_lengths(entry, case, backend):
    for name in ("seqused_q", "seqused_k"):
        refused(entry, {name: USED[case]}, [name], backend=backend)


def test_a_block_table_is_unsupported():
    refused(
        "varlen", {"block_table": x(2, 1, dtype=torch.int32)}, ["block_table"], UnsupportedError
    )


def part(*shape, lse=None, dtype=torch.float32):
    return x(*shape, dtype=dtype), x(*(lse or (*shape[:-3], shape[-2], shape[-3])))


PARTS = {
    "none": [],
    "shapes differ": [part(1, 3, 2, 8), part(1, 4, 2, 8)],
    "dims differ": [part(1, 3, 2, 8), part(3, 2, 8)],
    "two dims": [(x(3, 8), x(3))],
    "lse transposed": [part(1, 3, 2, 8, lse=(1, 3, 2))],
    "second lse": [part(1, 3, 2, 8), part(1, 3, 2, 8, lse=(1, 2, 4))],
    "dtypes differ": [part(1, 3, 2, 8), part(1, 3, 2, 8, dtype=torch.float64)],
    "integers": [part(1, 3, 2, 8, dtype=torch.int32)],
    "devices differ": [part(1, 3, 2, 8), tuple(t.to("meta") for t in part(1, 3, 2, 8))],
    "out alone": [x(1, 3, 2, 8)],
    "three results": [(*part(1, 3, 2, 8), None)],
    "not tensors": [([0.0], [0.0])],
    "lse is None": [(x(1, 3, 2, 8), None)],
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_a_merge(case):
    with pytest.raises(InvalidInputError, match="parts"):
        tilewise.merge_attention(PARTS[case])


def test_explain_refuses_what_a_call_refuses():
    q = x(1, 4, 2, 8)
    for changes, name in (
        ({"softcap": -1.0}, "softcap"),
        ({"backend": "gpu"}, "backend"),
        ({"window_size": 3}, "window_size"),
    ):
        with pytest.raises(InvalidInputError, match=name):
            tilewise.explain(q, q, q, **changes)
    with pytest.raises(UnsupportedError, match="fa3"):
        tilewise.explain(q, q, q, algorithm="fa3")
