import json
import math
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tilewise.bench import gpt, meters, plots, pretraining, rivals
from tilewise.bench.pretraining import OTHER_SEED, Pretraining, config_for
from tilewise.bench.providers import PROVIDERS, Provider
from tilewise.bench.results import Output


def start(tmp_path, device="cpu", **more):
    only = more.pop("only", tuple(pretraining.RUNS))
    limit = more.pop("limit", None)
    config = config_for(device, **more)
    output = Output(tmp_path / "t.json", tmp_path / "t.csv", {"cpu": "C"})
    return Pretraining(config, output, only, limit)


def test_smoothing_is_a_moving_mean():
    assert pretraining.smoothed([1.0, 3.0, 5.0], 2) == [2.0, 4.0]
    assert pretraining.smoothed([1.0, 3.0], 20) == [2.0]
    assert pretraining.smoothed([], 20) == []
    assert pretraining.largest_gap([1.0, 2.0, 9.0], [1.0, 4.0]) == pytest.approx(1.0)
    assert pretraining.largest_gap([], [1.0]) == 0.0


def test_a_gpu_trains_gpt2_small_and_a_cpu_a_tiny_one():
    big, tiny = config_for("cuda"), config_for("cpu", steps=7, batch=3, context=32)
    m = big.model
    assert (m.layers, m.width, m.nheads, m.context) == (12, 768, 12, 1024)
    assert (big.dtype, big.steps, big.tokens) == ("bfloat16", 300, 32768)
    assert (m.name, m.dropout_p, tiny.model.name) == ("gpt2-small", 0.0, "tiny")
    assert (tiny.steps, tiny.tokens, tiny.dtype, tiny.device) == (7, 96, "float32", "cpu")


def test_gpt2_medium_and_a_step_of_32k_tokens():
    medium = config_for("cuda", model="gpt2-medium", dropout_p=0.1).model
    assert (medium.name, medium.layers, medium.nheads, medium.width) == (
        "gpt2-medium",
        24,
        16,
        1024,
    )
    assert (medium.context, medium.dropout_p) == (1024, 0.1)
    batches = {n: config_for("cuda", context=n).batch for n in (1024, 4096, 16384, 65536)}
    assert batches == {1024: 32, 4096: 8, 16384: 2, 65536: 1}
    assert config_for("cuda", context=4096, batch=3).batch == 3
    assert config_for("cpu", dropout_p=0.2).model.dropout_p == 0.2


def test_eager_is_standard_attention_with_the_dropout_of_torch(monkeypatch):
    q, k, v = (torch.randn(2, 9, 3, 8) for _ in range(3))
    out = gpt.attention_named("eager")(q, k, v, 0.0, 7)
    assert torch.equal(out, gpt.standard_attention(q, k, v, 0.0, 7))
    # one-hot values show the probabilities
    p = gpt.standard_attention(q, k, torch.eye(9)[None, :, None].expand(2, 9, 3, 9), 0.0, 7)
    torch.manual_seed(5)
    expected = F.dropout(p.transpose(1, 2).contiguous(), 0.5) @ v.transpose(1, 2)
    monkeypatch.delattr(gpt, "keep_mask")  # tilewise's mask
    torch.manual_seed(5)
    out = gpt.attention_named("eager")(q, k, v, 0.5, 7)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_standard_is_eager_and_rows_say_model_and_dropout(tmp_path):
    training = start(tmp_path, steps=2, dropout_p=0.1)
    training.run()
    assert not training.errors
    assert {training.runs[name].attention for name in ("standard", OTHER_SEED)} == {"eager"}
    for row in training.rows():
        assert (row.features["model"], row.features["dropout_p"]) == ("tiny", 0.1)
    without = start(tmp_path, steps=2).rows()
    assert all("dropout_p" not in row.features for row in without)


def test_dropout_changes_the_steps_and_not_the_evaluation(tmp_path):
    found = []
    for p in (0.0, 0.5):
        training = start(tmp_path, steps=2, dropout_p=p, only=("tilewise",))
        training.run()
        found.append(training.runs["tilewise"])
    assert found[0].held_out_before == found[1].held_out_before
    assert found[0].losses[0] != found[1].losses[0]


def test_equal_seeds_give_equal_curves_and_other_seeds_do_not(tmp_path):
    training = start(tmp_path, steps=6)
    training.run()
    gaps = training.gaps()
    assert gaps["tilewise"] < 1e-4 and gaps["sdpa"] < 1e-4 and gaps[OTHER_SEED] > 1e-2
    saved = json.loads((tmp_path / "t.json").read_text())
    rows = {r["features"]["run"]: r for r in saved["rows"]}
    assert list(rows) == list(pretraining.RUNS)
    assert rows[OTHER_SEED]["features"]["seed"] == 1
    for row in rows.values():
        f = row["features"]
        assert f["tokens_per_s"] == pytest.approx(4 * 64 * f["steps_per_s"])
        assert f["held_out_perplexity"] == pytest.approx(math.exp(f["held_out_loss"]))
        assert row["suite"] == "train" and row["ms"] > 0 and row["error"] is None
    assert len(saved["training"]["runs"]["sdpa"]["losses"]) == 6
    assert saved["training"]["largest_gap_to_standard"] == gaps


def offer(monkeypatch, name, function, **more):
    """``function`` as flash-attn's of that name, on a CPU."""
    monkeypatch.setitem(sys.modules, "like_flash", SimpleNamespace(flash_attn_func=function))
    provider = Provider(name, False, rivals._bind_flash("like_flash"), package="torch", **more)
    monkeypatch.setitem(PROVIDERS, name, provider)


def test_rivals_train_by_their_providers(tmp_path, monkeypatch):
    def flash(q, k, v, causal):
        seen.append((q.shape, causal))
        return gpt.sdpa_attention(q, k, v, 0.0, 0), None

    seen = []
    offer(monkeypatch, "fa3", flash)
    training = start(tmp_path, steps=4, only=("standard", OTHER_SEED, "sdpa-flash", "fa3"))
    training.run()
    gaps, rows = training.gaps(), training.rows()
    assert not training.errors and gaps["sdpa-flash"] < 1e-4 and gaps["fa3"] < 1e-4
    assert set(seen) == {((4, 64, 2, 32), True)}
    assert training.runs["fa3"].attention == "fa3"
    told = [(r.provider, r.features["run"], r.features["seed"]) for r in rows[2:]]
    assert told == [("sdpa-flash", "sdpa-flash", 0), ("fa3", "fa3", 0)]
    assert all(r.provider_version == torch.__version__ for r in rows[2:])


def test_a_rival_with_dropout_drops_in_steps_alone(tmp_path, monkeypatch):
    def flash(q, k, v, causal, **dropout):
        seen.append((torch.is_grad_enabled(), dropout))
        return gpt.sdpa_attention(q, k, v, 0.0, 0)

    seen = []
    offer(monkeypatch, "flash-attn", flash)
    training = start(tmp_path, steps=1, dropout_p=0.5, only=("flash-attn",))
    training.run()
    assert not training.errors and len(training.runs["flash-attn"].losses) == 1
    assert {on for on, _ in seen} == {True, False}
    assert all(dropout == ({"dropout_p": 0.5} if on else {}) for on, dropout in seen)


def test_a_rival_without_dropout_is_a_row_that_says_so(tmp_path, monkeypatch):
    def flash(q, k, v, causal):
        raise AssertionError("called")

    offer(monkeypatch, "fa4", flash, has_dropout=False)
    training = start(tmp_path, steps=2, dropout_p=0.1, only=("standard", "fa4"))
    training.run()
    standard, fa4 = training.rows()
    assert (fa4.error, fa4.ms) == ("fa4 has no dropout", None)
    assert standard.error is None and len(training.runs["standard"].losses) == 2
    assert training.refused == {"fa4"} and "fa4" not in training.runs
    assert "Not trained to the end:\n  fa4: fa4 has no dropout" in training.summary()


@pytest.mark.parametrize("backward", [True, False])
def test_runs_are_those_that_are_there_and_have_a_backward(monkeypatch, backward):
    found = rivals.providers_on("cuda")
    for name in ("flash-attn", "fa3", "fa4"):
        reason = "no such module" if name == "fa4" else None
        here = replace(found[name], absent=lambda reason=reason: reason)
        monkeypatch.setitem(found, name, here)
    monkeypatch.setitem(found, "fa3", replace(found["fa3"], has_backward=backward))
    more = ("sdpa-flash", "sdpa-cudnn", "flash-attn", *(("fa3",) if backward else ()))
    assert pretraining.runs_on("cuda") == (*pretraining.RUNS, *more)
    assert pretraining.runs_on("cpu") == (*pretraining.RUNS, "sdpa-flash")


def test_runs_differ_in_colour():
    names = {*pretraining.RUNS, *pretraining.OTHERS} - {OTHER_SEED}
    assert len({plots.color(name) for name in names}) == len(names)


def test_one_that_fails_leaves_the_others(tmp_path, monkeypatch):
    steps = []

    def attend(q, k, v, dropout_p, seed):
        steps.append(1)
        if len(steps) > 40:  # the evaluations before the first step
            raise RuntimeError("no more")
        return gpt.tilewise_attention(q, k, v, dropout_p, seed)

    monkeypatch.setitem(gpt.ATTENTION, "tilewise", attend)
    training = start(tmp_path, steps=20, only=("standard", "tilewise"))
    training.run()
    rows = {r.features["run"]: r for r in training.rows()}
    assert rows["tilewise"].error == "RuntimeError: no more"
    assert rows["standard"].error is None and len(training.runs["standard"].losses) == 20
    assert 0 < len(training.runs["tilewise"].losses) < 20
    assert "no more" in training.summary()


@pytest.mark.parametrize(
    ("method", "call", "losses"), [("evaluate", 1, None), ("step", 1, 0), ("evaluate", 3, 4)]
)
def test_one_that_is_out_of_memory_gives_back_what_it_held(
    tmp_path, monkeypatch, method, call, losses
):
    """At its construction, in its first step, in the evaluation at the end."""
    held, calls, seen, released = [], [], [], []

    def release(device):
        released.append(device)
        meters.release(device)

    class Counted(pretraining.Trainer):
        def __init__(self, attention, *rest):
            self.attention = attention
            super().__init__(attention, *rest)

    def counted(self, *rest, **more):
        if self.attention == "eager":
            calls.append(1)
            if len(calls) == call:
                held.extend(weakref.ref(x) for x in (self, *self.model.parameters()))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 GiB.")
        elif calls[call - 1 :]:
            seen.append([ref() is None for ref in held])
        return true(self, *rest, **more)

    true = getattr(pretraining.Trainer, method)
    monkeypatch.setattr(Counted, method, counted)
    monkeypatch.setattr(pretraining, "Trainer", Counted)
    monkeypatch.setattr(pretraining, "release", release)
    training = start(tmp_path, steps=4, only=("standard", "tilewise", "sdpa"))
    training.run()
    assert held and seen and all(all(gone) for gone in seen)
    assert released == ([] if losses is None else ["cpu"])  # one that never was, ``attempt`` frees
    rows = {r["features"]["run"]: r for r in json.loads((tmp_path / "t.json").read_text())["rows"]}
    assert rows["standard"]["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert (rows["standard"]["ms"] is None) == (not losses)
    run = training.runs.get("standard")
    assert (run and len(run.losses)) == losses
    for name in ("tilewise", "sdpa"):
        assert rows[name]["error"] is None and rows[name]["features"]["held_out_loss"] > 0
        assert len(training.runs[name].losses) == 4
    assert "standard: OutOfMemoryError" in training.summary()
    assert training.gaps() == {}  # no whole curve to compare with


def test_the_time_limit_ends_the_training(tmp_path):
    training = start(tmp_path, steps=5, only=("tilewise",), limit=1e-9)
    training.run()
    assert training.steps_left_out == 5 and training.runs["tilewise"].losses == []
    assert "tilewise" in training.summary()


def test_autocast_trains_in_bfloat16(tmp_path):
    seen = set()
    training = start(tmp_path, steps=2, dtype="bfloat16", only=("sdpa",))
    true = gpt.RIVALS["sdpa"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt.RIVALS, "sdpa", lambda q, *rest: seen.add(q.dtype) or true(q, *rest))
        training.run()
    assert seen == {torch.bfloat16} and not training.errors


@pytest.mark.gpu
def test_on_a_gpu_standard_and_sdpa_agree(tmp_path):
    only = ("standard", OTHER_SEED, "sdpa", "sdpa-flash", "sdpa-cudnn")
    training = start(tmp_path, "cuda", steps=6, batch=2, context=128, only=only)
    training.run()
    assert not training.errors
    gaps = training.gaps()
    assert all(gaps[name] < gaps[OTHER_SEED] for name in only[2:])
    assert all(len(run.losses) == 6 for run in training.runs.values())


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_standard_is_out_of_memory_and_sdpa_is_not(tmp_path):
    only = ("standard", "sdpa")
    training = start(tmp_path, "cuda", steps=2, context=65536, only=only)  # 96 GiB of scores
    training.config = replace(training.config, evaluation_batches=1)
    training.run()
    standard, sdpa = training.rows()
    assert standard.error.startswith("OutOfMemoryError") and standard.ms is None
    assert sdpa.error is None and sdpa.ms > 0
