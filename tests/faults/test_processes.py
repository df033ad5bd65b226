"""Processes that start together: C24. The CPU backends keep no kernel cache; so it must stay."""

import sys

import pytest

from .tools import finish, start

# Waits for a line, so that all processes begin their first call at one time.
PROGRAM = """
import hashlib, itertools, random, sys
import torch, tilewise
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
signatures = list(itertools.product((16, 24), (False, True), (0.0, 2.0)))[:6]
results = {}
order = list(range(len(signatures)))
random.Random(int(sys.argv[1])).shuffle(order)
for n in order:
    head_dim, causal, softcap = signatures[n]
    gen = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 70, 2, head_dim, generator=gen).requires_grad_() for _ in range(3))
    out, lse = tilewise.flash_attn_func(q, k, v, causal=causal, softcap=softcap, return_lse=True)
    found = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    total = hashlib.sha256()
    for x in (out, lse, *found):
        total.update(x.detach().numpy().tobytes())
    results[n] = total.hexdigest()
print(hashlib.sha256("".join(results[n] for n in sorted(results)).encode()).hexdigest())
"""


def digests(number, **settings):
    """What ``number`` processes print that begin together."""
    processes = [start(PROGRAM, n, **settings) for n in range(number)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return {finish(process).strip() for process in processes}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def test_c24_processes_that_start_together_agree(tmp_path):
    """C24 triton-lang/triton#2688: a race on the cache of compiled kernels."""
    found = digests(4, cwd=tmp_path)
    assert len(found) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is the folder that nobody can write to")
def test_c24_no_home_and_nowhere_to_write():
    """C24 flashinfer-ai/flashinfer#539: HOME unset, and a read-only working directory."""
    nothing = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "USER"))
    found = digests(4, cwd="/proc", **nothing)
    assert len(found) == 1
