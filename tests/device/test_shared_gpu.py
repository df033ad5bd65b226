"""A GPU that another process uses at the same time, for which each kernel is suspended."""

import subprocess
import sys
import time

import pytest
import torch

from tilewise import testing

from .tools import qkv, results, same_bits

SECONDS = 3.0
OTHER = """
import torch
a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
print("busy", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def other_process():
    """Multiplies matrices all the time."""
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"busy\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.alone
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_results_have_equal_bits_and_are_whole(backend, d, other_process):
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    inputs = qkv(1, 8192, 8192, 8, 8, d=d)
    dout = torch.randn_like(inputs["q"])
    options = {"backend": backend, "causal": True, "deterministic": True}
    first = results(inputs, dout, **options)
    stop = time.monotonic() + SECONDS
    with testing.poisoned_memory():
        while time.monotonic() < stop:
            same_bits(results(inputs, dout, **options), first)
