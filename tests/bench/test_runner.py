import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

from tilewise.bench import results, runner
from tilewise.bench.cells import Cell
from tilewise.bench.meters import DeviceLostError
from tilewise.bench.providers import EAGER, Shape
from tilewise.bench.results import Output
from tilewise.bench.runner import Runner

OTHER = replace(EAGER, name="other", has_dropout=False, has_backward=False)


def cells(*lengths, direction="fwd", **more):
    return [Cell("generations", direction, Shape(1, n, 1, 8, **more)) for n in lengths]


@dataclass
class Counted:
    """A meter that gives every call its length in milliseconds."""

    lost_at: int = 0
    protocols: tuple[str, ...] = ("burst",)

    def measure(self, cell, providers):
        if cell.shape.seqlen == self.lost_at:
            raise DeviceLostError("gone")
        return [
            results.row(
                cell.suite,
                p,
                cell.shape,
                "burst",
                direction=cell.direction,
                seconds=cell.shape.seqlen / 1e3,
            )
            for p in providers
        ]


def run(tmp_path, chosen, verify=lambda provider, shape, backward: None, meter=None, **more):
    output = Output(tmp_path / "r.json", tmp_path / "r.csv", {"gpu": "G"})
    found = Runner(meter or Counted(), [EAGER, OTHER], verify, output, **more)
    found.run(chosen)
    return found, json.loads((tmp_path / "r.json").read_text())


def test_every_cell_and_provider_has_a_row_and_is_saved(tmp_path):
    _, saved = run(tmp_path, cells(16, 32), facts={"absent": {"fa9": "no module"}})
    assert [(r["provider"], r["ms"]) for r in saved["rows"]] == [
        ("eager", 16.0),
        ("other", 16.0),
        ("eager", 32.0),
        ("other", 32.0),
    ]
    assert saved["absent"] == {"fa9": "no module"} and saved["board"] == {"gpu": "G"}
    lines = (tmp_path / "r.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("suite,provider,")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["r.csv", "r.json"]


def test_the_file_is_whole_after_each_cell(tmp_path):
    counts = []

    def tick(text):
        counts.append(len(json.loads((tmp_path / "r.json").read_text())["rows"]))

    run(tmp_path, cells(16, 32, 64), tick=tick)
    assert counts == [2, 4, 6]


def test_what_a_provider_does_not_have_is_said(tmp_path):
    _, saved = run(tmp_path, [*cells(16, dropout_p=0.1), *cells(16, direction="bwd")])
    said = [r["error"] for r in saved["rows"] if r["provider"] == "other"]
    assert said == ["other has no dropout", "other has no backward"]
    assert all(r["ms"] for r in saved["rows"] if r["provider"] == "eager")


def test_a_wrong_provider_gets_no_number_and_is_checked_once(tmp_path):
    asked = []

    def verify(provider, shape, backward):
        asked.append((provider.name, backward))
        return "out: error 1" if provider.name == "eager" else None

    found, saved = run(tmp_path, cells(16, 32), verify)
    assert asked == [("eager", False), ("other", False)]
    assert found.wrong == saved["wrong"] == ["out: error 1"]
    assert [r["error"] for r in saved["rows"]] == ["wrong: out: error 1", None] * 2


def test_a_check_that_raises_is_a_reason(tmp_path):
    def verify(provider, shape, backward):
        raise NotImplementedError("odd length")

    found, saved = run(tmp_path, cells(16), verify)
    assert {r["error"] for r in saved["rows"]} == {
        "its check raised NotImplementedError: odd length"
    }
    assert found.wrong == []


def test_after_the_time_limit_nothing_starts_and_the_rest_is_named(tmp_path, monkeypatch):
    clock = iter([0.0, 5.0, 11.0])
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found, saved = run(tmp_path, cells(16, 32, 64), limit=10.0)
    assert {r["seqlen_q"] for r in saved["rows"]} == {16}
    assert len(saved["left_out"]) == 2 and "length 32" in found.left_out[0]


def test_a_lost_device_ends_the_run_and_keeps_its_rows(tmp_path):
    found, saved = run(tmp_path, cells(16, 32, 64), meter=Counted(lost_at=32))
    assert {r["seqlen_q"] for r in saved["rows"]} == {16}
    assert saved["device_lost"] == found.lost == "gone" and len(saved["left_out"]) == 2
