"""torch.func: grad, vmap by folding and by looping, jacrev, and what is refused."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tilewise import flash_attn_func, flash_attn_varlen_func

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def qkv(*lead):
    return tuple(draw(*lead, 2, s, 2, 4, seed=i) for i, s in enumerate((5, 6, 6)))


def loss(q, k, v, **options):
    out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    return out.square().sum() + lse.sum()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_grad_equals_autograd(engine):
    q, k, v = qkv()
    got = grad(lambda *x: loss(*x, **engine), argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    close(got, torch.autograd.grad(loss(*leaves, **engine), leaves))


def test_grad_of_bias_and_sink():
    q, k, v = qkv()
    bias, sink = draw(2, 1, 5, 6, seed=7), draw(2, seed=8)

    def of(bias, sink):
        return loss(q, k, v, attn_bias=bias, sink=sink, causal=True)

    leaves = [bias.clone().requires_grad_(), sink.clone().requires_grad_()]
    close(grad(of, (0, 1))(bias, sink), torch.autograd.grad(of(*leaves), leaves))


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (2, 0, 4)], ids=str
)
def test_vmap_that_folds(in_dims, engine):
    tensors = [
        x if d is None else draw(*x.shape[:d], 3, *x.shape[d:], seed=10 + i)
        for i, (x, d) in enumerate(zip(qkv(), in_dims, strict=True))
    ]

    def call(q, k, v):
        return flash_attn_func(q, k, v, causal=True, softcap=3.0, return_lse=True, **engine)

    got = vmap(call, in_dims)(*tensors)
    for i in range(3):
        one = [x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)]
        close((got[0][i], got[1][i]), call(*one))


OPTIONS = {
    "one_bias": lambda: {"attn_bias": draw(2, 2, 5, 6, seed=5)},
    "alibi": lambda: {"alibi_slopes": draw(2, 2, seed=5).abs()},
    "one_sink": lambda: {"sink": draw(2, seed=5)},
    "one_seed": lambda: {"dropout_p": 0.4, "seed": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_vmap_that_loops(name, engine):
    tensors, options = qkv(3), OPTIONS[name]()

    def call(q, k, v):
        return flash_attn_func(q, k, v, return_lse=True, **options, **engine)

    got = vmap(call)(*tensors)
    for i in range(3):
        close((got[0][i], got[1][i]), call(*(x[i] for x in tensors)))


@pytest.mark.parametrize("name", ["attn_bias", "sink", "alibi_slopes", "seed"])
def test_vmap_over_an_operand_alone(name, engine):
    q, k, v = qkv()
    operand = {
        "attn_bias": lambda: draw(3, 2, 1, 5, 6, seed=5),
        "sink": lambda: draw(3, 2, seed=5),
        "alibi_slopes": lambda: draw(3, 2, seed=5).abs(),
        "seed": lambda: torch.tensor([1, 2, 3]),
    }[name]()
    options = {"dropout_p": 0.5} if name == "seed" else {}

    def call(x):
        return flash_attn_func(q, k, v, **{name: x}, **options, **engine)

    got = vmap(call)(operand)
    close(got, torch.stack([call(x) for x in operand]))
    assert not torch.equal(got[0], got[1])


def test_vmap_of_dropout_asks_for_the_kind_of_randomness():
    x = draw(1, 20, 2, 4).expand(3, 1, 20, 2, 4)

    def call(x):
        return flash_attn_func(x, x, x, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(x)
    same = vmap(call, randomness="same")(x)
    different = vmap(call, randomness="different")(x)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


def test_vmap_of_packed_calls(engine):
    q, k, v = (draw(3, 9, 2, 4, seed=i) for i in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def call(q, k, v, cu):
        return flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, causal=True, return_lse=True, **engine)

    got = vmap(call, (0, 0, 0, None))(q, k, v, cu)
    bounds = torch.tensor([[0, 4, 9], [0, 0, 9], [0, 1, 2]], dtype=torch.int32)
    each = vmap(call)(q, k, v, bounds)
    for i in range(3):
        close((got[0][i], got[1][i]), call(q[i], k[i], v[i], cu))
        close((each[0][i], each[1][i]), call(q[i], k[i], v[i], bounds[i]))


@pytest.mark.parametrize("name", ["fold", *OPTIONS, "varlen"])
def test_vmap_of_grad_gives_gradients_per_example(name, engine):
    if name == "varlen":
        tensors = tuple(draw(3, 9, 2, 4, seed=i) for i in range(3))
        cu = torch.tensor([0, 4, 9], dtype=torch.int32)

        def one(q, k, v):
            return flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, **engine).square().sum()
    else:
        tensors, options = qkv(3), {} if name == "fold" else OPTIONS[name]()

        def one(q, k, v):
            return loss(q, k, v, **options, **engine)

    per_example = grad(one, argnums=(0, 1, 2))
    got = vmap(per_example)(*tensors)
    for i in range(3):
        close(tuple(g[i] for g in got), per_example(*(x[i] for x in tensors)))


def test_vmap_of_grad_of_shared_keys(engine):
    q, k, v = qkv()
    qs = draw(3, *q.shape, seed=9)
    per_example = grad(lambda q, k, v: loss(q, k, v, **engine), argnums=(0, 1, 2))
    got = vmap(per_example, (0, None, None))(qs, k, v)
    for i in range(3):
        close(tuple(g[i] for g in got), per_example(qs[i], k, v))


def test_vmap_in_vmap(engine):
    q, k, v = qkv(2, 3)
    got = vmap(vmap(lambda *x: flash_attn_func(*x, **engine)))(q, k, v)
    for i in range(2):
        for j in range(3):
            close(got[i, j], flash_attn_func(q[i, j], k[i, j], v[i, j], **engine))


def test_jacrev_equals_autograd_s_jacobian(engine):
    q, k, v = (x[:1, :3, :1] for x in qkv())

    def call(q):
        return flash_attn_func(q, k, v, causal=True, return_lse=True, **engine)[0]

    close(jacrev(call)(q), torch.autograd.functional.jacobian(call, q))


def test_jacrev_of_sink_dropout_and_packed_calls(engine):
    q, k, v = (draw(5, 1, 3, seed=i) for i in range(3))
    cu = torch.tensor([0, 2, 5])

    def call(q, sink):
        options = {"dropout_p": 0.3, "seed": 1, "sink": sink}
        return flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, **options, **engine)

    sink = draw(1, seed=4)
    got = jacrev(call, argnums=(0, 1))(q, sink)
    close(got, torch.autograd.functional.jacobian(call, (q, sink)))


def test_vjp(engine):
    q, k, v = qkv()
    out, pull = vjp(lambda q: flash_attn_func(q, k, v, **engine), q)
    leaf = q.clone().requires_grad_()
    want = flash_attn_func(leaf, k, v, **engine)
    close(out, want.detach())
    close(pull(out.cos())[0], torch.autograd.grad(want, leaf, out.cos())[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"sink": draw(1, seed=4)}, {"dropout_p": 0.3, "seed": 1}],
    ids=["fold", "sink", "dropout"],
)
def test_grad_of_grad_equals_double_backward(options, engine):
    q, k, v = (x[:1, :3, :1] for x in qkv())

    def penalty(q):
        return grad(lambda q: loss(q, k, v, **options, **engine))(q).square().sum()

    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, k, v, **options, **engine), leaf, create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), leaf)
    close(grad(penalty)(q), want)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_hessian_by_two_reverse_passes(packed, engine):
    q, k, v = (draw(3, 1, 2, seed=i) for i in range(3))
    cu = torch.tensor([0, 1, 3])

    def of(q):
        if packed:
            return flash_attn_varlen_func(q, k, v, cu, cu, 2, 2, **engine).square().sum()
        return flash_attn_func(q[None], k[None], v[None], **engine).square().sum()

    close(jacrev(jacrev(of))(q), torch.autograd.functional.hessian(of, q))


@pytest.mark.parametrize("transform", [jacfwd, hessian], ids=lambda f: f.__name__)
def test_forward_mode_is_refused_in_transforms(transform):
    q, k, v = qkv()
    with pytest.raises((RuntimeError, NotImplementedError), match=r"flash_attn_\w+|forward"):
        transform(lambda q: loss(q, k, v))(q)


def test_forward_mode_is_refused_and_not_silently_zero():
    q, k, v = qkv()
    with pytest.raises((RuntimeError, NotImplementedError), match=r"flash_attn_\w+|forward"):
        jvp(lambda q: flash_attn_func(q, k, v), (q,), (torch.ones_like(q),))
    import torch.autograd.forward_ad as fwAD

    with fwAD.dual_level():
        dual = fwAD.make_dual(q, torch.ones_like(q))
        with pytest.raises((RuntimeError, NotImplementedError), match=r"flash_attn_\w+|forward"):
            flash_attn_func(dual, k, v)
