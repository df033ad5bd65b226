"""The oracle itself: against the definition in plain numbers, and its backward against autograd."""

import math

import pytest
import torch

from tilewise.arguments import Options, Packing, dense_call, packed_call
from tilewise.backends import reference
from tilewise.formats import philox
from tilewise.ops.schema import describe
from tilewise.testing import CASES, Case, make_inputs

SMALL = [
    Case(c.features, batch=2, seqlen_q=4, seqlen_k=5, nheads=2, head_dim=3, seed=c.seed)
    for c in CASES
]


def by_numbers(q, k, v, o, *, keep, first=0):
    """One dense call, one number at a time: lists in, lists (out, lse, probabilities) out."""
    sq, sk, heads, heads_kv = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    left, right = o.window_size
    right = 0 if o.causal else right
    scale = q.shape[3] ** -0.5 if o.softmax_scale is None else o.softmax_scale
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full((q.shape[0], heads, sq), -math.inf, dtype=torch.float64)
    probs = torch.zeros(q.shape[0], heads, sq, sk, dtype=torch.float64)
    bias = o.attn_bias
    for b in range(q.shape[0]):
        for h in range(heads):
            hk = h // (heads // heads_kv)
            for i in range(sq):
                d = i + sk - sq
                s = {}
                for j in range(sk):
                    if (right >= 0 and j > d + right) or (left >= 0 and j < d - left):
                        continue
                    there = None if bias is None else bias[b, h, i, j].item()
                    if there is False or there == -math.inf:
                        continue
                    x = scale * math.fsum(
                        a * c
                        for a, c in zip(q[b, i, h].tolist(), k[b, j, hk].tolist(), strict=False)
                    )
                    if o.softcap > 0:
                        x = o.softcap * math.tanh(x / o.softcap)
                    if o.alibi_slopes is not None:
                        x -= o.alibi_slopes[h].item() * abs(d - j)
                    if bias is not None and bias.dtype != torch.bool:
                        x += there
                    s[j] = x
                logits = list(s.values()) + ([] if o.sink is None else [o.sink[h].item()])
                if not logits:
                    continue
                top = max(logits)
                total = math.fsum(math.exp(x - top) for x in logits)
                lse[b, h, i] = top + math.log(total)
                for j, x in s.items():
                    weight = math.exp(x - top) / total
                    if o.dropout_p > 0:
                        weight *= keep[first + b, h, i, j].item() / (1 - o.dropout_p)
                    probs[b, h, i, j] = weight
                for c in range(v.shape[3]):
                    out[b, i, h, c] = math.fsum(
                        probs[b, h, i, j].item() * v[b, j, hk, c].item() for j in s
                    )
    return out, lse, probs


def prepare(case):
    inputs = make_inputs(case, torch.float64)
    packing = {n: inputs.pop(n) for n in Packing._fields if n in inputs}
    q, k, v = (inputs.pop(n) for n in "qkv")
    options = Options(**inputs)
    if packing:
        tensors, scalars = packed_call(q, k, v, Packing(**packing), options)
    else:
        tensors, scalars = dense_call(q, k, v, options)
    problem = describe(tensors, scalars, needs_grad=False)
    keep = None
    if options.dropout_p:
        span = {"batches": range(4), "heads": range(8), "rows": range(8), "cols": range(8)}
        keep = philox.keep_mask(options.seed, options.dropout_p, **span)
    return problem, tensors, options, packing, keep


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.id)
def test_forward_is_the_definition_number_by_number(case):
    problem, t, options, packing, keep = prepare(case)
    out, lse, probs = reference.attention(problem, t, torch.float64)
    if not packing:
        want = by_numbers(t.q, t.k, t.v, options, keep=keep)
    else:
        want = (torch.zeros_like(out), torch.full_like(lse, -math.inf), torch.zeros_like(probs))
        for b in range(problem.batch):
            q0, q1 = packing["cu_seqlens_q"][b : b + 2].tolist()
            k0, k1 = packing["cu_seqlens_k"][b : b + 2].tolist()
            if "seqused_q" in packing:
                q1 = q0 + packing["seqused_q"][b].item()
                k1 = k0 + packing["seqused_k"][b].item()
            bias = options.attn_bias
            one = options._replace(
                attn_bias=None if bias is None else bias[None, :, q0:q1, : k1 - k0]
            )
            o, s, p = by_numbers(
                t.q[None, q0:q1], t.k[None, k0:k1], t.v[None, k0:k1], one, keep=keep, first=b
            )
            want[0][q0:q1], want[1][:, q0:q1] = o[0], s[0]
            want[2][b, :, : q1 - q0, : k1 - k0] = p[0]
    for got, expected in zip((out, lse, probs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.id)
def test_backward_is_the_derivative_of_forward(case):
    problem, t, *_ = prepare(case)
    names = [n for n in ("q", "k", "v", "attn_bias", "sink") if getattr(t, n) is not None]
    names = [n for n in names if getattr(t, n).dtype != torch.bool]
    t = t._replace(**{n: getattr(t, n).clone().requires_grad_() for n in names})
    out, lse, _ = reference.attention(problem, t, torch.float64)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad((out, lse), [getattr(t, n) for n in names], (dout, dlse))
    with torch.no_grad():
        g = reference.attention_backward(problem, t, dout, dlse, torch.float64)
        without_lse = reference.attention_backward(problem, t, dout, None, torch.float64)
        zero_lse = reference.attention_backward(problem, t, dout, dlse * 0, torch.float64)
    for name, expected in zip(names, want, strict=True):
        place = {"attn_bias": "dbias", "sink": "dsink"}.get(name, f"d{name}")
        torch.testing.assert_close(getattr(g, place), expected, rtol=1e-11, atol=1e-12)
        assert torch.equal(getattr(without_lse, place), getattr(zero_lse, place))
