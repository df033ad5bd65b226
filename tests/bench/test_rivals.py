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
