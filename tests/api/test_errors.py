"""Errors: what they say, what they are, and that they survive pickling."""

import copy
import math
import pickle

import pytest
import torch

from tilewise import (
    InvalidInputError,
    TilewiseError,
    UnsupportedError,
    flash_attn_func,
    flash_attn_varlen_func,
)

COPIES = {
    "pickle": lambda e: pickle.loads(pickle.dumps(e)),
    "copy": copy.copy,
    "deep": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_errors_survive_being_copied(copied):
    invalid = copied(InvalidInputError("q", (1, 2), "must be three"))
    assert invalid.argument == "q"
    assert str(invalid) == "q: got (1, 2); must be three"
    unsupported = copied(UnsupportedError("nobody can", {"cpu": ["a", "b"], "reference": ("c",)}))
    assert unsupported.reasons == {"cpu": ["a", "b"], "reference": ("c",)}
    assert str(unsupported) == "nobody can\n  cpu: a; b\n  reference: c"


def test_kinds():
    assert issubclass(InvalidInputError, (TilewiseError, ValueError))
    assert issubclass(UnsupportedError, TilewiseError) and issubclass(
        UnsupportedError, NotImplementedError
    )


def z(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


GOOD = {"q": z(2, 5, 4, 8), "k": z(2, 7, 2, 8), "v": z(2, 7, 2, 3)}
BAD = {
    "q_is_no_tensor": ({"q": None}, "q: got NoneType"),
    "q_has_three_dimensions": ({"q": z(5, 4, 8)}, "q: got shape"),
    "integer_q": (
        {"q": z(2, 5, 4, 8, dtype=torch.int64)},
        "q: got dtype torch.int64; .*float16, bfloat16",
    ),
    "complex_q": ({"q": z(2, 5, 4, 8, dtype=torch.complex64)}, "q: got dtype torch.complex64"),
    "mixed": (
        {"k": z(2, 7, 2, 8, dtype=torch.float16)},
        "k: got dtype torch.float16; q has torch.float32",
    ),
    "mixed_v": ({"v": z(2, 7, 2, 3, dtype=torch.float64)}, "v: got dtype torch.float64"),
    "other_device": ({"k": GOOD["k"].to("meta")}, "k: got on meta; q is on cpu"),
    "batch": ({"k": z(1, 7, 2, 8), "v": z(1, 7, 2, 3)}, "k: got batch size 1; q has 2"),
    "head_dim": ({"k": z(2, 7, 2, 9)}, "k: got head_dim 9; q has 8"),
    "v_length": ({"v": z(2, 6, 2, 3)}, "v: got shape"),
    "v_heads": ({"v": z(2, 7, 1, 3)}, "v: got shape"),
    "heads": ({"q": z(2, 5, 3, 8)}, "q: got 3 heads; must be a multiple of k's 2"),
    "no_width": ({"q": z(2, 5, 4, 0), "k": z(2, 7, 2, 0)}, "q: got head_dim 0"),
    "no_width_v": ({"v": z(2, 7, 2, 0)}, "v: got head_dim 0"),
    "no_heads": ({"k": z(2, 7, 0, 8), "v": z(2, 7, 0, 3)}, "k: got no heads"),
    "dropout_all_but": ({"dropout_p": 1 - 2.0**-18}, "dropout_p: got 0.99"),
    "softcap_huge": ({"softcap": 3e38}, "softcap: got 3e"),
    "causal_text": ({"causal": "False"}, "causal: got str"),
    "causal_mask": ({"causal": torch.ones(5, 5)}, "causal: got Tensor"),
    "return_lse_text": ({"return_lse": "no"}, "return_lse: got str"),
    "dropout_one": ({"dropout_p": 1.0}, "dropout_p: got 1.0"),
    "dropout_negative": ({"dropout_p": -0.1}, "dropout_p: got -0.1"),
    "dropout_nan": ({"dropout_p": math.nan}, "dropout_p: got nan"),
    "dropout_kind": ({"dropout_p": "0.1"}, "dropout_p: got str"),
    "scale_inf": ({"softmax_scale": math.inf}, "softmax_scale: got inf"),
    "scale_kind": ({"softmax_scale": True}, "softmax_scale: got bool"),
    "softcap_negative": ({"softcap": -1.0}, "softcap: got -1.0"),
    "softcap_nan": ({"softcap": math.nan}, "softcap: got nan"),
    "window_length": ({"window_size": (1,)}, "window_size: got"),
    "window_below": ({"window_size": (-2, 0)}, "window_size: got"),
    "window_kind": ({"window_size": (1.5, 0)}, "window_size: got"),
    "window_none": ({"window_size": None}, "window_size: got None"),
    "slopes_shape": ({"alibi_slopes": z(2)}, "alibi_slopes: got shape"),
    "slopes_integer": ({"alibi_slopes": z(4, dtype=torch.int32)}, "alibi_slopes: got dtype"),
    "slopes_gradient": ({"alibi_slopes": z(4).requires_grad_()}, "alibi_slopes: got requires_grad"),
    "slopes_list": ({"alibi_slopes": [0.0] * 4}, "alibi_slopes: got list"),
    "bias_shape": ({"attn_bias": z(6, 7)}, "attn_bias: got shape"),
    "bias_five": ({"attn_bias": z(1, 1, 1, 5, 7)}, "attn_bias: got shape"),
    "bias_integer": ({"attn_bias": z(5, 7, dtype=torch.int64)}, "attn_bias: got dtype"),
    "sink_shape": ({"sink": z(2)}, "sink: got shape"),
    "sink_integer": ({"sink": z(4, dtype=torch.int64)}, "sink: got dtype"),
    "seed_kind": ({"dropout_p": 0.1, "seed": 1.5}, "seed: got float"),
    "seed_dtype": ({"dropout_p": 0.1, "seed": z(1)}, "seed: got torch.float32"),
    "seed_without_dropout": ({"seed": "abc"}, "seed: got str"),
    "backend_kind": ({"backend": None}, "backend: got None"),
    "backend_name": ({"backend": "nothing"}, "backend: got 'nothing'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named_with_what_was_given(name):
    flash_attn_func(**GOOD)
    changes, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_func(**GOOD | changes)


CU = torch.tensor([0, 3, 5], dtype=torch.int32)
PACKED = {
    "q": z(5, 4, 8), "k": z(5, 2, 8), "v": z(5, 2, 3),
    "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3,
}  # fmt: skip
BAD_PACKED = {
    "dense_q": ({"q": z(1, 5, 4, 8)}, "q: got shape"),
    "float_boundaries": ({"cu_seqlens_q": CU.float()}, "cu_seqlens_q: got dtype"),
    "bool_boundaries": ({"cu_seqlens_k": CU.bool()}, "cu_seqlens_k: got dtype"),
    "list_boundaries": ({"cu_seqlens_k": [0, 3, 5]}, "cu_seqlens_k: got list"),
    "matrix": ({"cu_seqlens_q": CU[None]}, "cu_seqlens_q: got shape"),
    "no_boundaries": ({"cu_seqlens_q": CU[:0]}, "cu_seqlens_q: got no entries"),
    "different_counts": ({"cu_seqlens_k": CU[:2]}, "cu_seqlens_k: got 2 entries"),
    "first": ({"cu_seqlens_q": CU + 1}, "cu_seqlens_q: got 1"),
    "decreasing": ({"cu_seqlens_k": torch.tensor([0, 3, 2])}, "cu_seqlens_k: got 3 then 2"),
    "past": ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, "cu_seqlens_q: got 6"),
    "longest": ({"max_seqlen_k": 2}, "max_seqlen_k: got 2"),
    "longest_kind": ({"max_seqlen_q": 3.0}, "max_seqlen_q: got float"),
    "longest_negative": ({"max_seqlen_q": -1}, "max_seqlen_q: got -1"),
    "used": ({"seqused_k": torch.tensor([4, 1])}, "seqused_k: got 4"),
    "used_count": ({"seqused_q": torch.tensor([1])}, "seqused_q: got 1 entries"),
    "used_kind": ({"seqused_q": torch.tensor([1.0, 1.0])}, "seqused_q: got dtype"),
    "bias": ({"attn_bias": z(4, 5, 4)}, "attn_bias: got shape"),
    "slopes": ({"alibi_slopes": z(3, 4)}, "alibi_slopes: got shape"),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packed_arguments_are_named(name):
    flash_attn_varlen_func(**PACKED)
    changes, message = BAD_PACKED[name]
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_varlen_func(**PACKED | changes)
