"""The dropout mask of each kernel, element by element, against the definition on a CPU.

With all queries zero every visible key weighs the same, and unit vectors lay the mask open.
"""

import pytest
import torch

from tilewise.formats.philox import keep_mask

from .tools import HALF, name_of, results

B, H, SQ, SK = 2, 3, 300, 256
P = 0.35


def unit_vectors(rows, width, heads, dtype):
    x = torch.eye(rows, width, dtype=dtype, device="cuda")
    return x[None, :, None].expand(B, rows, heads, width).contiguous()


def expected(seed, rows=SQ, cols=SK, p=P):
    return keep_mask(
        seed, p, batches=range(B), heads=range(H), rows=range(rows), cols=range(cols)
    ).cuda()


SEEDS = (0, 1234567890123, -(2**63), 2**63 - 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_forward(dtype, seed, triton_engine, loads):
    q = torch.zeros(B, SQ, H, 16, dtype=dtype, device="cuda")
    k = torch.zeros(B, SK, H, 16, dtype=dtype, device="cuda")
    v = unit_vectors(SK, SK, H, dtype)
    got = results({"q": q, "k": k, "v": v}, dropout_p=P, seed=seed, **triton_engine)["out"]
    assert torch.equal(got.transpose(1, 2) != 0, expected(seed))


@pytest.mark.parametrize("p", [1e-6, 0.5, 0.7, 0.9999])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_forward_of_any_probability(dtype, p, triton_engine):
    q = torch.zeros(B, SQ, H, 16, dtype=dtype, device="cuda")
    k = torch.zeros(B, SK, H, 16, dtype=dtype, device="cuda")
    v = unit_vectors(SK, SK, H, dtype)
    got = results({"q": q, "k": k, "v": v}, dropout_p=p, seed=7, **triton_engine)["out"]
    assert torch.equal(got.transpose(1, 2) != 0, expected(7, p=p))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_backward_of_values(dtype, seed, triton_engine, loads):
    """dV = (P Z)^T dO with dO the unit vectors: column i holds row i of the mask."""
    sq, sk = 256, 300
    q = torch.zeros(B, sq, H, 16, dtype=dtype, device="cuda")
    k = torch.zeros(B, sk, H, 16, dtype=dtype, device="cuda")
    v = torch.zeros(B, sk, H, sq, dtype=dtype, device="cuda")
    dout = unit_vectors(sq, sq, H, dtype)
    got = results({"q": q, "k": k, "v": v}, dout, dropout_p=P, seed=seed, **triton_engine)["dv"]
    assert torch.equal(got.permute(0, 2, 3, 1) != 0, expected(seed, sq, sk))


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_of_queries_keys_and_bias(seed, triton_engine, loads):
    """With dO V^T = 1, dS = P (Z - delta): above zero exactly where Z is."""
    dtype, sq = torch.float16, 256
    q = torch.zeros(B, sq, H, SK, dtype=dtype, device="cuda")
    v = torch.zeros(B, SK, H, 16, dtype=dtype, device="cuda")
    v[..., 0] = 1
    dout = torch.zeros(B, sq, H, 16, dtype=dtype, device="cuda")
    dout[..., 0] = 1
    want = expected(seed, sq)
    assert not want.all(-1).any()  # delta lies between 0 and 1 / (1 - P)
    options = {"dropout_p": P, "seed": seed, "softmax_scale": 1.0, **triton_engine}

    inputs = {"q": q, "k": unit_vectors(SK, SK, H, dtype), "v": v}
    got = results(inputs, dout, **options)["dq"]
    assert torch.equal(got.transpose(1, 2) > 0, want)

    inputs = {"q": unit_vectors(sq, sq, H, dtype), "k": torch.zeros_like(q)[:, :SK], "v": v}
    got = results(inputs, dout, **options)["dk"]
    assert torch.equal(got.permute(0, 2, 3, 1) > 0, want)

    bias = torch.zeros(B, H, sq, SK, dtype=dtype, device="cuda")
    inputs = {"q": q[..., :16], "k": q[:, :SK, :, :16], "v": v, "attn_bias": bias}
    got = results(inputs, dout, **options)["dattn_bias"]
    assert torch.equal(got > 0, want)


def test_packed_sequences_count_from_their_own_first_row(triton_engine):
    q = torch.zeros(B * SQ, H, 16, dtype=torch.float16, device="cuda")
    k = torch.zeros(B * SK, H, 16, dtype=torch.float16, device="cuda")
    v = unit_vectors(SK, SK, H, torch.float16).flatten(0, 1)
    inputs = {
        "q": q, "k": k, "v": v, "max_seqlen_q": SQ, "max_seqlen_k": SK,
        "cu_seqlens_q": torch.tensor([0, SQ, 2 * SQ], dtype=torch.int32, device="cuda"),
        "cu_seqlens_k": torch.tensor([0, SK, 2 * SK], dtype=torch.int32, device="cuda"),
    }  # fmt: skip
    got = results(inputs, dropout_p=P, seed=5, **triton_engine)["out"]
    assert torch.equal(got.unflatten(0, (B, SQ)).transpose(1, 2) != 0, expected(5))
