"""torch.compile, autocast, double backward and torch.func on a GPU."""

import pytest
import torch

from tilewise import explain, flash_attn_func, flash_attn_varlen_func

from .tools import draw, packed, qkv, results, same_bits


def test_auto_takes_the_fastest_for_tensors_on_a_gpu():
    hopper = torch.cuda.get_device_capability()[0] == 9
    choice = explain(**qkv(), causal=True)
    taken = ("gluon", "fa3") if hopper else ("triton", "fa2")
    assert (choice.backend, choice.algorithm) == taken
    choice = explain(**qkv(dtype=torch.float32), causal=True)
    assert (choice.backend, choice.algorithm) == ("triton", "fa2")


def test_float64_is_refused_by_name(triton_engine):
    from tilewise import UnsupportedError

    with pytest.raises(UnsupportedError, match="float64"):
        flash_attn_func(**qkv(dtype=torch.float64), **triton_engine)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_give_what_eager_ones_give(dynamic, triton_engine):
    torch._dynamo.reset()

    def step(q, k, v):
        out = flash_attn_func(q, k, v, causal=True, **triton_engine)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for sq in (200, 129):
        found = []
        for function in (step, compiled):
            leaves = [x.requires_grad_() for x in qkv(sq=sq).values()]
            out = function(*leaves)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        for a, b in zip(*found, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b)


def test_compiled_packed_calls_with_a_given_seed(triton_engine):
    torch._dynamo.reset()
    inputs = packed([200, 1, 90], [333, 5, 120]) | {"dropout_p": 0.2, "causal": True}
    inputs["seed"] = torch.tensor([9], device="cuda")

    def step(**given):
        return flash_attn_varlen_func(**given, **triton_engine)

    want, got = step(**inputs), torch.compile(step, fullgraph=True)(**inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_casting_first(dtype, triton_engine):
    leaves = [x.requires_grad_() for x in qkv(dtype=torch.float32).values()]
    with torch.autocast("cuda", dtype):
        out = flash_attn_func(*leaves, causal=True, **triton_engine)
    cast = [x.detach().to(dtype).requires_grad_() for x in leaves]
    want = flash_attn_func(*cast, causal=True, **triton_engine)
    assert out.dtype == dtype and torch.equal(out, want)
    dout = draw(*out.shape, seed=4, dtype=dtype)
    got = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(got, torch.autograd.grad(want, cast, dout), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def twice(q, k, v, dout, **options):
    """Gradients of the squares of the gradients."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, **options)
    first = torch.autograd.grad(out, leaves, dout, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def test_double_backward_is_that_of_the_cpu(triton_engine):
    inputs = list(qkv(1, 20, 30, d=16, dtype=torch.float32).values())
    dout = draw(1, 20, 4, 16, seed=4, dtype=torch.float32)
    got = twice(*inputs, dout, causal=True, softcap=2.0, **triton_engine)
    cpu = [x.detach().cpu().double() for x in (*inputs, dout)]
    want = twice(*cpu, causal=True, softcap=2.0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=1e-4)


def test_vmap_is_a_loop_of_calls(triton_engine):
    inputs = [x.unflatten(0, (2, 1)) for x in qkv(2).values()]

    def one(q, k, v):
        return flash_attn_func(q, k, v, causal=True, **triton_engine)

    got = torch.func.vmap(one)(*inputs)
    want = torch.stack([one(*(x[n] for x in inputs)) for n in range(2)])
    torch.testing.assert_close(got, want)


def test_checkpointing_recomputes_the_same_bits(triton_engine):
    from torch.utils.checkpoint import checkpoint

    inputs = qkv()

    def call(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.3, **triton_engine)

    found = []
    for function in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.cuda.manual_seed(5)
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        out = function(*leaves)
        grads = torch.autograd.grad(out.float().sum(), leaves)
        found.append({str(n): x.detach() for n, x in enumerate((out, *grads))})
    same_bits(*found)


def test_only_the_gradients_that_are_wanted_are_computed(triton_engine):
    """C20: each is the same whichever others are asked for."""
    inputs = qkv() | {
        "attn_bias": draw(2, 1, 200, 333, seed=5),
        "sink": draw(4, seed=6, dtype=torch.float32),
    }
    want = results(inputs, **triton_engine)
    for name in inputs:
        tensors = {n: x.detach().requires_grad_(n == name) for n, x in inputs.items()}
        out = flash_attn_func(**tensors, **triton_engine)
        (got,) = torch.autograd.grad(out, [tensors[name]], torch.ones_like(out))
        same_bits({"x": got}, {"x": want[f"d{name}"]})
