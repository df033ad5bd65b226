"""bfloat16 weights by the fused operator: when it is taken, and that it is exp."""

import pytest
import torch

from tilewise import testing
from tilewise.backends.base import AttentionTensors
from tilewise.backends.cpu import fused, tiles
from tilewise.backends.cpu.score import Scores
from tilewise.backends.cpu.tiles import Scratch, Slot, make_chunk
from tilewise.ops.schema import Scalars, describe

pytestmark = pytest.mark.skipif(not tiles.has_bf16(), reason="no fast bfloat16 on this CPU")


def rand(*shape, seed=0, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen) * scale).to(torch.bfloat16)


def chunk_of(q, k, softmax_scale=0.125, right=-1, softcap=0.0, **tensors):
    t = AttentionTensors(q, k, k, **tensors)
    dropout = 0.1 if t.seed is not None else 0.0
    s = Scalars(
        q.shape[1], k.shape[1], dropout, softmax_scale, softcap, -1, right, False, "cpu", "fa2"
    )
    slot = Slot(None, slice(0, q.shape[0]), slice(0, k.shape[2]))
    return make_chunk(describe(t, s, False), t, slot, Scratch(torch.float32))


@pytest.mark.parametrize("softmax_scale", [0.125, 0.1])
def test_weights_are_exp_of_the_exact_scores_rounded_once(softmax_scale):
    q, k = rand(1, 96, 2, 64), rand(1, 80, 2, 64, seed=1)
    chunk = chunk_of(q, k, softmax_scale)
    scores = Scores(chunk)
    weights = fused.Weights(chunk, scores, range(96))
    keys = chunk.columns("k16", chunk.k, torch.bfloat16, copy=True)
    p = weights.tile(range(96), slice(0, 96), keys.block(range(80)), range(80))
    s = torch.einsum("ihd,jhd->hij", q[0].double(), k[0].double()) * softmax_scale
    exact = torch.exp(s - weights.shift)
    assert ((p.double() - exact) / exact).abs().max() < 2**-8
    assert (p.double() / exact).mean().sub(1).abs() < 2**-12  # and without bias


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"right": 0}, False),  # the first rows see few keys
        ({"softcap": 5.0}, False),
        ({"attn_bias": torch.ones(1, 1, 96, 96, dtype=torch.bool)}, False),
        ({"alibi_slopes": torch.ones(2)}, False),
        ({"seed": torch.ones(1, dtype=torch.int64)}, False),
        ({"softmax_scale": 4.0}, False),  # scores too large
    ],
)
def test_taken_only_where_it_is_exact(changes, taken):
    x = rand(1, 96, 2, 64)
    chunk = chunk_of(x, x, **changes)
    assert fused.applies(chunk, Scores(chunk), range(96)) == taken


def test_not_taken_in_other_dtypes_or_beside_what_is_not_finite():
    x = rand(1, 96, 2, 64).float()
    chunk = chunk_of(x, x)
    assert not fused.applies(chunk, Scores(chunk), range(96))
    x = rand(1, 96, 2, 64)
    x[0, 3] = float("nan")
    chunk = chunk_of(x, x)
    assert not fused.applies(chunk, Scores(chunk), range(96))


@pytest.mark.parametrize("head_dim", [40, 64, 96])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True},
        {"window_size": (130, 70)},
        {"causal": True, "window_size": (100, 0)},
        {"sink": torch.tensor([0.5, -3.0, 30.0, 2.0])},
        {"softmax_scale": -0.125},
    ],
    ids=lambda a: "+".join(a) or "plain",
)
def test_long_sequences_keep_the_rule(head_dim, arguments):
    q = rand(1, 700, 4, head_dim)
    k, v = (rand(1, 800, 2, head_dim, seed=s) for s in (1, 2))
    x = {"q": q, "k": k, "v": v, **arguments}
    got = testing.run(**x, backend="cpu")
    testing.assert_within(got, testing.oracle(**x), testing.plain(**x), torch.bfloat16)


@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_torch_s_own(causal):
    q, k, v = (rand(1, 1024, 8, 64, seed=s) for s in range(3))
    exact = testing.oracle(q, k, v, causal=causal).out
    own = testing.run(q, k, v, causal=causal, backward=False).out
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
    ).transpose(1, 2)
    errors = [float((x.double() - exact).abs().max()) for x in (own, theirs)]
    assert errors[0] <= 2 * errors[1]
