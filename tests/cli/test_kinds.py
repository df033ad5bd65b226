"""Arguments that cannot be right end before any work, with a line that names them."""

import pytest

from tilewise.cli import main


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["demo", "--quick", "--out", "/proc/x"], "--out: /proc/x:"),
        (["bench", "--json", "/proc/x/y.json"], "--json: /proc/x:"),
        (["bench", "--plot", "/"], "--plot: /: is a folder"),
        (["bench", "--seconds", "-1"], "--seconds: -1.0: must be positive"),
        (["bench", "--seq-len", "64,"], "--seq-len: '64,': must be integers and commas"),
        (["bench", "--seq-len", "0"], "--seq-len: 0: must be at least 1"),
    ],
    ids=lambda x: "-".join(x[1:]).replace("/", "_") if isinstance(x, list) else "",
)
def test_refused_at_once(line, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
