"""torch.library.opcheck: schema, autograd registration, fake implementation, AOT dispatch."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise import flash_attn_func, testing
from tilewise.arguments import Options, Packing, dense_call, packed_call
from tilewise.ops.attention import flash_attn_bwd, flash_attn_fwd, flash_attn_probs

FEATURES = [
    (), ("causal", "softcap"), ("window",), ("alibi",), ("attn_bias",), ("bool_mask",), ("sink",),
    ("dropout",), ("gqa", "head_dim_v"), ("varlen",), ("varlen", "attn_bias"), ("seqused", "sink"),
    ("varlen", "dropout"), ("attn_bias", "sink"),
]  # fmt: skip


FEW = [(), ("varlen",), ("dropout",), ("attn_bias", "sink")]


def name_of(features):
    return "+".join(features) or "plain"


@pytest.fixture
def flat(request):
    """The flat arguments of an operator, without gradients."""
    case = testing.Case(request.param, batch=2, seqlen_q=5, seqlen_k=7, nheads=2, head_dim=4)
    inputs = testing.make_inputs(case, torch.float32)
    packing = {n: inputs.pop(n) for n in Packing._fields if n in inputs}
    q, k, v = (inputs.pop(n) for n in "qkv")
    if packing:
        t, scalars = packed_call(q, k, v, Packing(**packing), Options(**inputs))
    else:
        t, scalars = dense_call(q, k, v, Options(**inputs))
    return (
        t.q, t.k, t.v, t.attn_bias, t.alibi_slopes, t.sink, t.cu_seqlens_q, t.cu_seqlens_k,
        t.seqused_q, t.seqused_k, t.seed, *scalars,
    )  # fmt: skip


every_feature = pytest.mark.parametrize("flat", FEATURES, ids=name_of, indirect=True)
few_features = pytest.mark.parametrize("flat", FEW, ids=name_of, indirect=True)


def with_gradients(flat):
    return tuple(
        x.clone().requires_grad_() if place in (0, 1, 2, 3, 5) and is_float(x) else x
        for place, x in enumerate(flat)
    )


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def gradient_arguments(flat, wanted=None):
    """dout, dlse and everything else that flash_attn_bwd takes."""
    out, lse = flash_attn_fwd(*flat)
    if wanted is None:
        wanted = [True, True, True, is_float(flat[3]), is_float(flat[5])]
    return (torch.randn_like(out), torch.randn_like(lse), *flat, out, lse, wanted)


@every_feature
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "requires_grad"])
def test_forward(flat, grad):
    torch.library.opcheck(flash_attn_fwd, with_gradients(flat) if grad else flat)


@every_feature
def test_backward(flat):
    torch.library.opcheck(flash_attn_bwd, gradient_arguments(flat))


@every_feature
def test_backward_without_a_gradient_of_lse(flat):
    dout, _, *rest = gradient_arguments(flat)
    torch.library.opcheck(flash_attn_bwd, (dout, None, *rest))


@few_features
def test_backward_that_is_differentiated_again(flat):
    dout, dlse, *rest, out, lse, wanted = gradient_arguments(flat)
    leaves = with_gradients(rest)
    arguments = (dout.requires_grad_(), dlse.requires_grad_(), *leaves, out, lse, wanted)
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if (
        flat[6] is None and flat[10] is None
    ):  # nothing that a trace of the formulas would have to read
        utilities.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(flash_attn_bwd, arguments, test_utils=utilities)


@few_features
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "requires_grad"])
def test_backward_of_which_a_part_is_wanted(flat, grad):
    arguments = gradient_arguments(flat, [True, False, True, False, False])
    if grad:
        dout, dlse, *rest, out, lse, wanted = arguments
        arguments = (dout.requires_grad_(), dlse, *with_gradients(rest), out, lse, wanted)
        utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
        torch.library.opcheck(flash_attn_bwd, arguments, test_utils=utilities)
        found = flash_attn_bwd(*arguments)
        loss = sum(x.sum() for x in found)  # with those that nobody wants, which are empty
        assert torch.isfinite(torch.autograd.grad(loss, arguments[0])[0]).all()
    else:
        torch.library.opcheck(flash_attn_bwd, arguments)


@every_feature
def test_probabilities(flat):
    torch.library.opcheck(flash_attn_probs, flat)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_fake_results_have_the_metadata_of_real_ones_for_any_strides(dtype, backend):
    q, k = (
        torch.randn(2, 3, 5, 4, dtype=dtype).transpose(1, 2),
        torch.randn(2, 7, 3, 4, dtype=dtype),
    )
    v = torch.randn(2, 7, 3, 9, dtype=dtype)[..., ::2]
    t, scalars = dense_call(q, k, v, Options(backend=backend))
    flat = (t.q, t.k, t.v, *([None] * 8), *scalars)
    arguments = gradient_arguments(flat)
    mode = FakeTensorMode()
    for op, args in ((flash_attn_fwd, flat), (flash_attn_bwd, arguments), (flash_attn_probs, flat)):
        real = op(*args)
        with mode:
            fake = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
        for a, b in zip(
            *((x,) if isinstance(x, torch.Tensor) else x for x in (real, fake)), strict=True
        ):
            assert (a.shape, a.dtype, a.stride(), a.device) == (
                b.shape,
                b.dtype,
                b.stride(),
                b.device,
            )


def test_metadata_is_right_on_the_meta_device():
    q = torch.empty(2, 5, 4, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out, lse = flash_attn_func(q, q, q[..., :3], return_lse=True)
    assert out.shape == (2, 5, 4, 3) and out.dtype == torch.bfloat16 and out.device.type == "meta"
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    out.sum().backward()
    assert q.grad.shape == q.shape
