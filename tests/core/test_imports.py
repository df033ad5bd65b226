"""What an import pulls in, each in a fresh process."""

import os
import subprocess
import sys

import pytest

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def python(code):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # as a user's
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["problem", "mask", "features", "units"])
def test_core_imports_neither_torch_nor_triton(module):
    # the package's __init__ needs torch, so core is taken from its folder
    python(
        BLOCK.format(blocked=("torch", "triton", "numpy"))
        + "import types, importlib.util\n"
        + "spec = importlib.util.find_spec('tilewise')\n"
        + "package = types.ModuleType('tilewise')\n"
        + "package.__path__ = list(spec.submodule_search_locations)\n"
        + "sys.modules['tilewise'] = package\n"
        + f"import tilewise.core.{module}\n"
        + "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
    )


def test_import_works_without_what_is_optional():
    python(
        BLOCK.format(blocked=("triton", "matplotlib", "rich", "psutil", "transformers"))
        + "import tilewise, tilewise.testing\n"
        + "import torch\n"
        + "x = torch.zeros(1, 2, 1, 4)\n"
        + "assert tilewise.flash_attn_func(x, x, x).shape == x.shape\n"
    )


def test_import_pulls_in_nothing_heavy():
    new = python(
        "import sys, torch\nbefore = set(sys.modules)\nimport tilewise\n"
        "print('\\n'.join(set(sys.modules) - before))"
    ).split()
    assert "tilewise.api" in new
    for name in ("triton", "matplotlib", "rich", "psutil", "transformers", "tilewise.cli",
                 "tilewise.bench", "tilewise.testing"):  # fmt: skip
        assert not [m for m in new if m == name or m.startswith(name + ".")], name


def test_import_does_not_start_cuda_or_compile():
    python(
        "import tilewise, torch, sys\nassert not torch.cuda.is_initialized()\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
