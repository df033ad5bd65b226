"""Values at the ends of what a dtype holds: tiny values, huge scores, extreme slopes."""

import pytest
import torch

from tilewise import flash_attn_func

ALGORITHMS = ["fa2", "fa1"]


def full(value, *shape, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-24, 1.0, 1e24, 1e35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", [-40.0, -15.0, 15.0, 40.0])
def test_equal_scores_average_values_of_any_size(algorithm, size, dtype, score):
    q, k = full(1.0, 1, 96, 1, 1, dtype=dtype), full(score, 1, 80, 1, 1, dtype=dtype)
    v = full(size, 1, 80, 1, 4, dtype=dtype)
    out = flash_attn_func(q, k, v, softmax_scale=1.0, algorithm=algorithm)
    tolerance = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out, v[:, :1].expand_as(out), rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_norms_that_underflow_prove_nothing(algorithm):
    q = full(1e-24, 1, 2, 1, 2)
    k = torch.tensor([1e18, -1e18, 2e18]).view(1, 3, 1, 1).expand(1, 3, 1, 2)
    v = torch.randn(1, 3, 1, 2)
    out = flash_attn_func(q, k, v, softmax_scale=1e10, algorithm=algorithm)
    torch.testing.assert_close(out, v[:, 2:].expand_as(out))  # the third score is 1e4 above


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e6, 1e19, 1e25, -1e20])
def test_gradients_beside_huge_scores(algorithm, dtype, scale):
    gen = torch.Generator().manual_seed(3)
    q = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 1, 1, 2).expand(1, 5, 1, 2)
    k = torch.randn(1, 7, 1, 2, dtype=dtype, generator=gen)
    v = torch.randn(1, 7, 1, 2, dtype=dtype, generator=gen).requires_grad_()
    flash_attn_func(q, k, v, softmax_scale=scale, algorithm=algorithm).sum().backward()
    best = int((k[0, :, 0, 0] * scale).argmax())
    want = torch.zeros(1, 7, 1, 2, dtype=dtype)
    want[:, best] = 5.0  # all five rows look at one key
    torch.testing.assert_close(v.grad, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("slope", [-2e38, -1e37, 3e38])
def test_extreme_slopes_do_not_leak_from_behind_the_mask(algorithm, slope):
    q, k, v = (torch.randn(1, 4, 1, 4) for _ in range(3))
    slopes = torch.tensor([slope])
    out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, algorithm=algorithm)
    torch.testing.assert_close(out[:, 0], v[:, 0])  # sees key 0 alone, at distance 0
    if slope > 0:
        torch.testing.assert_close(out, v)  # every row is left with its diagonal
