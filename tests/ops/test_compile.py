"""torch.compile without graph breaks, static and dynamic, and torch.export."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tilewise import flash_attn_func, flash_attn_varlen_func
from tilewise.testing import Case, make_inputs

FEATURES = [
    (), ("causal", "softcap"), ("window", "gqa"), ("alibi",), ("attn_bias",), ("bool_mask", "sink"),
    ("dropout",), ("head_dim_v", "deterministic"), ("varlen",), ("seqused", "causal"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def inputs_of(features, sq=33, sk=49):
    inputs = make_inputs(
        Case(features, seqlen_q=sq, seqlen_k=sk, nheads=2, head_dim=8), torch.float32
    )
    return {
        n: x.requires_grad_()
        if n in ("q", "k", "v", "attn_bias", "sink") and x.is_floating_point()
        else x
        for n, x in inputs.items()
    }


def results(function, inputs):
    """out, lse and all gradients of one call."""
    attention = flash_attn_varlen_func if "cu_seqlens_q" in inputs else flash_attn_func
    out, lse = function(attention, inputs)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = (out * out.detach().cos()).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def call(attention, inputs):
    return attention(**inputs, return_lse=True)


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "+".join(f) or "plain")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(features, dynamic):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    inputs = inputs_of(features)
    for got, want in zip(results(compiled, inputs), results(call, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "+".join(f) or "plain")
def test_three_lengths_in_a_row_recompile_at_most_once(features):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compiles = []
    for lengths in ((33, 49), (40, 56), (21, 70)):
        inputs = inputs_of(features, *lengths)
        for got, want in zip(results(compiled, inputs), results(call, inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        compiles.append(counter.frame_count)
    assert compiles[-1] - compiles[0] <= 1


def test_layers_of_different_scales_compile_one_by_one():
    class Layer(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return flash_attn_func(x, x, x, softmax_scale=self.scale)

    x = torch.randn(1, 5, 2, 4)
    for scale in (0.1, 0.2, 0.3):
        compiled = torch.compile(Layer(scale), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), Layer(scale)(x))


def test_lengths_become_dynamic_by_themselves():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    compiles = []
    for lengths in ((33, 49), (40, 56), (21, 70), (64, 64)):
        results(compiled, inputs_of(("causal",), *lengths))
        compiles.append(counter.frame_count)
    assert compiles[1] > compiles[0] and compiles[1] == compiles[-1]


@pytest.mark.parametrize("features", [("causal", "gqa"), ("varlen",)], ids="+".join)
def test_inductor(features):
    compiled = torch.compile(call, fullgraph=True)
    inputs = inputs_of(features)
    for got, want in zip(results(compiled, inputs), results(call, inputs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_draws_one_mask_for_forward_and_backward(backend):
    def attention(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.5)

    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    v.requires_grad_()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = compiled(q, k, v)
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        torch.testing.assert_close((out * dout).sum(), (v * dv).sum())  # out is linear in v
        outs.append(out.detach())
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], compiled(q, k, v))


def test_deterministic_algorithms_are_honoured_in_compiled_code():
    seen = []

    def spy(graph, inputs):
        seen.extend(n.args for n in graph.graph.nodes if "flash_attn_fwd" in str(n.target))
        return graph

    x = torch.randn(1, 5, 2, 4)
    torch.use_deterministic_algorithms(True)
    try:
        torch.compile(flash_attn_func, fullgraph=True, backend=spy)(x, x, x)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.compile(flash_attn_func, fullgraph=True, backend=spy)(x, x, x)
    assert [True in args[11:] for args in seen] == [True, False]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)
        return flash_attn_func(q, k, v, causal=True).flatten(-2)


def test_export_with_a_dynamic_length():
    layer, x = Layer(), torch.randn(2, 12, 16)
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: length}})
    targets = [str(n.target) for n in program.graph.nodes]
    assert targets.count("tilewise.flash_attn_fwd.default") == 1
    for n in (12, 31):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program.module()(x), layer(x))
    # the operator also stands when the rest is decomposed
    assert "tilewise.flash_attn_fwd.default" in str(program.run_decompositions().graph)


def test_a_training_step_of_a_compiled_module_equals_eager():
    torch.manual_seed(0)
    a, b = Layer(), Layer()
    b.load_state_dict(a.state_dict())
    compiled = torch.compile(b, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 12, 16)
    for module in (a, compiled):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for p, r in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, r)
