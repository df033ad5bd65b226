from tilewise.bench import panels, report, results
from tilewise.bench.providers import EAGER, PROVIDERS, Shape

PNG = b"\x89PNG\r\n\x1a\n"


def _row(provider, seqlen, protocol="sustained", error=None, peak=None, **shape):
    sizes = {"batch": 1, "nheads": 12, "head_dim": 64, "causal": False, **shape}
    seconds = None if error else 1e-3
    return results.row(
        "generations",
        provider,
        Shape(seqlen=seqlen, **sizes),
        protocol,
        direction="fwd",
        seconds=seconds,
        peak=peak,
        error=error,
    )


OURS = PROVIDERS["tilewise"]


def test_providers_of_a_kind_of_call_stand_together_over_the_lengths():
    rows = [
        _row(EAGER, 1024),
        _row(OURS, 1024),
        _row(EAGER, 2048, error="out of memory"),
        _row(OURS, 2048),
        _row(OURS, 1024, dropout_p=0.1),
        _row(OURS, 1024, protocol="burst"),
    ]
    lines = [line.split() for line in report.speed(rows, "sustained", True).splitlines()]
    assert lines[0][-2:] == ["1024", "2048"]
    assert lines[2:] == [
        ["fwd", "12", "64", "full", "-", "eager", "3", "-"],
        ["fwd", "12", "64", "full", "-", "tilewise", "3", "13"],
        ["fwd", "12", "64", "full", "0.1", "tilewise", "3", "-"],
    ]
    assert report.peak_memory(rows) == ""


def test_each_reason_is_said_once_with_its_first_place():
    rows = [
        _row(EAGER, n, protocol, error="out of memory")
        for protocol in ("burst", "sustained")
        for n in (1024, 2048, 4096)
    ]
    assert report.reasons(rows) == [
        "eager: out of memory (fwd full d 64, 12 heads, length 1024 and 2 more)"
    ]


def test_another_number_of_heads_has_a_figure_of_its_own(tmp_path):
    rows = [_row(p, n, peak=1 << 20) for p in (EAGER, OURS) for n in (1024, 2048)]
    rows += [_row(OURS, 4096, nheads=4), _row(EAGER, 4096, nheads=4, error="out of memory")]
    board = {"gpu": "G", "torch": "T"}
    written = panels.draw(rows, board, tmp_path / "g.png", {"eager": "standard attention"})
    assert [path.name for path in written] == ["g.png", "g-2.png"]
    assert all(path.read_bytes()[:8] == PNG for path in written)


def test_head_dimensions_of_one_hidden_size_share_a_figure():
    rows = [_row(OURS, 1024, nheads=2048 // d, head_dim=d) for d in (64, 128, 256)]
    assert panels.sets(rows) == [rows]


def test_a_rested_chip_is_drawn_only_where_nothing_else_was_measured():
    burst = [_row(OURS, 1024, protocol="burst")]
    assert panels.protocol_of([*burst, _row(OURS, 1024)]) == "sustained"
    assert panels.protocol_of(burst) == "burst"
