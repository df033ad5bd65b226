"""What attention must satisfy whatever its inputs: by hypothesis, forward and gradients."""

import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise import flash_attn_func, flash_attn_varlen_func, merge_attention

F64 = torch.float64
# the engine fixture is one and the same value for all examples
some = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])

lengths = st.one_of(st.integers(1, 40), st.sampled_from([255, 257, 300]))
seeds = st.integers(0, 2**20)
sides = st.one_of(st.just(-1), st.integers(0, 30))


@st.composite
def calls(draw, heads=((1, 1), (2, 2), (4, 2), (3, 1))):
    """q, k, v and a cotangent of out, float64."""
    batch, sq, sk = draw(st.integers(1, 2)), draw(lengths), draw(lengths)
    (h, hk), d, dv = draw(st.sampled_from(heads)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    gen = torch.Generator().manual_seed(draw(seeds))
    shapes = ((batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv), (batch, sq, h, dv))
    return tuple(torch.randn(*s, generator=gen, dtype=F64) for s in shapes)


masks = st.fixed_dictionaries({"causal": st.booleans(), "window_size": st.tuples(sides, sides)})


def run(q, k, v, dout, function=flash_attn_func, **options):
    """out, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves, return_lse=True, **options)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@some
@given(calls(), masks, st.floats(-50, 50))
def test_a_constant_added_to_all_scores_moves_lse_alone(cpu_engine, call, mask, shift):
    want = run(*call, **mask, **cpu_engine)
    bias = torch.full((1, 1, 1, 1), shift, dtype=F64)
    got = run(*call, **mask, **cpu_engine, attn_bias=bias)
    close(got, (want[0], want[1] + shift, *want[2:]))


@some
@given(calls(), seeds)
def test_a_number_for_each_row_moves_its_lse_alone(cpu_engine, call, seed):
    gen = torch.Generator().manual_seed(seed)
    bias = 10 * torch.randn(1, 1, call[0].shape[1], 1, generator=gen, dtype=F64)
    want, got = run(*call, **cpu_engine), run(*call, **cpu_engine, attn_bias=bias)
    close(got, (want[0], want[1] + bias[..., 0], *want[2:]))


@some
@given(calls(), seeds)
def test_keys_have_no_order(cpu_engine, call, seed):
    q, k, v, dout = call
    order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(seed))
    out, lse, dq, dk, dv = run(q, k, v, dout, **cpu_engine)
    got = run(q, k[:, order], v[:, order], dout, **cpu_engine)
    close(got, (out, lse, dq, dk[:, order], dv[:, order]))


@some
@given(calls(), seeds)
def test_rows_do_not_know_of_each_other(cpu_engine, call, seed):
    q, k, v, dout = call
    order = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(seed))
    out, lse, dq, dk, dv = run(q, k, v, dout, **cpu_engine)
    got = run(q[:, order], k, v, dout[:, order], **cpu_engine)
    close(got, (out[:, order], lse[..., order], dq[:, order], dk, dv))


@some
@given(calls(), masks, st.lists(st.integers(0, 300), max_size=3))
def test_parts_over_the_keys_merge_into_the_whole(cpu_engine, call, mask, cuts):
    q, k, _v, _dout = call
    sq, sk = q.shape[1], k.shape[1]
    left, right = mask["window_size"]
    right = 0 if mask["causal"] else right
    d = torch.arange(sq)[:, None] + sk - sq
    j = torch.arange(sk)[None, :]
    seen = ((left < 0) | (j >= d - left)) & ((right < 0) | (j <= d + right))
    bounds = [0, *sorted(min(c, sk) for c in cuts), sk]

    def in_parts(q, k, v, return_lse):
        return merge_attention(
            [
                flash_attn_func(
                    q, k[:, a:b], v[:, a:b], attn_bias=seen[:, a:b], return_lse=True, **cpu_engine
                )
                for a, b in itertools.pairwise(bounds)
            ]
        )

    close(run(*call, function=in_parts), run(*call, **mask, **cpu_engine))


@some
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4),
    masks, seeds, st.sampled_from([(1, 1), (4, 2)]), st.booleans(),
)  # fmt: skip
def test_packed_sequences_are_the_sequences_one_by_one(cpu_engine, pairs, mask, seed, heads, drop):
    h, hk = heads
    gen = torch.Generator().manual_seed(seed)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in zip(*pairs, strict=True))
    q, dout = (torch.randn(int(cu_q[-1]), h, 4, generator=gen, dtype=F64) for _ in range(2))
    k, v = (torch.randn(int(cu_k[-1]), hk, 4, generator=gen, dtype=F64) for _ in range(2))

    def packed(q, k, v, **options):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 20, **options)

    slopes = torch.rand(len(pairs), h, generator=gen, dtype=F64)
    got = run(q, k, v, dout, function=packed, alibi_slopes=slopes, **mask, **cpu_engine)
    for b in range(len(pairs)):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        one = run(q[None, rows], k[None, keys], v[None, keys], dout[None, rows],
                  alibi_slopes=slopes[b], **mask, **cpu_engine)  # fmt: skip
        mine = (got[0][rows], got[1][:, rows], got[2][rows], got[3][keys], got[4][keys])
        close(mine, [x[0] for x in one])
    if drop:  # the mask of sequence b is that of batch entry b
        dropout = {"dropout_p": 0.4, "seed": seed}
        out = packed(q, k, v, **dropout, **mask, **cpu_engine)
        for b, (nq, nk) in enumerate(pairs):
            qb, kb, vb = (
                torch.zeros(len(pairs), n, x.shape[1], 4, dtype=F64)
                for n, x in ((nq, q), (nk, k), (nk, v))
            )
            qb[b], kb[b] = q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]]
            vb[b] = v[cu_k[b] : cu_k[b + 1]]
            dense = flash_attn_func(qb, kb, vb, **dropout, **mask, **cpu_engine)
            close([out[cu_q[b] : cu_q[b + 1]]], [dense[b]])


@some
@given(calls(), sides)
def test_causal_is_a_window_without_keys_to_the_right(cpu_engine, call, left):
    want = run(*call, causal=True, window_size=(left, -1), **cpu_engine)
    for a, b in zip(run(*call, window_size=(left, 0), **cpu_engine), want, strict=True):
        assert torch.equal(a, b)


@some
@given(calls(), sides, sides)
def test_a_window_is_a_mask(cpu_engine, call, left, right):
    sq, sk = call[0].shape[1], call[1].shape[1]
    d, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None, :]
    seen = ((left < 0) | (j >= d - left)) & ((right < 0) | (j <= d + right))
    want = run(*call, attn_bias=seen, **cpu_engine)
    close(run(*call, window_size=(left, right), **cpu_engine), want)


@some
@given(calls(heads=((4, 2), (3, 1), (6, 3))), masks)
def test_grouped_heads_are_repeated_heads(cpu_engine, call, mask):
    q, k, v, dout = call
    group = q.shape[2] // k.shape[2]
    out, lse, dq, dk, dv = run(*call, **mask, **cpu_engine)
    want = run(
        q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), dout, **mask, **cpu_engine
    )
    sums = [g.unflatten(2, (-1, group)).sum(3) for g in want[3:]]
    close((out, lse, dq, dk, dv), (*want[:3], *sums))


@some
@given(calls(), masks, st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_scale_of_queries_is_scale_of_scores(cpu_engine, call, mask, factor):
    q, k, v, dout = call
    out, lse, dq, dk, dv = run(*call, softmax_scale=0.3 * factor, **mask, **cpu_engine)
    got = run(q * factor, k, v, dout, softmax_scale=0.3, **mask, **cpu_engine)
    close(got, (out, lse, dq / factor, dk, dv))


@some
@given(calls(), masks, st.floats(-8, 8))
def test_out_is_linear_in_the_values(cpu_engine, call, mask, factor):
    q, k, v, dout = call
    options = {**mask, "dropout_p": 0.3, "seed": 7, **cpu_engine}
    out, lse, dq, dk, dv = run(*call, **options)
    close(run(q, k, v * factor, dout, **options), (out * factor, lse, dq * factor, dk * factor, dv))
    more = run(q, k, v + v.flip(1), dout, **options)
    flipped = run(q, k, v.flip(1), dout, **options)
    close([more[0], more[2]], [out + flipped[0], dq + flipped[2]])


@some
@given(calls(), masks)
def test_equal_values_come_out_as_they_are(cpu_engine, call, mask):
    q, k, v, _ = call
    out, lse = flash_attn_func(q, k, torch.ones_like(v), return_lse=True, **mask, **cpu_engine)
    close([out], [(lse != -torch.inf).double().mT[..., None].expand_as(out)])


@settings(some, max_examples=3)
@given(seeds, st.sampled_from([0.1, 0.5]))
def test_dropout_on_average_changes_nothing(cpu_engine, seed, p):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 24, 2, 4, generator=gen, dtype=F64) for _ in range(3))
    n = 400
    draws = torch.stack(
        [flash_attn_func(q, k, v, dropout_p=p, seed=seed + i, **cpu_engine) for i in range(n)]
    )
    gap = draws.mean(0) - flash_attn_func(q, k, v, **cpu_engine)
    # 5.5 deviations of each of the 192 means
    assert (gap.abs() <= 5.5 * draws.std(0) / n**0.5).all()
    assert (draws.std(0) > 0).all()
