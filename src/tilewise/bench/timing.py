"""Time of rivals, measured in turn within one run, so that a busy machine is busy for all.

Protocol "interleaved": after one warm call each, rounds in which every rival runs once, in an order
that rotates; each one's time is the median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .providers import BACKWARD, FORWARD, Provider, Shape, make_inputs

PROTOCOL = "interleaved"
MIN_ROUNDS, MAX_ROUNDS = 3, 50


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Median seconds of each call.

    Args:
        calls: what to time, by name.
        seconds: about how long to measure each; at least three rounds are run.
        tick: called after each round.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    names, rounds, spent = list(calls), 0, 0.0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and spent < seconds * len(names)):
        turn = rounds % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            calls[name]()
            samples[name].append(time.perf_counter() - start)
            spent += samples[name][-1]
        rounds += 1
        tick()
    return {name: statistics.median(found) for name, found in samples.items()}


def prepare(provider: Provider, shape: Shape, direction: str) -> Callable[[], object]:
    """The call to time: a forward without autograd, or the backward of a forward done once."""
    q, k, v, dout = (provider.layout(x) for x in make_inputs(shape))
    if direction == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return provider.attend(q, k, v, shape.causal)

        return forward
    assert direction == BACKWARD
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = provider.attend(q, k, v, shape.causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
