"""A call like one before goes the short way: to equal bits, and never where it must not."""

import gc
import threading
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import (
    InvalidInputError,
    UnsupportedError,
    api,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    repeats,
)
from tilewise.ops import kinds


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(kinds, "_kinds", {})


@pytest.fixture
def only_the_short_way(monkeypatch):
    """Within, a call that would be checked anew fails."""

    def refuse(*_):
        raise AssertionError("the long way")

    @contextmanager
    def entered():
        with monkeypatch.context() as patch:
            patch.setattr(api, "dense_call", refuse)
            patch.setattr(api, "packed_call", refuse)
            yield

    return entered


def qkv(dtype=torch.float32, needs_grad=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 9, 2, 8, generator=g).to(dtype) for _ in range(3)]
    return [x.requires_grad_(needs_grad) for x in made]


def packed(bounds=(0, 4, 9)):
    q, k, v = (x[0] for x in qkv())
    cu = torch.tensor(bounds, dtype=torch.int32)
    return [q, k, v, cu, cu, 5, 5]


def same(a, b):
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "window": {"window_size": [3, 1], "softcap": 2.0, "softmax_scale": 0.3},
    "negative_scale": {"softmax_scale": -0.3},
    "sink": {"sink": torch.nn.Parameter(torch.tensor([0.5, -1.0]))},
    "bias": {"attn_bias": torch.linspace(-1, 1, 81).view(1, 1, 9, 9)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "seed": {"dropout_p": 0.4, "seed": torch.tensor([3])},
}


@pytest.mark.parametrize("needs_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_repeated_call_is_not_checked_anew_and_gives_equal_bits(
    name, needs_grad, only_the_short_way, cpu_engine
):
    def call():
        inputs = qkv(needs_grad=needs_grad)
        found = flash_attn_func(*inputs, **OPTIONS[name], **cpu_engine)
        if not needs_grad:
            return found
        parts = found if isinstance(found, tuple) else (found,)
        return (*parts, *torch.autograd.grad(sum(x.sum() for x in parts), inputs))

    first = call()
    with only_the_short_way():
        assert same(call(), first)
        assert same(call(), first)


def test_packed_calls_and_parts_of_one_tensor_too(only_the_short_way):
    args, qkv_ = packed(), torch.stack(qkv(), 2)
    want = flash_attn_varlen_func(*args), flash_attn_qkvpacked_func(qkv_)
    with only_the_short_way():
        assert same((flash_attn_varlen_func(*args), flash_attn_qkvpacked_func(qkv_)), want)
        flash_attn_varlen_func(*packed((0, 5, 9)))  # other values, the same kind
        with pytest.raises(AssertionError, match="the long way"):
            flash_attn_varlen_func(*args[:6], 6)


def test_other_values_give_other_results(only_the_short_way):
    flash_attn_func(*qkv())
    with only_the_short_way():
        got = flash_attn_func(*qkv(seed=1))
    repeats._known.clear()
    assert same(got, flash_attn_func(*qkv(seed=1)))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:1],
        lambda x: x[:, :7],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
        lambda x: x.to("meta"),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["dtype", "batch", "length", "strides", "alignment", "device", "parameter"],
)
def test_another_layout_is_another_call(other, only_the_short_way):
    q, k, v = qkv()
    flash_attn_func(q, k, v)
    with only_the_short_way(), pytest.raises(AssertionError, match="the long way"):
        flash_attn_func(other(q), other(k), other(v))


def test_autocast_casts_after_calls_without_it_and_not_after(only_the_short_way):
    q, k, v = qkv()
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            wanted = torch.bfloat16 if enabled else torch.float32
            assert flash_attn_func(q, k, v).dtype == wanted
    with torch.autocast("cpu", torch.float16):
        assert flash_attn_func(q, k, v).dtype == torch.float16
    q, k, v = qkv(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):  # nothing to cast
        flash_attn_func(q, k, v)
        with only_the_short_way():
            flash_attn_func(q, k, v)
    with torch.autocast("cpu", torch.float16):
        assert flash_attn_func(q, k, v).dtype == torch.float16


def test_a_call_that_autocast_casts_is_repeated_with_its_gradients(only_the_short_way):
    def call():
        q, k, _ = leaves = qkv(needs_grad=True)
        v = leaves[2].bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn_func(q, k, v)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    first = call()
    assert [x.dtype for x in first] == [torch.bfloat16, *[torch.float32] * 3]
    with only_the_short_way():
        assert same(call(), first)


def test_autocast_of_another_device_is_none():
    q, k, v = qkv()
    torch.set_autocast_enabled("cuda", True)
    try:
        assert flash_attn_func(q, k, v).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert flash_attn_func(q, k, v).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_call_inside_autocast_computes_in_its_own_dtypes():
    q, k, v = qkv(torch.bfloat16)
    want = flash_attn_func(q, k, v, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert same(flash_attn_func(q, k, v, return_lse=True), want)


def test_gradients_are_there_when_they_are_wanted():
    for needs_grad in (False, True, False, True):
        q, k, v = qkv(needs_grad=needs_grad)
        assert flash_attn_func(q, k, v).requires_grad is needs_grad
        with torch.no_grad():
            assert not flash_attn_func(q, k, v).requires_grad
        with torch.inference_mode():
            assert flash_attn_func(q.detach(), k, v).is_inference()
    q, k, v = qkv()
    sink = torch.zeros(2, requires_grad=True)
    flash_attn_func(q, k, v, sink=sink.detach())
    flash_attn_func(q, k, v, sink=sink).sum().backward()
    assert sink.grad is not None


def test_the_deterministic_flag_reaches_the_backend(monkeypatch):
    seen = []
    described = kinds.describe
    monkeypatch.setattr(
        kinds, "describe", lambda t, s, **kw: seen.append(s.deterministic) or described(t, s, **kw)
    )
    for on in (False, True, False, True):
        torch.use_deterministic_algorithms(on)
        try:
            flash_attn_func(*qkv())
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def test_the_precision_of_float32_products_is_part_of_a_kind():
    before = torch.backends.cuda.matmul.fp32_precision
    keys = []
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            keys.append([kinds.settings(d) for d in (torch.float32, torch.float16)])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert keys[0][0] != keys[1][0] and keys[0][1] == keys[1][1]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"softcap": 0.0}, {"softcap": False}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0}, {"dropout_p": False}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"causal": True}, {"causal": 1.0}),
        ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"window_size": (1, 0)}, {"window_size": 1}),
        ({"window_size": (1, 0)}, {"window_size": (1, 0, 0)}),
        ({}, {"backend": ["auto"]}),
        ({}, {"backend": "none"}),
        ({}, {"seed": "1"}),
        ({}, {"sink": 1.0}),
        ({}, {"alibi_slopes": torch.ones(2, requires_grad=True)}),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_after_a_good_call(good, bad):
    q, k, v = qkv()
    for _ in range(2):
        flash_attn_func(q, k, v, **good)
        with pytest.raises(InvalidInputError):
            flash_attn_func(q, k, v, **bad)


def test_tensors_that_are_none_are_refused_after_a_good_call():
    q, k, v = qkv()
    flash_attn_func(q, k, v)
    for bad in ((None, k, v), (q, 1, v), (q, k, v.tolist())):
        with pytest.raises(InvalidInputError):
            flash_attn_func(*bad)
    with pytest.raises(InvalidInputError, match="strided"):
        flash_attn_func(q.to_sparse(), k, v)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_boundaries_are_looked_at_every_time(backend):
    args = packed()
    flash_attn_varlen_func(*args, backend=backend)
    args[3][1] = 20
    with pytest.raises(InvalidInputError, match="cu_seqlens_q"):
        flash_attn_varlen_func(*args, backend=backend)


def test_slopes_that_come_to_need_gradients_are_refused():
    q, k, v = qkv()
    slopes = torch.ones(2)
    flash_attn_func(q, k, v, alibi_slopes=slopes)
    with pytest.raises(InvalidInputError, match="alibi_slopes"):
        flash_attn_func(q, k, v, alibi_slopes=slopes.requires_grad_())
    with torch.no_grad():
        flash_attn_func(q, k, v, alibi_slopes=slopes)
    with pytest.raises(InvalidInputError, match="alibi_slopes"):
        flash_attn_func(q, k, v, alibi_slopes=slopes)


def test_a_length_that_is_a_tensor_is_read_every_time():
    args = packed()
    longest = torch.tensor(5)
    args[5:] = [longest, longest]
    flash_attn_varlen_func(*args)
    longest.fill_(2)
    with pytest.raises(InvalidInputError, match="max_seqlen"):
        flash_attn_varlen_func(*args)


def test_dropout_draws_a_seed_for_each_call(only_the_short_way):
    q, k, v = qkv()
    torch.manual_seed(3)
    first = [flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert not same(first[0], first[1]) and not same(first[1], first[2])
    torch.manual_seed(3)
    with only_the_short_way():
        again = [flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert same(tuple(first), tuple(again))


def test_a_seed_given_as_a_number_is_the_seed_that_is_taken():
    q, k, v = qkv()
    one, two = (flash_attn_func(q, k, v, dropout_p=0.5, seed=n) for n in (1, 2))
    assert not same(one, two)
    assert same(flash_attn_func(q, k, v, dropout_p=0.5, seed=1), one)


def test_no_tensor_stays_alive():
    gone = []
    for _ in range(2):
        inputs = qkv(needs_grad=True)
        sink = torch.zeros(2, requires_grad=True)
        out, lse = flash_attn_func(*inputs, sink=sink, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), [*inputs, sink])
        gone += [weakref.ref(x) for x in (*inputs, sink, out, lse, *grads)]
    assert repeats._known
    del inputs, sink, out, lse, grads
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(kinds, "MOST", 3)
    for n in range(1, 10):
        flash_attn_func(*[x[:, :n] for x in qkv()])
        assert len(repeats._known) <= 3 and len(kinds._kinds) <= 3


def test_a_mode_sees_repeated_calls():
    class Watcher(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(func))
            return func(*args, **(kwargs or {}))

    def step():
        inputs = qkv(needs_grad=True)
        torch.autograd.grad(flash_attn_func(*inputs).sum(), inputs)

    step()
    step()
    with Watcher() as watcher:
        step()
    assert sum(name.startswith("tilewise") for name in watcher.seen) == 2


def test_a_repeated_call_is_transformed_and_traced():
    q, k, v = qkv()
    want = flash_attn_func(q, k, v)
    assert same(flash_attn_func(q, k, v), want)
    got = torch.func.vmap(lambda x: flash_attn_func(x, k, v))(q.expand(3, *q.shape))
    torch.testing.assert_close(got, want.expand_as(got))
    gradient = torch.func.grad(lambda x: flash_attn_func(x, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(
        gradient, torch.autograd.grad(flash_attn_func(leaf, k, v).sum(), leaf)[0]
    )
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda x: flash_attn_func(x, k, v), (q,), (q,))
    compiled = torch.compile(
        lambda x: flash_attn_func(x, k, v), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q), want)


def test_a_penalty_on_the_gradient_of_a_repeated_call():
    for _ in range(2):
        inputs = qkv(torch.float64, needs_grad=True)
        first = torch.autograd.grad(flash_attn_func(*inputs).cos().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        assert all(torch.isfinite(x).all() for x in second)


def _transposed(x):
    """The same values with other strides."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("where", ["for all", "for one"])
def test_saved_tensors_may_come_back_with_other_strides(where, cpu_engine):
    def gradients(hooked):
        inputs = qkv(needs_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, _transposed)
        with hooks if hooked and where == "for all" else nullcontext():
            out = flash_attn_func(*inputs, causal=True, **cpu_engine)
        if hooked and where == "for one":
            out.grad_fn._raw_saved_tensors[0].register_hooks(lambda x: x, _transposed)
        return torch.autograd.grad(out.square().sum(), inputs)

    for hooked in (False, True, False, True):
        for got, want in zip(gradients(hooked), gradients(False), strict=True):
            torch.testing.assert_close(got, want)


def test_threads_at_once():
    want = [flash_attn_func(*qkv(seed=n)) for n in range(4)]
    repeats._known.clear()
    kinds._kinds.clear()
    wrong = []

    def run(n):
        for _ in range(50):
            if not same(flash_attn_func(*qkv(seed=n)), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_window_of_another_type_is_refused_after_a_good_call():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    flash_attn_func(q, k, v, window_size=(2, 1))
    for window in (range(2, 0, -1), {2: 1, 1: 0}, b"\x02\x01"):
        with pytest.raises(InvalidInputError, match="window_size"):
            flash_attn_func(q, k, v, window_size=window)
