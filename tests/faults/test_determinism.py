"""Equal bits run to run, in one process and in another: C21."""

import hashlib
from pathlib import Path

import pytest
import torch

import tilewise

from .tools import BACKENDS, finish, int32, rand, start

S, H, HK, D = 530, 4, 1, 16  # three tiles of keys for each query


def call_of(kind, q, k, v, **arguments):
    """(out, lse) of one kind of call on (1, S, heads, D) tensors."""
    arguments = {"return_lse": True, **arguments}
    cu = int32(0, S // 3, S)
    if kind == "dense":
        return tilewise.flash_attn_func(q, k, v, **arguments)
    if kind == "varlen":
        return tilewise.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, S, S, causal=True, **arguments
        )
    if kind == "kvpacked":
        kv = torch.stack((k, v), 2)
        return tilewise.flash_attn_kvpacked_func(q, kv, causal=True, **arguments)
    if kind == "causal window":
        return tilewise.flash_attn_func(q, k, v, causal=True, window_size=(200, 0), **arguments)
    if kind == "dropout":
        return tilewise.flash_attn_func(q, k, v, dropout_p=0.2, seed=7, **arguments)
    bias, sink = rand(1, 1, S, S, seed=5), rand(H, seed=6)
    leaves = [x.to(q.dtype).requires_grad_() for x in (bias, sink)]
    out, lse = tilewise.flash_attn_func(q, k, v, attn_bias=leaves[0], sink=leaves[1], **arguments)
    out.operands = leaves
    return out, lse


KINDS = ("dense", "varlen", "kvpacked", "causal window", "dropout", "bias and sink")


def bits(kind, backend, dtype, **arguments):
    """Every result and gradient of one call."""
    shapes = ((1, S, H, D), (1, S, HK, D), (1, S, HK, D))
    leaves = [rand(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]
    out, lse = call_of(kind, *leaves, **arguments, **backend)
    leaves += getattr(out, "operands", [])
    dout = rand(*out.shape, seed=8, dtype=dtype)
    found = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    return [x.detach() for x in (out, lse, *found)]


def digest(kind, backend, dtype, **arguments):
    total = hashlib.sha256()
    for x in bits(kind, backend, dtype, **arguments):
        total.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_c21_equal_bits_in_one_process(kind, backend):
    """C21 Dao-AILab/flash-attention#2244: gradients of queries differed behind the flag."""
    check_again(kind, backend)


def check_again(kind, backend):
    first = bits(kind, backend, torch.float32, deterministic=True)
    for _ in range(3):
        again = bits(kind, backend, torch.float32, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_c21_torchs_own_switch(kind, backend):
    """C21: torch.use_deterministic_algorithms is the same as the flag."""
    first = bits(kind, backend, torch.float32, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        again = bits(kind, backend, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


PROGRAM = """
import sys
import torch
folder, package, threads, backends, rounds = sys.argv[1:]
torch.set_num_threads(int(threads))
sys.path.insert(0, folder)
here = __import__(package + ".test_determinism", fromlist=["digest"])
for _ in range(int(rounds)):
    for name in backends.split():
        for kind in here.KINDS:
            bits = here.digest(kind, here.BACKENDS[name], torch.bfloat16, deterministic=True)
            print(name, kind, bits, flush=True)
"""


def elsewhere(threads, backends, rounds):
    """Lines of backend, kind and digest from a process of its own."""
    package = __name__.rpartition(".")[0]
    folder = Path(__file__).parents[package.count(".") + 1]
    process = start(
        PROGRAM, folder, package, threads, " ".join(backends), rounds, OMP_WAIT_POLICY="passive"
    )
    return finish(process).splitlines()


def test_c21_equal_bits_in_another_process():
    """C21: and in a second process."""
    lines = elsewhere(1, BACKENDS, 1)
    for name, backend in BACKENDS.items():
        for kind in KINDS:
            here = digest(kind, backend, torch.bfloat16, deterministic=True)
            assert f"{name} {kind} {here}" in lines, (name, kind)


def test_c21_equal_bits_with_two_threads():
    """C21: the order of threads decides nothing."""
    lines = elsewhere(2, ["cpu-fa2", "cpu-fa1"], 4)
    assert len(lines) == 4 * 2 * len(KINDS)
    assert len(set(lines)) == 2 * len(KINDS)
