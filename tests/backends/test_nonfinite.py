"""What is not finite, or huge, stays with the rows that see it; where a row sees it, it shows."""

import pytest
import torch

from tilewise import flash_attn_func, flash_attn_varlen_func

GARBAGE = {"nan": torch.nan, "inf": torch.inf, "minus_inf": -torch.inf, "huge": 3e38}
EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2])},
    "bias": {"attn_bias": torch.linspace(-1, 1, 20 * 20).reshape(20, 20)},
    "sink": {"sink": torch.tensor([0.5, -0.5])},
    "dropout": {"dropout_p": 0.3, "seed": 5},
}
S = 20


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(tensors, engine, **options):
    """out, lse, dq, dk, dv of the four tensors q, k, v, dout."""
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    out, lse = flash_attn_func(*leaves, **options, **engine, return_lse=True)
    found = torch.autograd.grad(out, leaves, tensors["dout"])
    return dict(
        zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *found), strict=False)
    )


def inputs():
    return {name: draw(1, S, 2, 4, seed=i) for i, name in enumerate(("q", "k", "v", "dout"))}


def split(results, rows_seeing, keys_seen):
    """The parts of the results that garbage must not reach."""
    rows, keys = (
        torch.tensor(sorted(set(range(S)) - set(x)), dtype=torch.int64)
        for x in (rows_seeing, keys_seen)
    )
    return {
        "out": results["out"][:, rows],
        "lse": results["lse"][..., rows],
        "dq": results["dq"][:, rows],
        "dk": results["dk"][:, keys],
        "dv": results["dv"][:, keys],
    }


def assert_same(got, want):
    for name, x in got.items():
        torch.testing.assert_close(
            x, want[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", ["k", "v", "kv"])
def test_keys_that_a_mask_hides_from_all_rows_change_nothing(which, garbage, extra, engine):
    clean, dirty = inputs(), inputs()
    hidden = [3, 11, 19]
    for name in which:
        dirty[name][:, hidden] = GARBAGE[garbage]
    options = dict(EXTRAS[extra])
    if "attn_bias" in options:
        options["attn_bias"] = options["attn_bias"].index_fill(1, torch.tensor(hidden), -torch.inf)
    else:
        options["attn_bias"] = torch.ones(S, dtype=torch.bool).index_fill(
            0, torch.tensor(hidden), False
        )
    want, got = call(clean, engine, **options), call(dirty, engine, **options)
    assert all(torch.isfinite(x).all() for x in want.values())
    assert_same(got, want)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", ["k", "v"])
def test_causal_rows_before_a_bad_key_do_not_see_it(which, garbage, extra, engine):
    clean, dirty = inputs(), inputs()
    dirty[which][:, 13] = GARBAGE[garbage]
    want, got = (call(x, engine, causal=True, **EXTRAS[extra]) for x in (clean, dirty))
    after = range(13, S)
    got, want = split(got, after, range(S)), split(want, after, range(S))
    assert got["out"].shape[1] == 13
    assert_same(got, want)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("garbage", ["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("which", ["q", "dout"])
def test_a_bad_row_reaches_no_other_row_and_no_key_that_it_does_not_see(
    which, garbage, extra, engine
):
    clean, dirty = inputs(), inputs()
    dirty[which][:, 6] = GARBAGE[garbage]
    want, got = (call(x, engine, causal=True, **EXTRAS[extra]) for x in (clean, dirty))
    if which == "dout":
        assert_same({n: got[n] for n in ("out", "lse")}, want)
    assert_same(split(got, [6], range(7)), split(want, [6], range(7)))


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("place", ["all_of_a_row", "one_element"])
def test_a_nan_that_is_seen_shows_in_all_that_depends_on_it(which, place, engine):
    width = slice(None) if place == "all_of_a_row" else slice(2, 3)
    dirty = inputs()
    dirty[which][:, 6, :, width] = torch.nan
    got = call(dirty, engine)
    if which == "q":
        shows = [got["out"][:, 6], got["lse"][..., 6], got["dq"][:, 6], got["dk"], got["dv"]]
    elif which == "k":
        shows = list(got.values())
    elif which == "v":
        shows = [got["out"][..., width], got["dq"], got["dk"]]
        assert torch.isfinite(got["lse"]).all() and torch.isfinite(got["dv"]).all()
    else:
        shows = [got["dv"][..., width], got["dq"][:, 6], got["dk"]]
        assert torch.isfinite(got["out"]).all()
    assert all(x.isnan().all() for x in shows)


@pytest.mark.parametrize("sign", [1, -1], ids=["inf", "minus_inf"])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_an_infinity_that_is_seen_shows(which, sign, engine):
    dirty = inputs()
    dirty[which][:, 6] = sign * torch.inf
    got = call(dirty, engine)
    rows = {"q": got["out"][:, 6], "dout": got["dq"][:, 6]}.get(which, got["out"])
    shows = ~torch.isfinite(rows).all(-1)
    if which == "k":  # a score of -inf weighs nothing
        shows |= torch.einsum("bihd,bhd->bih", dirty["q"], dirty["k"][:, 6]) == -torch.inf
    assert shows.all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_slack_rows_and_rows_past_seqused_are_not_read(garbage, engine):
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    used = torch.tensor([3, 5], dtype=torch.int32)
    past = [3, 9, 10, 11]
    results = []
    for fill in (0.0, GARBAGE[garbage]):
        q, k, v, dout = (draw(12, 2, 4, seed=i) for i in range(4))
        for x in (q, k, v, dout):
            x[past] = fill
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn_varlen_func(
            *leaves, cu, cu, 5, 5, seqused_q=used, seqused_k=used, return_lse=True, **engine
        )
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert (results[0][0][past] == 0).all() and (results[0][2][past] == 0).all()


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_row_without_keys_is_zero_even_when_its_query_and_dout_are_not_finite(
    garbage, extra, engine
):
    dirty = inputs()
    for name in ("q", "dout"):
        dirty[name][:, 4] = GARBAGE[garbage]
    options = dict(EXTRAS[extra])
    if "attn_bias" in options:
        options["attn_bias"] = options["attn_bias"].index_fill(0, torch.tensor(4), -torch.inf)
    else:
        options["attn_bias"] = torch.ones(S, 1, dtype=torch.bool).index_fill(
            0, torch.tensor(4), False
        )
    got = call(dirty, engine, **options)
    assert (got["out"][:, 4] == 0).all() and (got["dq"][:, 4] == 0).all()
    expected = options.get("sink", torch.tensor([-torch.inf, -torch.inf]))
    torch.testing.assert_close(got["lse"][0, :, 4], expected)
    assert torch.isfinite(got["dk"]).all() and torch.isfinite(got["dv"]).all()


@pytest.mark.parametrize("which", ["dlse_of_empty_row", "dout_of_empty_row"])
def test_cotangents_of_empty_rows_reach_nothing(which, engine):
    leaves = [
        x.requires_grad_()
        for x in (draw(1, 6, 1, 4, seed=1), *(draw(1, 3, 1, 4, seed=i) for i in (2, 3)))
    ]
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True, **engine)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    want = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    if which == "dlse_of_empty_row":
        dlse = dlse.index_fill(2, torch.tensor([0, 1, 2]), torch.nan)
    else:
        dout = dout.index_fill(1, torch.tensor([0, 1, 2]), torch.nan)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_sink_of_minus_infinity_is_no_sink(engine):
    tensors = inputs()
    sink = torch.full((2,), -torch.inf, requires_grad=True)
    mask = torch.ones(S, S, dtype=torch.bool)
    mask[3] = False  # a row without keys and without sink
    want = call(tensors, engine, attn_bias=mask)
    got = call(tensors, engine, attn_bias=mask, sink=sink.detach())
    assert_same(got, want)
    out = flash_attn_func(*(tensors[n] for n in "qkv"), attn_bias=mask, sink=sink, **engine)
    (dsink,) = torch.autograd.grad(out, sink, tensors["dout"])
    assert (dsink == 0).all()
