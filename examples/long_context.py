"""Attention over a long sequence, forward and backward: time, memory, and whether it is right.

python examples/long_context.py
python examples/long_context.py --seq-len 65536 --n-heads 16 --n-heads-kv 4 --window 4096

Random rows of out, dq, dk and dv are held against the definition in float64, computed for these
rows alone. The status is 1 when one is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import tilewise
from tilewise.bench import memory

ROWS = 8  # checked in each of a few heads
HEADS = 4
# Largest errors as ``error_of`` has them; halves round weights and results to 8 or 11 bits.
LIMITS = {torch.float32: 2**-16, torch.float16: 2**-7, torch.bfloat16: 2**-7}


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a row sees, by flash-attn's ``causal`` and ``window_size``."""

    seqlen: int
    causal: bool
    window: int  # keys to either side of the diagonal, -1 for all

    @property
    def window_size(self) -> tuple[int, int]:
        """As flash-attn has it."""
        return self.window, 0 if self.causal else self.window

    def sees(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(rows, keys) bool, of index tensors of one dimension each."""
        ahead = keys - rows[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.window >= 0:
            seen = ahead.abs() <= self.window
        return seen & (ahead <= 0) if self.causal else seen

    def pairs(self) -> int:
        """How many (row, key) are seen."""
        rows = torch.arange(self.seqlen)
        reach = self.seqlen if self.window < 0 else self.window
        first, last = (rows - reach).clamp(min=0), (rows + reach).clamp(max=self.seqlen - 1)
        return int(((rows if self.causal else last) - first + 1).sum())


@dataclass(frozen=True, slots=True)
class Call:
    """A call and its results; lse is (1, nheads, seqlen), all else (1, seqlen, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def error_of(got: Tensor, weights: Tensor, size: Tensor, terms: Tensor) -> float:
    """Largest error of rows that are sums, weights @ terms, over what rounding may make of them.

    Rounding errors of the terms are independent, so that they add up like their squares:

        |got - exact| / (|exact| + sqrt(sum_j size_j^2 |terms_j|^2))

    Args:
        got: (rows, head_dim).
        weights: (rows, n) float64.
        size: (rows, n), what ``weights`` is made of; more than it where that cancels.
        terms: (n, head_dim) float64.
    """
    exact = weights @ terms
    scale = exact.norm(dim=-1) + (size.square() @ terms.square().sum(-1)).sqrt()
    return float(((got.double() - exact).norm(dim=-1) / scale).max())


def scores_gradient(
    p: Tensor, x: Tensor, y: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """scale * p * (x @ y.T - delta), and the size of what that is made of; all float64."""
    dp, dp_size = x @ y.T, (x.square() @ y.square().T).sqrt()
    return scale * p * (dp - delta), scale * p * (dp.abs() + dp_size + delta.abs())


def check(call: Call, mask: Mask, seed: int) -> dict[str, float]:
    """Errors of a few rows, as ``error_of`` has them: of each result its largest.

    Rows of out and dq follow from q, k, v and dout alone. Rows of dk and dv are sums over all
    queries, for which the call's lse and out are taken; rows of these have been checked.
    """
    nheads, head_dim = call.q.shape[2:]
    group = nheads // call.k.shape[2]
    scale = head_dim**-0.5
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(mask.seqlen, device=call.q.device)
    errors = dict.fromkeys(("out", "lse", "dq", "dv", "dk"), 0.0)

    def note(name: str, error: float) -> None:
        errors[name] = max(errors[name], math.inf if math.isnan(error) else error)

    for head in torch.randperm(nheads, generator=generator)[:HEADS].tolist():
        k, v = (x[0, :, head // group].double() for x in (call.k, call.v))
        rows = torch.randint(mask.seqlen, (ROWS,), generator=generator)
        rows[:2] = torch.tensor([0, mask.seqlen - 1])  # the ends too
        rows = rows.to(every.device)
        q, dout = (x[0, rows, head].double() for x in (call.q, call.dout))
        s = (scale * q @ k.T).masked_fill(~mask.sees(rows, every), float("-inf"))
        lse = s.logsumexp(-1)
        p = torch.exp(s - lse[:, None])  # (rows, seqlen)
        ds, ds_size = scores_gradient(p, dout, v, (dout * (p @ v)).sum(-1, keepdim=True), scale)
        note("out", error_of(call.out[0, rows, head], p, p, v))
        note("lse", float((call.lse[0, head, rows].double() - lse).abs().max()))
        note("dq", error_of(call.dq[0, rows, head], ds, ds_size, k))

    for head in torch.randperm(call.k.shape[2], generator=generator)[:HEADS].tolist():
        keys = torch.randint(mask.seqlen, (ROWS,), generator=generator)
        keys[:2] = torch.tensor([0, mask.seqlen - 1])
        keys = keys.to(every.device)
        k, v = (x[0, keys, head].double() for x in (call.k, call.v))
        parts = []
        for h in range(head * group, (head + 1) * group):  # the queries' heads that read this one
            q, dout, out = (x[0, :, h].double() for x in (call.q, call.dout, call.out))
            s = (scale * k @ q.T).masked_fill(~mask.sees(every, keys).T, float("-inf"))
            p = torch.exp(s - call.lse[0, h].double())  # (keys, seqlen)
            ds, ds_size = scores_gradient(p, v, dout, (dout * out).sum(-1), scale)
            parts.append((p, dout, ds, ds_size, q))
        p, ds, ds_size = (torch.cat([part[i] for part in parts], dim=1) for i in (0, 2, 3))
        dout, q = (torch.cat([part[i] for part in parts]) for i in (1, 4))
        note("dv", error_of(call.dv[0, keys, head], p, p, dout))
        note("dk", error_of(call.dk[0, keys, head], ds, ds_size, q))
    return errors


def run(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask
) -> tuple[Call, tuple[float, float]]:
    """The call, forward and backward, and the seconds of each."""
    wait = torch.cuda.synchronize if q.is_cuda else lambda: None
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    wait()
    begin = time.perf_counter()
    out, lse = tilewise.flash_attn_func(
        *inputs, causal=mask.causal, window_size=mask.window_size, return_lse=True
    )
    wait()
    middle = time.perf_counter()
    gradients = torch.autograd.grad(out, inputs, dout)
    wait()
    seconds = middle - begin, time.perf_counter() - middle
    return Call(q, k, v, dout, out.detach(), lse.detach(), *gradients), seconds


def device_memory(device: str) -> int:
    """Bytes that the GPU or the machine has."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an option: a whole number that is not less."""

    def integer(word: str) -> int:
        if (value := int(word)) < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return integer


def main(arguments: list[str] | None = None) -> int:
    """Runs, measures and checks one call; the status."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seq-len", type=at_least(1), help="default: 262144 on a GPU, 16384 on a CPU")
    add("--n-heads", type=at_least(1), help="default: 16 on a GPU, 4 on a CPU")
    add("--n-heads-kv", type=at_least(1), help="of keys and values; default: as many as --n-heads")
    add("--d-head", type=at_least(1), help="default: 128 on a GPU, 64 on a CPU")
    add("--window", type=at_least(-1), default=-1, help="keys seen to either side; -1: all")
    add("--causal", action=argparse.BooleanOptionalAction, default=True)
    add("--dtype", choices=["float32", "float16", "bfloat16"], help="default: bfloat16 on a GPU")
    add("--device", choices=["cuda", "cpu"], default=device)
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch.cuda.is_available() is False")
    gpu = options.device == "cuda"
    seqlen = options.seq_len or (262144 if gpu else 16384)
    nheads = options.n_heads or (16 if gpu else 4)
    nheads_kv = options.n_heads_kv or nheads
    if nheads % nheads_kv:
        parser.error(f"--n-heads, {nheads}, must be a multiple of --n-heads-kv, {nheads_kv}")
    head_dim = options.d_head or (128 if gpu else 64)
    dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    mask = Mask(seqlen, options.causal, options.window)

    generator = torch.Generator(options.device).manual_seed(options.seed)

    def random(heads: int) -> Tensor:
        shape = 1, seqlen, heads, head_dim
        return torch.randn(shape, generator=generator, device=options.device, dtype=dtype)

    q, k, v, dout = (random(heads) for heads in (nheads, nheads_kv, nheads_kv, nheads))
    few = seqlen if gpu else 256  # kernels are compiled in a call of the same size
    run(*(x[:, :few] for x in (q, k, v, dout)), mask)
    done: list[tuple[Call, tuple[float, float]]] = []
    peak_of = memory.device_peak if gpu else memory.resident_peak
    peak = peak_of(lambda: done.append(run(q, k, v, dout, mask)))
    call, seconds = done[0]

    print(
        f"{seqlen:,} tokens, {nheads} heads of {head_dim}, {nheads_kv} of keys, {dtype}, "
        f"causal={mask.causal}, window={mask.window}, {options.device}"
    )
    flops = 4 * head_dim * nheads * mask.pairs()  # of the forward; the backward has 2.5 times that
    for name, factor, taken in zip(("forward", "backward"), (1, 2.5), seconds, strict=True):
        tflops = factor * flops / taken / 1e12
        print(f"{name:8}  {taken:8.3f} s  {tflops:8.3f} TFLOPS")
    matrix, there = nheads * seqlen**2 * dtype.itemsize, device_memory(options.device)
    print(f"peak memory beyond the inputs, out and gradients included: {peak / 2**20:,.0f} MiB")
    verdict = "cannot be held" if matrix > there else "and its softmax as much again"
    print(
        f"the score matrix of standard attention: {matrix / 2**30:,.2f} GiB, {verdict} "
        f"({there / 2**30:,.0f} GiB of memory here)"
    )
    errors = check(call, mask, options.seed)
    limit = LIMITS[dtype]
    print(f"errors of random rows against float64, at most {limit:.1e} allowed:")
    print("  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    if max(errors.values()) > limit:
        print("WRONG", file=sys.stderr)
        return 1
    print("right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
