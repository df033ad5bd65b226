"""Memory that does not grow with the group or the square of the length: C26."""

import sys

import pytest

from .tools import finish, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc"),
]

# Prints the growth in KiB of the peak of resident memory during one forward and backward.
PROGRAM = """
import sys
import torch, tilewise

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1])

def forward_backward(length, kind):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, length, 32, 64, generator=gen).requires_grad_()
    k, v = (torch.randn(1, length, 2, 64, generator=gen).requires_grad_() for _ in range(2))
    mask = torch.rand(1, 1, 1, length, generator=gen) > 0.1
    leaves = [q, k, v]
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf")).requires_grad_()
        leaves.append(mask)
    dout = torch.ones(()).expand(q.shape)
    before = status("VmRSS")
    out, lse = tilewise.flash_attn_func(
        q, k, v, attn_bias=mask, return_lse=True, algorithm=sys.argv[3]
    )
    found = torch.autograd.grad(out, leaves, dout)
    results = sum(x.numel() * x.element_size() for x in (out, lse, *found))
    return before, results

length, kind = int(sys.argv[1]), sys.argv[2]
forward_backward(64, kind)  # what torch sets up once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
before, results = forward_backward(length, kind)
print(status("VmHWM") - before - results // 1024)
"""


@pytest.mark.parametrize(
    ("length", "kind", "algorithm"),
    [(8192, "bool", "fa2"), (2048, "float", "fa2"), (2048, "bool", "fa1")],
)
def test_c26_grouped_heads_with_a_mask_stay_within_256_mib(length, kind, algorithm):
    """C26 huggingface/transformers#46960: one head's scores of 8192 are 256 MiB, all 8 GiB.

    At 2048 the scores of all heads are 512 MiB. One thread, so that other processes do not slow it.
    """
    grown = int(finish(start(PROGRAM, length, kind, algorithm, OMP_NUM_THREADS="1"), timeout=300))
    assert grown < 256 * 1024, f"{grown // 1024} MiB beyond inputs and results"
