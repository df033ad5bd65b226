import json
import math

import pytest
import torch

from tilewise.bench import gpt, pretraining
from tilewise.bench.pretraining import OTHER_SEED, Pretraining, config_for
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
    assert (big.dtype, big.steps, big.tokens) == ("bfloat16", 300, 8192)
    assert (tiny.steps, tiny.tokens, tiny.dtype, tiny.device) == (7, 96, "float32", "cpu")


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
    only = ("standard", OTHER_SEED, "sdpa")
    training = start(tmp_path, "cuda", steps=6, batch=2, context=128, only=only)
    training.run()
    assert not training.errors
    gaps = training.gaps()
    assert gaps["sdpa"] < gaps[OTHER_SEED]
    assert all(len(run.losses) == 6 for run in training.runs.values())
