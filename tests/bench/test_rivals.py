import sys

import pytest
import torch

from tilewise.bench import rivals
from tilewise.bench.providers import PROVIDERS, Shape
from tilewise.dispatch import BACKENDS


def test_the_names_of_the_command_line_are_those_of_the_providers():
    assert tuple(rivals.providers_on("cuda")) == rivals.GPU_NAMES
    assert set(rivals.NAMES) == {*rivals.GPU_NAMES, *PROVIDERS}
    for device, names in rivals.GENERATIONS.items():
        assert set(names) <= set(rivals.providers_on(device))


def test_what_is_not_there_says_why():
    found = rivals.providers_on("cuda")
    for backend in ("triton", "gluon"):
        reason = found[f"tilewise-{backend}"].absent()
        assert (reason is None) == (backend in BACKENDS)
        assert reason is None or backend in reason
    assert found["eager"].absent() is None and found["tilewise"].absent() is None
    assert rivals._import_error("no_such_module") == (
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert rivals._import_error("json") is None


def test_a_module_that_breaks_on_import_is_absent(tmp_path, monkeypatch):
    (tmp_path / "broken_rival.py").write_text("raise OSError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    assert rivals._import_error("broken_rival") == "OSError: no library"


def test_flash_attn_is_called_by_its_function(tmp_path, monkeypatch):
    text = "def flash_attn_func(q, k, v, causal):\n    return q if causal else (k, None)\n"
    (tmp_path / "like_flash.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    bind = rivals._bind_flash("like_flash")
    q, k, v = (torch.full((1,), float(i)) for i in range(3))
    assert bind(Shape(causal=True))(q, k, v) is q
    assert bind(Shape(causal=False))(q, k, v) is k


def test_flash_attn_is_told_of_dropout_where_there_is_some(tmp_path, monkeypatch):
    text = "def flash_attn_func(q, k, v, dropout_p=0.0, causal=False):\n    return q * dropout_p\n"
    (tmp_path / "like_fa2.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    bind, q = rivals._bind_flash("like_fa2"), torch.ones(1)
    assert bind(Shape(dropout_p=0.25))(q, q, q) == 0.25 and bind(Shape())(q, q, q) == 0.0


def test_a_flash_attn_of_fa4_alone_is_no_flash_attn_2(tmp_path, monkeypatch):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("")
    for name in [n for n in sys.modules if n.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    true = rivals._import_error.__wrapped__  # what is kept would outlive the test
    monkeypatch.setattr(rivals, "_import_error", true)
    found = rivals.providers_on("cuda")
    try:
        assert found["fa4"].absent() is None
        assert "flash_attn.flash_attn_interface" in found["flash-attn"].absent()
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]


def test_fa3_alone_may_lack_a_backward():
    found = rivals.providers_on("cuda")
    assert all(p.has_backward for name, p in found.items() if name != "fa3")
    without = {name for name, p in found.items() if not p.has_dropout}
    assert without == {"fa3", "fa4", "flex"}


@pytest.mark.gpu
def test_inputs_are_made_on_the_device():
    from tilewise.bench.providers import make_inputs

    shape = Shape(1, 8, 2, 16, dtype="bfloat16", device="cuda")
    first, again = make_inputs(shape), make_inputs(shape)
    for x, y in zip(first, again, strict=True):
        assert x.device.type == "cuda" and x.dtype == torch.bfloat16 and torch.equal(x, y)
